"""Lion in plain torch, for devices without a native kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Sign of an interpolation of momentum and gradient, with decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion: expected lr >= 0, weight_decay >= 0 and betas in [0, 1), got lr={lr}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum, grad = state["exp_avg"], parameter.grad
                if group["maximize"]:
                    grad = -grad
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(momentum.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
                momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss
