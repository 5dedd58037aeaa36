"""LAMB: Adam's direction, as long as the weights of each parameter are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from wherry.errors import WherryError
from wherry.optim.groups import ADD_GROUP, check_options


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning").

    A parameter's step is Adam's with its weight decay, times the trust ratio: the norm of the weights over that of the
    step, from `min_coeff` to `max_coeff`; 1 where either is 0. With `eps_inside_sqrt` the root of the second moment
    is taken with `eps` added.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        _check("Lamb", defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check(f"Lamb: group {len(self.param_groups)}", {**self.defaults, **param_group})
        ADD_GROUP(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A `closure` evaluates the loss again first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise WherryError(
                f"Lamb: a parameter of shape {tuple(parameter.shape)} has a sparse gradient; expected a dense one "
                "(Embedding: sparse=False)"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        (beta1, beta2), eps = group["betas"], group["eps"]
        mean, square = state["exp_avg"].lerp_(grad, 1 - beta1), state["exp_avg_sq"]
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = square.add(eps).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(eps)
        direction = mean.div(root).add_(parameter, alpha=group["weight_decay"])
        size = float(group["lr"])
        if group["bias_correction"]:
            steps = int(state["step"])
            size *= (1 - beta2**steps) ** 0.5 / (1 - beta1**steps)
        parameter.sub_(direction.mul_(_trust_ratio(parameter, direction, group)), alpha=size)


def _trust_ratio(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
    """A tensor, which the device need not be waited for."""
    weight, length = (torch.linalg.vector_norm(each, dtype=torch.float32) for each in (parameter, direction))
    ratio = (weight / length).clamp_(group["min_coeff"], group["max_coeff"])
    return torch.where((weight > 0) & (length > 0), ratio, 1.0)


def _check(where: str, options: dict[str, Any]) -> None:
    check_options(where, options)
    if options["min_coeff"] > options["max_coeff"]:
        raise WherryError(
            f"{where}: min_coeff={options['min_coeff']!r} is above max_coeff={options['max_coeff']!r}; exchange them"
        )
