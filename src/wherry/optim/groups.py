"""Groups of parameters: how one is added to an optimizer, and what is checked of its options."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wherry.errors import WherryError

# As it is without the decorator that keeps torch's compiler out of it, and loads that compiler, which takes a second.
ADD_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except TypeError:
        return False


def _not_negative(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(b) and 0 <= b < 1 for b in value)


def _three(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("lr", "weight_decay", "momentum", "eps"), ("0 or more", _not_negative)),
    "betas": ("two numbers from 0 to below 1", _betas),
    "ns_coefficients": ("three numbers", _three),
    "ns_steps": ("an integer from 1 to 99", lambda value: isinstance(value, int) and 1 <= value < 100),
    "adjust_lr_fn": (
        '"original", "match_rms_adamw" or None',
        lambda value: value in (None, "original", "match_rms_adamw"),
    ),
    "min_coeff": ("0 or more", _not_negative),
    "max_coeff": ("0 or more", _not_negative),
}


def check_options(where: str, options: Mapping[str, Any]) -> None:
    """An error that names the option whose value cannot be used."""
    for name, value in options.items():
        expected, fits = _EXPECTED.get(name.removeprefix("adamw_"), ("", None))
        if fits is not None and not fits(value):
            raise WherryError(f"{where}: {name}={value!r}, expected {expected}")
