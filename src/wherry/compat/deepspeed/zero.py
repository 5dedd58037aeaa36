"""`deepspeed.zero`: construction under partitioning, whole weights for a while, and what configs are written with."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

import wherry
from wherry import config as configs
from wherry.compat.deepspeed import not_part_of_wherry
from wherry.compat.deepspeed.comm import init_distributed
from wherry.nn.tiled import TiledLinear as WherryTiledLinear


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
        cuts = {
            "data_parallel_group": data_parallel_group,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "sequence_data_parallel_group": sequence_data_parallel_group,
        }
        for name in (name for name, given in cuts.items() if given):
            raise not_part_of_wherry(f"zero.Init({name}=...)", "weights are sharded over the data axis")
        if enabled:
            init_distributed()  # what is built inside may ask torch for its rank
        overrides: dict[str, Any] = {}
        if remote_device not in (None, "none"):
            overrides["zero_optimization.offload_param.device"] = remote_device
        if dtype in (torch.float16, torch.bfloat16):
            overrides["fp16.enabled" if dtype is torch.float16 else "bf16.enabled"] = True
        given = next((one for one in (config_dict_or_path, config) if one is not None), _STAGE_3)
        # A module that is built is partitioned by initialize(), which takes it as it is.
        super().__init__(config=configs.load(given, overrides=overrides), enabled=enabled and module is None)


_STAGE_3 = {"zero_optimization": {"stage": 3}}
MiCS_Init = Init


class GatheredParameters:
    """`wherry.gathered`. Edits are kept on `modifier_rank`, or, where it is None, must be the same on every rank."""

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self._modifier_rank = modifier_rank
        self._held = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._held.enter_context(wherry.gathered(self.params, self._modifier_rank))

    def __exit__(self, *exception: Any) -> bool | None:
        return self._held.__exit__(*exception)


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Nothing to register: a weight that is read outside its own module is gathered when it is read."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, torch.Tensor):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """The counterpart of `register_external_parameter`."""


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The user's model with whole weights, for many forwards."""
    with wherry.gathered(model):
        yield getattr(model, "module", model)


def shutdown_init_context() -> None:
    """initialize() needs no construction context to end: it leaves none open."""


def restore_init_context() -> None:
    """The counterpart of `shutdown_init_context`."""


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: torch.dtype) -> Callable[..., Any]:
    """`fn` that makes its floating-point tensors in a dtype; frameworks replace this while they build a model."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return wrapped


orig_torch_arange = torch.arange


class TiledLinear(WherryTiledLinear):
    """`wherry.nn.TiledLinear` with DeepSpeed's arguments."""

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
        if input_is_already_split or not combine_out_splits or linear_cls is not nn.Linear:
            raise not_part_of_wherry(
                "TiledLinear with split inputs or outputs, or of another class", "use whole tensors and nn.Linear"
            )
        super().__init__(in_features, out_features, in_splits, out_splits, bias, **kwargs)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        self.load_state_dict(other.state_dict())


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
