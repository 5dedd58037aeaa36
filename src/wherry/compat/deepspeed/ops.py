"""`deepspeed.ops`: the host optimizers with DeepSpeed's arguments.

Inside an engine an optimizer runs where its state rests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from wherry import optim
from wherry.compat.deepspeed.config import MUON_DEFAULTS
from wherry.errors import WherryError
from wherry.observe.log import warn
from wherry.update.optimizer import ADD_GROUP, Lion


class WrongDevice(WherryError, AssertionError):
    """A parameter is not where an optimizer updates it."""


class _Anywhere(torch.optim.Optimizer):
    """Takes parameters of any device, as for an engine; on its own it updates those of the CPU."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        ADD_GROUP(self, param_group)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type != "cpu":
                    raise WrongDevice(
                        f"{type(self).__name__}.step: a parameter of shape {tuple(parameter.shape)} is on "
                        f"{parameter.device}, and this optimizer by itself updates whole parameters on the CPU; give "
                        "it to initialize(optimizer=...), or use torch.optim"
                    )
        return super().step(closure)


class NoAmsgrad(WherryError, RuntimeError):
    """DeepSpeed's FusedAdam raises a RuntimeError for it, its others ignore it."""


def _no_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise NoAmsgrad(
            f"{name}: amsgrad needs a third state and is not offered; use torch.optim.AdamW, in a config by torch_adam"
        )


class NoRollback(WherryError, RuntimeError):
    """An update is to be taken back that has not been made."""


class DeepSpeedCPUAdam(_Anywhere, optim.CPUAdam):
    """`wherry.optim.CPUAdam`."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _no_amsgrad("DeepSpeedCPUAdam", amsgrad)
        optim.CPUAdam.__init__(
            self, model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction=bias_correction
        )
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        self.moments_as_weights = not fp32_optimizer_states

    def step_subgroup(self, subgroup_id: int, closure: Any = None) -> Any:
        """A step with the state of so many a part of a model, which is kept under its number."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if len(parameters) != 1:
            raise WherryError(f"step_subgroup: expected one parameter with a gradient, got {len(parameters)}")
        own = self.state.pop(parameters[0], {})
        self.state[parameters[0]] = self.state.pop(subgroup_id, {})  # type: ignore[call-overload]
        try:
            return self.step(closure)
        finally:
            self.state[subgroup_id] = self.state.pop(parameters[0])  # type: ignore[index]
            if own:
                self.state[parameters[0]] = own

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Any = None) -> Any:
        """Take the last step of a part back, whose gradient is still there."""
        state = self.state.get(sub_group_id)  # type: ignore[call-overload]
        if not state:
            raise NoRollback(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id}, which has none; call step_subgroup"
            )
        step = int(state["step"])
        if step <= 0:
            raise NoRollback(f"Cannot rollback sub_group_id {sub_group_id}: step count is {step}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            corrected = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
            for parameter in (p for p in group["params"] if p.grad is not None):
                mean, square, grad = state["exp_avg"], state["exp_avg_sq"], parameter.grad.float()
                update = mean.float() / corrected[0] / ((square.float() / corrected[1]).sqrt() + group["eps"])
                before = parameter.float() + lr * update
                if self.adam_w_mode:
                    before /= 1 - lr * decay
                mean.copy_((mean.float() - (1 - beta1) * grad) / beta1)
                square.copy_((square.float() - (1 - beta2) * grad * grad) / beta2)
                parameter.copy_(before)
        state["step"] = state["step"] - 1
        return loss


class FusedAdam(_Anywhere, optim.CPUAdam):
    """Adam on the parameters' own device, as any Adam that is given to an engine."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _no_amsgrad("FusedAdam", amsgrad)
        optim.CPUAdam.__init__(self, params, lr, betas, eps, weight_decay, adam_w_mode, bias_correction=bias_correction)
        self.adam_w_mode = int(adam_w_mode)


class DeepSpeedCPUAdagrad(_Anywhere, optim.CPUAdagrad):
    """`wherry.optim.CPUAdagrad`."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,  # Accelerate says it to all of them
    ) -> None:
        _no_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        optim.CPUAdagrad.__init__(self, model_params, lr, weight_decay=weight_decay, eps=eps)
        self.moments_as_weights = not fp32_optimizer_states

    def _gradient(self, p: torch.Tensor) -> torch.Tensor:
        """Of a sparse one the rest is zeros, which change nothing."""
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
        return super()._gradient(p)


class DeepSpeedCPULion(_Anywhere, optim.CPULion):
    """`wherry.optim.CPULion`."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        optim.CPULion.__init__(self, model_params, lr, betas, weight_decay)
        self.moments_as_weights = not fp32_optimizer_states


class FusedLion(Lion):
    """Lion on the parameters' own device."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        ADD_GROUP(self, param_group)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(optim.Lamb):
    """`wherry.optim.Lamb`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _no_amsgrad("FusedLamb", amsgrad)
        if max_grad_norm:
            raise WherryError(
                f"FusedLamb: max_grad_norm={max_grad_norm!r} is not offered; gradients are clipped by the engine: set "
                "gradient_clipping in the config"
            )
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)


class MuonWithAuxAdam(optim.Muon):
    """`wherry.optim.Muon`, with DeepSpeed's defaults."""

    def __init__(
        self,
        param_groups: Iterable[Any],
        adam_optimizer: Any = None,
        adam_optimizer_kwargs: Any = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
        **options: Any,
    ) -> None:
        if not adam_w_mode:
            raise WherryError(
                "MuonWithAuxAdam: adam_w_mode=False is not offered; AdamW updates the weights that are not Muon's"
            )
        super().__init__(param_groups, **{**MUON_DEFAULTS, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = dict(param_group)
        if (method := given.pop("ns_method", "standard")) != "standard":
            warn("MuonWithAuxAdam: ns_method=%r is not used: the iterations are torch.optim.Muon's", method)
        super().add_param_group(given)
