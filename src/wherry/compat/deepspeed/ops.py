"""`deepspeed.ops`: the host optimizers with DeepSpeed's arguments, and the builders that say which there are.

Inside an engine an optimizer runs where its state rests. Nothing is built at first use.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch

from wherry import optim
from wherry.compat.deepspeed import not_part_of_wherry
from wherry.errors import WherryError
from wherry.update.optimizer import Lion

COMPATIBLE_OPS = {"cpu_adam": True, "cpu_adagrad": True, "cpu_lion": True, "fused_adam": True, "fused_lion": True}


class _Anywhere(torch.optim.Optimizer):
    """Takes parameters of any device, as for an engine; on its own it updates those of the CPU."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        torch.optim.Optimizer.add_param_group(self, param_group)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type != "cpu":
                    raise WherryError(
                        f"{type(self).__name__}.step: a parameter of shape {tuple(parameter.shape)} is on "
                        f"{parameter.device}, and this optimizer by itself updates whole parameters on the CPU; give "
                        "it to initialize(optimizer=...), or use torch.optim"
                    )
        return super().step(closure)


def _no_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise WherryError(f"{name}: amsgrad needs a third state and is not offered; use torch.optim.AdamW")


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
        _no_amsgrad(type(self).__name__, amsgrad)
        optim.CPUAdam.__init__(
            self, model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction=bias_correction
        )


class FusedAdam(DeepSpeedCPUAdam):
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
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


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


class FusedLion(Lion):
    """Lion on the parameters' own device."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class OpBuilder:
    """An operation that DeepSpeed compiles. Wherry has those of `COMPATIBLE_OPS`, compiled at install."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return COMPATIBLE_OPS.get(self.NAME, False)

    builder_available = is_compatible

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}"

    def load(self, verbose: bool = False) -> Any:
        raise not_part_of_wherry(
            f"{type(self).__name__}().load()", "kernels are compiled at install and called by the optimizers themselves"
        )


@functools.cache
def __getattr__(name: str) -> Any:
    """The builder of any operation; `CPUAdamBuilder` is that of `cpu_adam`."""
    operation = name.removesuffix("Builder")
    if operation == name:
        raise AttributeError(f"module 'deepspeed.ops.op_builder' has no attribute {name!r}")
    return type(name, (OpBuilder,), {"NAME": re.sub(r"(?<=[a-zU])(?=[A-Z][a-z])", "_", operation).lower()})
