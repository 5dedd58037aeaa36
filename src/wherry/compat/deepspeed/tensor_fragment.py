"""`deepspeed.utils.safe_*`: master weights, gradients and optimizer states, by their parameters.

A getter returns None for a parameter of no engine and for a frozen one; a setter raises for the first, and leaves the
second as it is. The fp32 parameter is the state "master". Every rank must read or set a full state; a local one is this
rank's part, flat, as `ds_tensor` is of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from wherry.compat.deepspeed.parameters import engine_of
from wherry.errors import WherryError
from wherry.observe.log import say

if TYPE_CHECKING:
    from wherry.engine import Engine


def _trained(parameter: torch.Tensor) -> tuple[Engine, str] | None:
    """Look up the engine that trains a parameter, and the parameter's name there."""
    engine = engine_of(parameter)
    if engine is None:
        return None
    name = engine.states.name_of(parameter)
    return (engine, name) if parameter.requires_grad and engine.states.updates(name) else None


def _to_set(call: str, parameter: torch.Tensor) -> tuple[Engine, str] | None:
    if engine_of(parameter) is None:
        raise WherryError(
            f"{call}: a parameter of shape {tuple(parameter.shape)} belongs to no engine; call deepspeed.initialize "
            "first"
        )
    trained = _trained(parameter)
    if trained is None:
        say("%s: a parameter that is not trained stays as it is, of shape %s", call, tuple(parameter.shape))
    return trained


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    trained = _trained(param)
    return trained[0].states.full(trained[1], optim_state_key) if trained else None


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    trained = _trained(param)
    return trained[0].states.local(trained[1], optim_state_key) if trained else None


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    if trained := _to_set("safe_set_full_optimizer_state", param):
        trained[0].states.set_full(trained[1], optim_state_key, value)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    if trained := _to_set("safe_set_local_optimizer_state", param):
        trained[0].states.set_local(trained[1], optim_state_key, value)


safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key="master")
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key="master")
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key="master")
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key="master")


# Gradients are of the micro-batches so far, times the loss scale, as they are until the step.


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole gradient from the first micro-batch until the next window; None outside.

    At stages 0 and 1 it is of this rank's own micro-batches until the boundary, and the tensor in `.grad` itself.
    """
    if param.grad is not None:
        return param.grad
    trained = _trained(param)
    gradient = trained[0].states.gradient_so_far(trained[1]) if trained else None
    return gradient * trained[0].loss_scale if trained and gradient is not None else None


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    trained = _trained(param)
    gradient = trained[0].states.local_gradient_so_far(trained[1]) if trained else None
    return gradient * trained[0].loss_scale if trained and gradient is not None else None


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad.copy_(value)
    elif trained := _to_set("safe_set_full_grad", param):
        trained[0].states.set_gradient_so_far(trained[1], value.float() / trained[0].loss_scale)


def safe_update_full_grad_vectorized(
    params: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replace each parameter's gradient by `update_func(gradient, parameter)`."""
    for parameter in params:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    trained = _to_set("safe_set_local_grad", param)
    if trained is None:
        return
    engine, name = trained
    start, stop = engine.states.local_range(name)
    if value.numel() != stop - start:
        raise WherryError(
            f"safe_set_local_grad: {name}: expected {stop - start} elements, those that this rank updates, got "
            f"{tuple(value.shape)}"
        )
    flat, index = engine.access.place_of[param]  # type: ignore[index]
    whole = torch.zeros(flat.layout.slots[index].numel, device=value.device)  # the engine keeps this rank's part of it
    whole[start:stop] = value.flatten().float() / engine.loss_scale
    engine.states.set_gradient_here(name, whole)
