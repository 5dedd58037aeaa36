"""`deepspeed.zero`: construction under partitioning, whole weights for a while, tiled layers, and enums of configs."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import wherry
from wherry import config as configs
from wherry.compat.deepspeed import not_part_of_wherry, parameters
from wherry.compat.deepspeed.comm import get_world_size, init_distributed
from wherry.compat.deepspeed.config import DeepSpeedConfigError, load
from wherry.config import Config
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.sharding.init import entered
from wherry.sharding.param_shard import Sharing, is_plain

_STAGE_3 = {"zero_optimization": {"stage": 3}}


class Init(wherry.Init):
    """`wherry.Init` with DeepSpeed's arguments; a `module` that is built already is partitioned at once."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        if not enabled:
            super().__init__(enabled=False)
            return
        if None not in (data_parallel_group, sequence_data_parallel_group):
            raise WherryError(
                "zero.Init: data_parallel_group and sequence_data_parallel_group are both given; give the first"
            )
        refused = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        for name in filter(refused.get, refused):
            raise not_part_of_wherry(
                f"zero.Init({name}=...)", "weights are sharded over the data axis, in their own type"
            )
        init_distributed()  # what is built inside may ask torch for its rank
        own = config if config is not None else config_dict_or_path
        loaded = load(_STAGE_3 if own is None else own)
        if remote_device not in (None, "none"):
            loaded = configs.load(loaded, overrides={"zero_optimization.offload_param.device": str(remote_device)})
        group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
        if group is not None:
            mesh: Any = SimpleNamespace(get_data_parallel_group=lambda: group)
        else:
            mesh = mpu if isinstance(mpu, Comm) or hasattr(mpu, "get_data_parallel_group") else None
            if mesh is None:
                _check_group()
        super().__init__(config=loaded, mesh=mesh, dtype=_dtype(dtype, None if own is None else loaded))
        # Parameters that were built in contexts within this one.
        self._built: list[Sharing] = []
        if module is not None and self.enabled:
            with self:
                for parameter in module.parameters():
                    self.registered(module, parameter)

    def __enter__(self) -> Init:
        super().__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        super().__exit__(*ended)
        if not self.enabled:
            return
        built, self._built = [*self._built, self._sharing], []
        around = next((init for init in reversed(entered()) if isinstance(init, Init)), None)
        if around is not None:  # models may still read shapes there
            around._built += built
            return
        for shard in (shard for sharing in built for shard in sharing.shards):
            if isinstance(shard.parameter, parameters.Marks):
                shard.show(empty=True)

    def registered(self, module: nn.Module, parameter: nn.Parameter) -> None:
        super().registered(module, parameter)
        self._mark(parameter)

    def attached(self, module: nn.Module) -> None:
        super().attached(module)
        for parameter in module.parameters():
            self._mark(parameter)

    def _mark(self, parameter: nn.Parameter) -> None:
        if is_plain(parameter) and parameter.is_floating_point() and not parameter.is_meta:
            parameters.mark_parameter(parameter, self.comm)


class GroupError(WherryError, RuntimeError):
    """The process group is smaller than the launcher's."""


def _check_group() -> None:
    launched = os.environ.get("WORLD_SIZE") or "1"
    if get_world_size() == 1 and launched.isdecimal() and int(launched) > 1:
        raise GroupError(
            f"zero.Init: the process group has 1 rank, but the launcher says WORLD_SIZE={launched}: every rank would "
            "hold the whole model; call deepspeed.init_distributed() before anything else starts a group, or give "
            "data_parallel_group"
        )


def _dtype(asked: torch.dtype | None, config: Config | None) -> torch.dtype:
    """Choose the dtype of parameters: half precision without a config."""
    if asked is None and config is not None:
        return config.working_dtype() or torch.float32
    chosen = asked or torch.float16
    if chosen not in (torch.float16, torch.bfloat16, torch.float32):
        raise DeepSpeedConfigError(
            f"zero.Init: dtype {chosen} is not offered; give torch.float16, torch.bfloat16 or torch.float32"
        )
    return chosen


@contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """`wherry.gathered`; edits are kept on `modifier_rank`, or must be the same on every rank where it is None."""
    if not enabled:
        yield
        return
    held = [params] if isinstance(params, torch.Tensor) else list(params)
    if fwd_module is not None:
        for parameter in held:
            parameters.register_external_parameter(fwd_module, parameter)
    with wherry.gathered(held, modifier_rank):
        yield


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """Make `fn` create floating-point tensors in a dtype; transformers replaces this while it builds a model."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return wrapped


class TilesError(WherryError, RuntimeError):
    """A layer cannot be cut into these tiles."""


class TiledLinear(nn.Module):
    """A linear layer in tiles `linears[row][column]`, layers of `linear_cls` that are gathered one by one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise TilesError(f"TiledLinear: {name}_splits is between 1 and the {features} features, got {splits}")
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.linears = nn.ModuleList(nn.ModuleList() for _ in range(out_splits))
        for tiles, rows in zip(self.linears, _sizes(out_features, out_splits), strict=True):
            for column, columns in enumerate(_sizes(in_features, in_splits), 1):
                tile = linear_cls(columns, rows, bias=bias and column == in_splits, **kwargs)
                tile.always_a_unit = True
                tiles.append(tile)  # type: ignore[operator]
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        inputs = input_ if self.in_splits > 1 else [input_]
        if self.in_splits > 1 and not self.input_is_already_split:
            inputs = input_.tensor_split(self.in_splits, -1)
        if len(inputs) != self.in_splits:
            raise TilesError(f"TiledLinear: the input has {len(inputs)} parts, expected in_splits={self.in_splits}")
        pairs = (zip(tiles, inputs, strict=True) for tiles in self.linears)  # type: ignore[call-overload]
        outputs = [functools.reduce(self._add, (tile(part) for tile, part in row)) for row in pairs]
        return self._join(outputs) if self.combine_out_splits else outputs

    def _add(self, total: Any, output: Any) -> Any:
        return total + output

    def _join(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, -1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        biases = repeat(None) if other.bias is None else other.bias.tensor_split(self.out_splits)
        for tiles, weights, bias in zip(self.linears, other.weight.tensor_split(self.out_splits), biases, strict=False):
            for tile, weight in zip(tiles, weights.tensor_split(self.in_splits, 1), strict=True):  # type: ignore[call-overload]
                with GatheredParameters(tile.parameters(), modifier_rank=0):
                    tile.weight.copy_(weight)
                    if tile.bias is not None:
                        tile.bias.copy_(bias)


def _sizes(features: int, splits: int) -> list[int]:
    """Cut like `tensor_split`: the first parts are larger by one."""
    return [features // splits + (part < features % splits) for part in range(splits)]


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of layers that return their output and their bias."""

    def _add(self, total: Any, output: Any) -> Any:
        return total[0] + output[0], total[1] if output[1] is None else output[1]

    def _join(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._join([output for output, _ in outputs]), super()._join(biases) if biases else None


ZeroStageEnum = enum.IntEnum(
    "ZeroStageEnum",
    {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3},
    module=__name__,
)
OffloadDeviceEnum = enum.StrEnum("OffloadDeviceEnum", "none cpu nvme", module=__name__)
OffloadStateTypeEnum = enum.StrEnum(
    "OffloadStateTypeEnum", "optim_states hp_params lp_params lp_grads contiguous_grad_buffer", module=__name__
)
