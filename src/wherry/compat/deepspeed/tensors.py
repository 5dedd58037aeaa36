"""`deepspeed.utils.safe_*`: one parameter's fp32 master, moments and gradient, whole or this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from wherry.engine import Engine
from wherry.errors import WherryError


def _engine(parameter: torch.Tensor) -> tuple[Engine, str] | None:
    from wherry.compat.deepspeed.engine import engine_of

    engine = engine_of(parameter)
    if engine is None:
        return None
    return engine, engine.states.name_of(parameter)


def _required(parameter: torch.Tensor) -> tuple[Engine, str]:
    found = _engine(parameter)
    if found is None:
        raise WherryError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; call deepspeed.initialize first"
        )
    return found


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The whole master weight. Every rank must call it."""
    found = _engine(param)
    return found[0].states.full(found[1], "master") if found else None


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _required(param)
    engine.states.set_full(name, "master", value)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    found = _engine(param)
    return found[0].states.full(found[1], optim_state_key) if found else None


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    engine, name = _required(param)
    engine.states.set_full(name, optim_state_key, value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole mean gradient, from the boundary's backward until the next window; None outside."""
    found = _engine(param)
    if found is None or not param.requires_grad or not found[0].has_gradients():
        return None
    return found[0].gradients(found[1])


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _required(param)
    engine.states.set_gradient(name, value)


def safe_update_full_grad_vectorized(
    params: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """`update_func(gradient, parameter)` gives each parameter's new gradient."""
    for parameter in params:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the master weight, flat."""
    found = _engine(param)
    return found[0].states.local(found[1], "master") if found else None


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    found = _engine(param)
    return found[0].states.local(found[1], optim_state_key) if found else None


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    found = _engine(param)
    if found is None or not param.requires_grad or not found[0].has_gradients():
        return None
    return found[0].states.local_gradient(found[1])


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _required(param)
    engine.states.set_local(name, "master", value)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    engine, name = _required(param)
    engine.states.set_local(name, optim_state_key, value)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _required(param)
    start, stop = engine.states.local_range(name)
    if value.numel() != stop - start:
        raise WherryError(
            f"safe_set_local_grad: {name}: expected {stop - start} elements, those that this rank updates, got "
            f"{tuple(value.shape)}"
        )
    whole = value.new_zeros(param.numel())  # of which this rank keeps its own part
    whole[start:stop] = value.flatten()
    engine.states.set_gradient_here(name, whole)
