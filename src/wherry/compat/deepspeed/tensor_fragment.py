"""`deepspeed.utils.safe_*`: weights, gradients and states of the optimizer, by their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from wherry.compat.deepspeed.parameters import engine_of
from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.engine import Engine

# `safe_get_...` answers None for a parameter of no engine, `safe_set_...` refuses it. The fp32 parameter is the state
# "master". Of a whole state every rank must make the call; a local one is this rank's part, flat.


def _engine_and_name(parameter: torch.Tensor) -> tuple[Engine, str]:
    engine = engine_of(parameter)
    if engine is None:
        raise WherryError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; call deepspeed.initialize first"
        )
    return engine, engine.states.name_of(parameter)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    engine = engine_of(param)
    return engine.states.full(engine.states.name_of(param), optim_state_key) if engine is not None else None


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    engine = engine_of(param)
    return engine.states.local(engine.states.name_of(param), optim_state_key) if engine is not None else None


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    engine, name = _engine_and_name(param)
    engine.states.set_full(name, optim_state_key, value)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    engine, name = _engine_and_name(param)
    engine.states.set_local(name, optim_state_key, value)


safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key="master")
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key="master")
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key="master")
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key="master")


def _has_gradient(param: torch.Tensor) -> bool:
    engine = engine_of(param)
    return engine is not None and param.requires_grad and engine.has_gradients()


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole mean gradient, from the boundary's backward until the next window; None outside."""
    if not _has_gradient(param):
        return None
    engine, name = _engine_and_name(param)
    return engine.gradients(name)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    if not _has_gradient(param):
        return None
    engine, name = _engine_and_name(param)
    return engine.states.local_gradient(name)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _engine_and_name(param)
    engine.states.set_gradient(name, value)


def safe_update_full_grad_vectorized(
    params: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """`update_func(gradient, parameter)` gives each parameter's new gradient."""
    for parameter in params:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _engine_and_name(param)
    start, stop = engine.states.local_range(name)
    if value.numel() != stop - start:
        raise WherryError(
            f"safe_set_local_grad: {name}: expected {stop - start} elements, those that this rank updates, got "
            f"{tuple(value.shape)}"
        )
    whole = value.new_zeros(param.numel())  # of which this rank keeps its own part
    whole[start:stop] = value.flatten()
    engine.states.set_gradient_here(name, whole)
