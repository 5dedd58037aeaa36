"""`deepspeed.zero`: construction under partitioning, whole weights for a while, and what configs are written with."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import wherry
from wherry import config as configs
from wherry.compat.deepspeed import not_part_of_wherry, parameters
from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.comm import get_world_size, init_distributed
from wherry.compat.deepspeed.config import DeepSpeedConfigError, load
from wherry.config import Config
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.sharding.init import entered, step_in, step_out
from wherry.sharding.param_shard import Sharing, is_plain


class Init(wherry.Init):
    """`wherry.Init` with DeepSpeed's arguments. `module`: one that is built already, to be partitioned at once."""

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
        if data_parallel_group is not None and sequence_data_parallel_group is not None:
            raise WherryError(
                "zero.Init: data_parallel_group and sequence_data_parallel_group are both given; give the first"
            )
        cuts = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        for name in (name for name, given in cuts.items() if given):
            raise not_part_of_wherry(f"zero.Init({name}=...)", "weights are sharded over the data axis")
        init_distributed()  # what is built inside may ask torch for its rank
        given = config if config is not None else config_dict_or_path
        loaded = load(_STAGE_3 if given is None else getattr(given, "_param_dict", given))
        if remote_device not in (None, "none"):
            loaded = configs.load(loaded, overrides={"zero_optimization.offload_param.device": str(remote_device)})
        known = mpu if isinstance(mpu, Comm) or hasattr(mpu, "get_data_parallel_group") else None
        group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
        if known is None and (why := why_group_is_too_small(get_world_size(), group)):
            raise GroupError(why)
        super().__init__(
            config=loaded,
            mesh=parameters.DataGroup(group) if group is not None else known,
            dtype=_dtype(dtype, None if given is None else loaded),
        )
        zero = loaded.written.get("zero_optimization")
        # What was built in contexts within this one.
        self._built: list[Sharing] = []
        self._checks_edits = isinstance(zero, dict) and bool(zero.get("enable_sanity_checks"))
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
        around = next((init for init in reversed(entered()) if isinstance(init, Init)), None)
        if around is not None:  # whose models may still read shapes
            around._built += [*self._built, self._sharing]
        else:
            for sharing in [*self._built, self._sharing]:
                for shard in [shard for shard in sharing.shards if isinstance(shard.parameter, parameters.Marks)]:
                    shard.show(empty=True)
        self._built = []

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
            parameter.__dict__["ds_enable_sanity_checks"] = self._checks_edits


_STAGE_3 = {"zero_optimization": {"stage": 3}}
MiCS_Init = Init
shutdown_init_context, restore_init_context = step_out, step_in


class GroupError(WherryError, RuntimeError):
    """The process group is not that of the launcher."""


def why_group_is_too_small(
    dp_world_size: int, explicit_process_group: Any, env: Mapping[str, Any] = os.environ
) -> str | None:
    """What is wrong where a launcher has started several ranks, and this one is in a group by itself; else None."""
    launched = str(env.get("WORLD_SIZE") or "1")
    if dp_world_size != 1 or explicit_process_group is not None or not launched.isdecimal() or int(launched) <= 1:
        return None
    return (
        f"zero.Init: the process group has 1 rank, but the launcher says WORLD_SIZE={launched}: every rank would hold "
        "the whole model; call deepspeed.init_distributed() before anything else starts a group, or give "
        "data_parallel_group"
    )


def _dtype(asked: torch.dtype | None, config: Config | None) -> torch.dtype:
    """What parameters are built in: by default in half precision."""
    if asked is None and config is not None:
        return config.working_dtype() or torch.float32
    chosen = asked or (torch.float16 if get_accelerator().is_fp16_supported() else torch.bfloat16)
    if chosen not in (torch.float16, torch.bfloat16, torch.float32):
        raise DeepSpeedConfigError(
            f"zero.Init: dtype {chosen} is not offered; give torch.float16, torch.bfloat16 or torch.float32"
        )
    return chosen


class EditedParameters(WherryError, RuntimeError):
    """Parameters were changed where no rank was named whose changes count."""


