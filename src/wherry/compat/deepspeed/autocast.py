"""The config key `torch_autocast`, and torch.autocast around an engine without it."""

from __future__ import annotations

import pkgutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from wherry.compat.deepspeed.config import DeepSpeedConfigError
from wherry.compat.deepspeed.utils import warning_once
from wherry.config import Config


def mark(model: nn.Module, config: Config) -> None:
    """Refuse names of `lower_precision_safe_modules` that cannot be imported; the key has no other effect."""
    names = config.written["torch_autocast"].get("lower_precision_safe_modules")
    try:
        for name in names if isinstance(names, list) else ():
            pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DeepSpeedConfigError(f"torch_autocast.lower_precision_safe_modules: {error}") from error


def not_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable a torch.autocast of a GPU around a forward, where the engine's config has no `torch_autocast`."""
    if not torch.is_autocast_enabled():
        return nullcontext()
    warning_once(
        "torch.autocast is on around the engine, whose config has no torch_autocast: inside it is off. Give "
        '"torch_autocast": {"enabled": true}, or leave it to bf16 or fp16'
    )
    return torch.autocast(device_type, enabled=False)
