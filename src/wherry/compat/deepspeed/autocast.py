"""`deepspeed.runtime.torch_autocast`: a torch.autocast around the engine's own, and the types in which states travel.

Weights travel in their own type here, and gradients in that or in the config's `communication_data_type`: a parameter
is marked as DeepSpeed marks it where that is the type which autocast casts to, and no other is.
"""

from __future__ import annotations

import pkgutil
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.config import DeepSpeedConfigError
from wherry.compat.deepspeed.utils import warning_once

if TYPE_CHECKING:
    from wherry.config import Config

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
LOWER_PRECISION_SAFE_MODULES = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]

autocast_custom_fwd = partial(torch.amp.custom_fwd, device_type=get_accelerator().device_name())
autocast_custom_bwd = partial(torch.amp.custom_bwd, device_type=get_accelerator().device_name())


def mark(model: nn.Module, config: Config) -> None:
    """The parameters of the modules that are safe, in a model of an engine with `torch_autocast`."""
    names = config.written["torch_autocast"].get("lower_precision_safe_modules")
    try:
        safe = (
            LOWER_PRECISION_SAFE_MODULES if names in (None, "auto") else [pkgutil.resolve_name(name) for name in names]
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise DeepSpeedConfigError(f"torch_autocast.lower_precision_safe_modules: {error}") from error
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if type(module) in safe else ():
            if (config.communication_dtype() or parameter.dtype) is config.autocast_dtype():
                setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, config.autocast_dtype())


def has_comm_dtype(param: torch.Tensor) -> bool:
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.Tensor) -> torch.dtype:
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def get_allgather_dtype(param: Any, param_ds_tensor: torch.Tensor) -> torch.dtype:
    return param_ds_tensor.dtype


def not_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A forward without `torch_autocast` runs without: one around it, which a GPU has, is off inside."""
    if not torch.is_autocast_enabled():
        return nullcontext()
    warning_once(
        "torch.autocast is on around the engine, whose config has no torch_autocast: inside it is off. Give "
        '"torch_autocast": {"enabled": true}, or leave it to bf16 or fp16'
    )
    return torch.autocast(device_type, enabled=False)