class GatheredParameters:
    """`wherry.gathered`. Edits are kept on `modifier_rank`, or, where it is None, must be the same on every rank.

    With `zero_optimization.enable_sanity_checks` edits without a `modifier_rank` are an error on every rank.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self._modifier_rank = modifier_rank
        self._held = ExitStack()
        self._before: list[tuple[torch.Tensor, int, int]] = []
        if fwd_module is not None:
            for parameter in self.params:
                parameters.register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        if not self.enabled:
            return
        self._held.enter_context(wherry.gathered(self.params, self._modifier_rank))
        if self._modifier_rank is None:
            watched = [p for p in self.params if getattr(p, "ds_enable_sanity_checks", False)]
            self._before = [(p, p.data_ptr(), p._version) for p in watched]

    def __exit__(self, *exception: Any) -> bool | None:
        if not self.enabled:
            return None
        if self._before and not any(exception):
            edited = [p for p, address, version in self._before if (p.data_ptr(), p._version) != (address, version)]
            flag = torch.tensor([float(bool(edited))], device=self._before[0][0].device)
            parameters.comm_of(self._before[0][0]).all_reduce(flag, "max").wait()
            if flag.item():
                error = EditedParameters(
                    "GatheredParameters: in-place modification of parameters without a modifier_rank, which is lost; "
                    "give modifier_rank=R, whose changes all ranks then get"
                )
                self._held.__exit__(type(error), error, None)
                raise error
        return self._held.__exit__(*exception)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The user's model with whole weights and without hooks, for many forwards."""
    hooked = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    with wherry.gathered(model), hooked.removed() if hooked is not None else nullcontext():
        yield getattr(model, "module", model)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """`fn` that makes its floating-point tensors in a dtype; frameworks replace this while they build a model."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return wrapped


class TilesError(WherryError, RuntimeError):
    """A layer that cannot be cut so."""


class TiledLinear(nn.Module):
    """A linear layer in tiles `linears[row][column]`, each of them a layer of `linear_cls`, gathered one by one."""

    cut_into_tiles = True

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
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.use_bias = bias
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        # Where each part begins, and the last ends.
        self.in_parts = [in_features * part // in_splits for part in range(in_splits + 1)]
        self.out_parts = [out_features * part // out_splits for part in range(out_splits + 1)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and number == in_splits - 1, **kwargs)
                for number, columns in enumerate(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        for tile in (tile for row in self.linears for tile in row):  # type: ignore[attr-defined]
            tile.always_a_unit = True
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        inputs = [input_] if self.in_splits == 1 else input_
        if self.in_splits > 1 and not self.input_is_already_split:
            inputs = self._split_global_input(input_, _sizes(self.in_parts))
        if len(inputs) != self.in_splits:
            raise TilesError(f"TiledLinear: the input has {len(inputs)} parts, expected in_splits={self.in_splits}")
        outputs: list[Any] = [None] * self.out_splits
        for row in range(self.out_splits):
            for column, part in enumerate(inputs):
                out = self.linears[row][column](part)  # type: ignore[index]
                outputs[row] = self._reduce_local_output(column, row, outputs[row], out)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    # What subclasses override.

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Any:
        return input.split(split_sizes, -1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, -1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        for row, (top, bottom) in enumerate(pairwise(self.out_parts)):
            for column, (left, right) in enumerate(pairwise(self.in_parts)):
                tile = self.linears[row][column]  # type: ignore[index]
                with GatheredParameters(tile.parameters(), modifier_rank=0):
                    tile.weight.copy_(other.weight[top:bottom, left:right])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[top:bottom])


def _sizes(parts: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(parts)]


class TiledLinearReturnBias(TiledLinear):
    """The same of layers that return their output and their bias."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, bias = current_out or (None, None)
        out = super()._reduce_local_output(in_id, out_id, before, new_out[0])
        return out, new_out[1] if new_out[1] is not None else bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        combine = super()._combine_output_splits
        return combine([out for out, _ in outputs]), combine(biases) if biases else None


class ZeroStageEnum(enum.IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(enum.StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
