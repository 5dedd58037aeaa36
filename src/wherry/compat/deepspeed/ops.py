"""`deepspeed.ops`: Wherry's optimizers with DeepSpeed's arguments.

Inside an engine an optimizer runs where its state rests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from wherry import optim
from wherry.compat.deepspeed.config import MUON_DEFAULTS
from wherry.errors import WherryError
from wherry.update.optimizer import ADD_GROUP, Lion


class WrongDevice(WherryError, AssertionError):
    """A parameter is on a device whose parameters an optimizer by itself does not update."""


class NoAmsgrad(WherryError, RuntimeError):
    """An optimizer was made with amsgrad, for which DeepSpeed's FusedAdam raises a RuntimeError."""


def _no_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise NoAmsgrad(
            f"{name}: amsgrad needs a third state and is not offered; use torch.optim.AdamW, in a config by torch_adam"
        )


class _AnyDevice(torch.optim.Optimizer):
    """A host optimizer that holds parameters of any device for an engine, and by itself updates those of the CPU."""

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


class DeepSpeedCPUAdam(_AnyDevice, optim.CPUAdam):
    """`wherry.optim.CPUAdam`."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0, amsgrad: bool = False,
        adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        _no_amsgrad("DeepSpeedCPUAdam", amsgrad)
        super().__init__(model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction=bias_correction)
        self.fp32_optimizer_states = fp32_optimizer_states
        self.moments_as_weights = not fp32_optimizer_states


class FusedAdam(_AnyDevice, optim.CPUAdam):
    """Adam on the parameters' own device, as any Adam of an engine."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        _no_amsgrad("FusedAdam", amsgrad)
        super().__init__(params, lr, betas, eps, weight_decay, adam_w_mode, bias_correction=bias_correction)


class DeepSpeedCPUAdagrad(_AnyDevice, optim.CPUAdagrad):
    """`wherry.optim.CPUAdagrad`; Accelerate passes `adamw_mode` to every host optimizer."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0,
        *, adamw_mode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


class DeepSpeedCPULion(_AnyDevice, optim.CPULion):
    """`wherry.optim.CPULion`; Accelerate passes `adamw_mode` to every host optimizer."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0, *, adamw_mode: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """Lion on the parameters' own device."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        ADD_GROUP(self, param_group)


class FusedLamb(optim.Lamb):
    """`wherry.optim.Lamb`."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0, max_grad_norm: float = 0.0, max_coeff: float = 10.0, min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:  # fmt: skip
        _no_amsgrad("FusedLamb", amsgrad)
        if max_grad_norm:
            raise WherryError(
                f"FusedLamb: max_grad_norm={max_grad_norm!r} is not offered; gradients are clipped by the engine: set "
                "gradient_clipping in the config"
            )
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)


class MuonWithAuxAdam(optim.Muon):
    """`wherry.optim.Muon`, with DeepSpeed's defaults."""

    def __init__(self, param_groups: Iterable[Any], **options: Any) -> None:
        super().__init__(param_groups, **{**MUON_DEFAULTS, **options})
