"""Parameters that model-parallel ranks share out among themselves: DTensors, and those that are cut by hand.

The data axis knows only local tensors. Here is what of a logical parameter they are, and how a DTensor is given one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.parallel.comm import Comm

# Marks that Megatron-style code sets on a parameter of which each rank holds a part, newest first.
MARKS = ("tensor_model_parallel", "model_parallel")


@dataclass(frozen=True)
class LogicalSlice:
    """The part of a logical parameter that this rank holds, where tensor-parallel ranks have cut it.

    `global_shape` and `offsets` are None where a parameter is marked as cut and does not say along which dim.
    """

    global_shape: tuple[int, ...] | None
    offsets: tuple[int, ...] | None


def is_dtensor(tensor: torch.Tensor | None) -> bool:
    # Nobody has a DTensor who has not imported them; the import takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def parts(tensor: torch.Tensor, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """The plain tensors that one is made of, if it is: by their names, whose attributes they are."""
    names: list[str] = getattr(tensor, "__tensor_flatten__", lambda: ([], None))()[0]
    for name in names:
        inner = getattr(tensor, name)
        if hasattr(type(inner), "__tensor_flatten__"):
            yield from parts(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, tensor, name


def inside(tensor: torch.Tensor) -> tuple[Any, str] | None:
    """Whose attribute the tensor is that stands for one made of others: this rank's of a DTensor, else the largest."""
    if is_dtensor(tensor):
        return tensor, "_local_tensor"
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return None
    return max(((h, name) for _, h, name in parts(tensor)), key=lambda place: getattr(*place).nbytes, default=None)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor; of one that is made of others, the largest of them."""
    place = inside(tensor)
    return tensor if place is None else getattr(*place)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The same, outside of autograd."""
    found = part_of(tensor)
    return found.detach() if found is tensor else found


def slice_of(name: str, parameter: nn.Parameter, tensor: Comm) -> LogicalSlice | None:
    """What of the logical parameter this rank holds; None where that is all of it."""
    if is_dtensor(parameter):
        return _slice_of_dtensor(name, parameter)
    if not any(getattr(parameter, mark, False) for mark in MARKS):
        return None
    if tensor.size == 1:
        return None
    dim = getattr(parameter, "partition_dim", None)
    if dim is None or dim < 0:
        return LogicalSlice(None, None)
    shape, offsets = list(parameter.shape), [0] * parameter.dim()
    offsets[dim] = tensor.rank * shape[dim]
    shape[dim] *= tensor.size
    return LogicalSlice(tuple(shape), tuple(offsets))


def _slice_of_dtensor(name: str, parameter: Any) -> LogicalSlice | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in parameter.placements):
        raise WherryError(
            f"{name}: a parameter cannot rest as partial sums, got placements {parameter.placements}; "
            "redistribute it to Replicate() or Shard(dim) first"
        )
    if all(placement.is_replicate() for placement in parameter.placements) or parameter.device_mesh.size() == 1:
        return None
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert tuple(shape) == tuple(parameter._local_tensor.shape), (name, shape, parameter._local_tensor.shape)
    return LogicalSlice(tuple(parameter.shape), tuple(offsets))


def retype(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Let go of a parameter's data, and make it one of `dtype` on `device`."""
    if not is_dtensor(parameter):
        holder, attribute = inside(parameter) or (parameter, "data")
        setattr(holder, attribute, torch.empty(0, dtype=dtype, device=device))
        return
    given: Any = parameter
    if given._local_tensor.device != device:
        raise WherryError(
            f"a DTensor parameter rests on {given._local_tensor.device} and the engine computes on {device}; build the "
            "mesh with that device's type, and move the model there before it is parallelized"
        )
    from torch.distributed.tensor import DTensor

    # `data =` changes what C++ knows of the wrapper, and leaves what Python knows.
    other: Any = DTensor.from_local(
        torch.empty(given._local_tensor.shape, dtype=dtype, device=device),
        given.device_mesh,
        given.placements,
        run_check=False,
        shape=given.shape,
        stride=given.stride(),
    )
    given.data = other
    given._spec = other._spec
    given._local_tensor = other._local_tensor.new_empty(0)


def local_gradient(parameter: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, placed as its parameter is; a gradient in partial sums is summed."""
    if not is_dtensor(parameter):
        return grad
    wanted, given = parameter.placements, grad  # type: ignore[attr-defined]
    if is_dtensor(given) and given.placements != wanted:  # type: ignore[attr-defined]
        given = given.redistribute(placements=wanted)  # type: ignore[attr-defined]
    found = given._local_tensor if is_dtensor(given) else given  # type: ignore[attr-defined]
    # Collectives of DTensors may be asynchronous: the result waits when it is first used.
    return found.wait() if hasattr(found, "wait") else found


def check_replicated(slots: Sequence[tuple[str, torch.Tensor]], tensor: Comm) -> None:
    """Parameters that are not marked as cut must be equal on all tensor-parallel ranks, or they drift apart."""
    if tensor.size == 1 or not slots or is_fake(slots[0][1]):
        return
    sums = torch.stack([s for _, t in slots for s in (t.double().sum(), t.double().abs().sum())])
    sums = sums.nan_to_num().to("cpu")
    device = slots[0][1].device
    extremes = torch.cat([sums, -sums]).to(device)
    tensor.all_reduce(extremes, "max").wait()
    highest, lowest = extremes.to("cpu").chunk(2)
    unequal = (highest != -lowest).view(-1, 2).any(1).tolist()
    for (name, _), differs in zip(slots, unequal, strict=True):
        if differs:
            raise WherryError(
                f"{name}: this parameter differs between tensor-parallel ranks, and is not marked as cut among "
                "them. If each rank holds a part of it, make it a DTensor (parallelize_module) or set "
                "param.tensor_model_parallel = True and param.partition_dim; if not, build the model from one seed "
                "on all tensor-parallel ranks"
            )
