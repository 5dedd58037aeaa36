"""`deepspeed.runtime.utils`: norms and clipping, partitions, copies and the like, for scripts that do these."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext as noop_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from wherry.compat.deepspeed import groups
from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.comm import get_rank, get_world_size, started
from wherry.errors import WherryError
from wherry.observe.log import logger
from wherry.observe.memory import device_memory, format_bytes, host_memory
from wherry.parallel.topology import default_device

__all__ = ["noop_context"]

# --- norms ---


def is_model_parallel_parameter(p: Any) -> bool:
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    x = x._values() if x.is_sparse else x
    return ~torch.isfinite(x).all() if x.numel() else torch.tensor(False, device=x.device)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, mpu: Any) -> torch.Tensor:
    """Of all tensors as one vector, over the model-parallel ranks of an `mpu`."""
    device = tensors[0].device if tensors else torch.device(get_accelerator().current_device_name())
    parts = [torch.linalg.vector_norm(tensor.detach().float(), norm_type) for tensor in tensors]
    infinite = norm_type == math.inf
    stacked = torch.stack(parts) if parts else torch.zeros(1, device=device)
    total = stacked.max() if infinite else stacked.pow(norm_type).sum()
    if mpu is not None:
        op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    return total if infinite else total.pow(1.0 / norm_type)


def _own(parameters: torch.Tensor | Iterable[torch.Tensor], mpu: Any) -> list[torch.Tensor]:
    """Without those that another model-parallel rank counts as well."""
    first = mpu is None or groups._get_model_parallel_rank() == 0
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [p for p in given if first or is_model_parallel_parameter(p)]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clip gradients in place, by the mean of the norms of the data-parallel ranks; returns it."""
    trained = [p for p in _own(parameters, None) if p.grad is not None]
    counted = trained if float(norm_type) == math.inf else _own(trained, mpu)
    total = _norm([p.grad for p in counted if p.grad is not None], float(norm_type), mpu)
    if started():
        group = groups._get_data_parallel_group()
        total = total / get_world_size(group)
        dist.all_reduce(total, group=group)
    nn.utils.clip_grads_with_norm_(trained, max_norm, total)
    return total


def get_weight_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the values; -1 if it is not finite."""
    return get_global_norm_of_tensors(_own(parameters, mpu), norm_type, mpu).item()


def get_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the gradients; -1 if it is not finite."""
    gradients = [p.grad for p in _own(parameters, mpu) if p.grad is not None]
    return get_global_norm_of_tensors(gradients, norm_type, mpu).item()


def get_global_norm(norm_list: Iterable[float]) -> float:
    return math.sqrt(sum(norm**2.0 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None, use_graph: bool = False,
    moe_ep_group: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The norm of the tensors as one vector; -1 if it is not finite."""
    total = _norm(list(input_tensors), float(norm_type), mpu)
    return torch.where(torch.isfinite(total), total, -1.0)


def clip_tensors_by_global_norm(
    input_tensors: Iterable[torch.Tensor], max_norm: float = 1.0, global_norm: Any = None, mpu: Any = None,
    eps: float = 1e-6, use_graph: bool = False,
) -> Any:  # fmt: skip
    tensors = list(input_tensors)
    norm = get_global_norm_of_tensors(tensors, mpu=mpu) if global_norm is None else global_norm
    if (factor := max_norm / (norm + eps)) < 1:
        for tensor in tensors:
            tensor.detach().mul_(factor)
    return norm


class CheckOverflow:
    """Whether gradients hold inf or NaN, on this rank or on those that share a model's parts with it."""

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.mpu = mpu
        self.params = [p for group in param_groups or () for p in group]
        self._group = dist.group.WORLD if zero_reduce_scatter else mpu and mpu.get_model_parallel_group()

    def _anywhere(self, found: bool, group: Any) -> bool:
        flag = torch.tensor([float(found)], device=get_accelerator().current_device_name())
        if group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def check_using_norm(self, norm_group: Sequence[float], reduce_overflow: bool = True) -> bool:
        group = self.mpu.get_model_parallel_group() if self.mpu is not None else None
        everywhere = dist.group.WORLD if reduce_overflow else None
        return self._anywhere(-1 in norm_group, group if self.mpu is not None else everywhere)

    def check(self, param_groups: Any = None) -> bool:
        return self.has_overflow(self.params if param_groups is None else [p for group in param_groups for p in group])

    def has_overflow(self, params: Iterable[Any], has_moe_params: bool | None = None) -> bool:
        return self._anywhere(self.has_overflow_serial(params), self._group)

    def has_overflow_serial(self, params: Iterable[Any]) -> bool:
        return any(p.grad is not None and bool(has_inf_or_nan(p.grad)) for p in params)


# --- partitions ---


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Borders of parts whose sizes differ by one at most, the larger ones first."""
    size, larger = divmod(num_items, num_parts)
    return [part * size + min(part, larger) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Borders of parts whose heaviest and lightest weigh as nearly the same as may be.

    Of several ways that are as good, parts at the end are the lighter.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0, *prefix_sum_inc(weights)]
    # Of the first i items in so many parts: the difference, the heaviest, the lightest, where the last part begins.
    best = {0: (0.0, 0.0, math.inf, 0)}
    rows = []
    for part in range(1, num_parts + 1):
        row: dict[int, tuple[float, float, float, int]] = {}
        for end in range(part, count + 1):
            for start in [at for at in best if at < end]:
                _, heaviest, lightest, _ = best[start]
                last = sums[end] - sums[start]
                heaviest, lightest = max(heaviest, last), min(lightest, last)
                if end not in row or heaviest - lightest <= row[end][0]:
                    row[end] = (heaviest - lightest, heaviest, lightest, start)
        rows.append(row)
        best = row
    borders = [count]
    for row in reversed(rows):
        borders.append(row[borders[-1]][3])
    return borders[::-1]


class PartitionedTensor:
    """A tensor of which each rank of a group keeps a part."""

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:stop].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """The tensor that `to_meta` has told of."""
        dims, *rest = meta.tolist()
        made = cls(torch.empty(0), group)
        made.orig_size, (parts, rank, *made.partition) = rest[:dims], rest[dims:]
        assert (parts, rank) == (made.num_parts, made.rank), "PartitionedTensor.from_meta: another rank's or group's"
        made.orig_device = torch.device(device or get_accelerator().device_name())
        made.local_data = local_part.detach()
        return made

    def to_meta(self) -> torch.Tensor:
        told = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(told, dtype=torch.long, device=self.orig_device)

    def full(self, device: Any = None) -> torch.Tensor:
        largest = max(stop - start for start, stop in itertools.pairwise(self.partition))
        own = self.local_data.new_zeros(largest)
        own[: self.local_data.numel()] = self.local_data
        all_of = own.new_empty(self.num_parts, largest)
        dist.all_gather_into_tensor(all_of.view(-1), own, group=self.group)
        parts = [all_of[i, : stop - start] for i, (start, stop) in enumerate(itertools.pairwise(self.partition))]
        return torch.cat(parts).view(self.orig_size).to(device or self.orig_device)

    def data(self) -> torch.Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size


# --- values ---


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """The same tensors, on the device; without a criterion all of them are copied there."""

    def moved(value: Any) -> Any:
        if criterion_func is None:
            return value.to(device) if torch.is_tensor(value) else value
        if criterion_func(value):
            value.data = value.data.to(device)
        return value

    return tree_map(moved, item)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """
    >>> call_to_str("int", 3, base=2)
    'int(3, base=2)'
    """
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """How many parameters the backward that runs now gives gradients; for its hooks."""
    if torch._C._current_graph_task_id() == -1:
        raise NotInBackward("count_used_parameters_in_backward: no backward runs; call it from a backward's hook")
    with torch.enable_grad():
        trained = [p for p in parameters if torch.is_tensor(p) and p.requires_grad]
        nodes = {torch.autograd.graph._get_grad_fn_or_grad_acc(p) for p in trained} - {None}
    return sum(map(torch._C._will_engine_execute_node, nodes))


class NotInBackward(WherryError, RuntimeError):
    """What only a backward knows was asked outside of one."""


def set_random_seed(seed: int) -> None:
    """Of Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


class DummyOptim:
    """Parameters as the one group of an optimizer that there is not."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


# --- memory ---


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log memory in use, on one rank or on all."""
    if print_rank not in (-1, get_rank()):
        return
    host, device = host_memory(), device_memory(default_device())
    on_device = f"device {format_bytes(device.allocated)}, peak {format_bytes(device.peak)}; " if device else ""
    logger.info("%s: %shost %s, peak %s", msg, on_device, format_bytes(host.resident), format_bytes(host.peak))
    if reset_max:
        get_accelerator().reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log memory in use, on rank 0, if `force` is given. Peaks are counted anew from here."""
    if force:
        gc.collect()
        memory_status(message, print_rank=0, reset_max=True)


def empty_cache() -> None:
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def torch_memory_reserved() -> int:
    return get_accelerator().memory_reserved()


def torch_max_memory_reserved() -> int:
    return get_accelerator().max_memory_reserved()


# --- coalesced collectives ---


def reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """This rank's part of each tensor's mean over the ranks, in one collective; the last ranks' may be shorter."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    sent = tensors[0].new_zeros(ranks, sum(sizes))
    offsets = [0, *itertools.accumulate(sizes)]
    for tensor, size, offset in zip(tensors, sizes, offsets, strict=False):
        for to, part in enumerate(tensor.detach().reshape(-1).split(size or 1)):
            sent[to, offset : offset + part.numel()] = part
    sent /= ranks
    mine = sent.new_empty(sent.shape[1])
    dist.reduce_scatter_tensor(mine, sent.view(-1), group=group)
    lengths = [min(max(tensor.numel() - rank * size, 0), size) for tensor, size in zip(tensors, sizes, strict=True)]
    return [mine[offset : offset + length] for offset, length in zip(offsets, lengths, strict=False)]
