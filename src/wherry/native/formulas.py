"""Update formulas: what a step does to a segment, with all the numbers of that step.

Each formula reduces to constants computed here in double precision; the kernels and the torch fallback both start
from those, rounded to fp32.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wherry.errors import WherryError

# An optimizer's group: options under the names that torch.optim has for them.
Group = Mapping[str, Any]
_LAYOUT = struct.Struct("=iII9f")
_ADAM, _ADAGRAD, _LION, _SGD, _MOMENTUM = range(5)
FLAG_L2, FLAG_MAXIMIZE, FLAG_LERP_HIGH, FLAG_FIRST, FLAG_NESTEROV = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class Formula:
    """The base of all formulas. `state_signed` says of each state tensor whether its values have a sign."""

    state_signed: ClassVar[tuple[bool, ...]] = ()

    @classmethod
    def of(cls, group: Group, step: int) -> Formula:
        """The formula of an optimizer's group at a step."""
        raise NotImplementedError

    @property
    def state_count(self) -> int:
        """How many state tensors the formula keeps for a segment."""
        return len(self.state_signed)

    def constants(self) -> tuple[int, int, int, tuple[float, ...]]:
        """(kind, flags, seed, up to nine numbers), as the kernels take them."""
        raise NotImplementedError

    def pack(self) -> bytes:
        kind, flags, seed, numbers = self.constants()
        return _LAYOUT.pack(kind, flags, seed & 0xFFFFFFFF, *numbers, *(0.0,) * (9 - len(numbers)))

    def rounded(self) -> tuple[int, int, int, tuple[float, ...]]:
        """The constants as the kernels see them: (kind, flags, seed, nine numbers rounded to fp32)."""
        kind, flags, seed, *numbers = _LAYOUT.unpack(self.pack())
        return kind, flags, seed, tuple(numbers)


def _check_step(formula: Formula, step: int) -> None:
    if step < 1:
        raise WherryError(f"{type(formula).__name__}: step={step!r}, expected the 1-based number of this step")


@dataclass(frozen=True, slots=True)
class Adam(Formula):
    """Adam with L2 weight decay, or, `decoupled`, AdamW. `step` is the 1-based number of this step.

    >>> Adam(lr=1e-3, step=1).state_count
    2
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    step: int = 1
    maximize: bool = False
    bias_correction: bool = True

    state_signed: ClassVar[tuple[bool, ...]] = (True, False)

    def __post_init__(self) -> None:
        _check_step(self, self.step)

    @classmethod
    def of(cls, group: Group, step: int) -> Adam:
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group.get("decoupled_weight_decay", False),
            step=step,
            maximize=group.get("maximize", False),
            bias_correction=group.get("bias_correction", True),
        )

    def constants(self) -> tuple[int, int, int, tuple[float, ...]]:
        bias1 = 1 - self.beta1**self.step if self.bias_correction else 1.0
        bias2 = 1 - self.beta2**self.step if self.bias_correction else 1.0
        l2 = self.weight_decay != 0 and not self.decoupled
        weight = 1 - self.beta1
        flags = l2 * FLAG_L2 | self.maximize * FLAG_MAXIMIZE | (weight >= 0.5) * FLAG_LERP_HIGH
        keep = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        numbers = (
            weight,
            self.beta2,
            1 - self.beta2,
            bias2**-0.5,  # times this, not divided by its inverse: cheaper, and apart in the last bit alone
            self.eps,
            -(self.lr / bias1),
            keep,
            self.weight_decay,
        )
        return _ADAM, flags, self.step, numbers


@dataclass(frozen=True, slots=True)
class Adagrad(Formula):
    """Adagrad, as torch.optim.Adagrad."""

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    step: int = 1
    maximize: bool = False

    state_signed: ClassVar[tuple[bool, ...]] = (False,)

    def __post_init__(self) -> None:
        _check_step(self, self.step)

    @classmethod
    def of(cls, group: Group, step: int) -> Adagrad:
        return cls(
            lr=float(group["lr"]),
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            maximize=group.get("maximize", False),
        )

    def constants(self) -> tuple[int, int, int, tuple[float, ...]]:
        rate = self.lr / (1 + (self.step - 1) * self.lr_decay)
        flags = (self.weight_decay != 0) * FLAG_L2 | self.maximize * FLAG_MAXIMIZE
        return _ADAGRAD, flags, self.step, (-rate, self.eps, self.weight_decay)


@dataclass(frozen=True, slots=True)
class Lion(Formula):
    """Lion with decoupled weight decay. `step` only numbers the draws of stochastic rounding."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    step: int = 1
    maximize: bool = False

    state_signed: ClassVar[tuple[bool, ...]] = (True,)

    @classmethod
    def of(cls, group: Group, step: int) -> Lion:
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            step=step,
            maximize=group.get("maximize", False),
        )

    def constants(self) -> tuple[int, int, int, tuple[float, ...]]:
        keep = 1 - self.lr * self.weight_decay
        numbers = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, -self.lr, keep)
        return _LION, self.maximize * FLAG_MAXIMIZE, self.step, numbers


@dataclass(frozen=True, slots=True)
class SGD(Formula):
    """SGD, with momentum or without. `first`: the buffer starts as this step's gradient, as torch has it."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    first: bool = False
    maximize: bool = False
    step: int = 1

    state_signed: ClassVar[tuple[bool, ...]] = (True,)

    @classmethod
    def of(cls, group: Group, step: int) -> SGD:
        return cls(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            first=step == 1,
            maximize=group.get("maximize", False),
        )

    @property
    def state_count(self) -> int:
        return 1 if self.momentum else 0

    def constants(self) -> tuple[int, int, int, tuple[float, ...]]:
        flags = (
            (self.weight_decay != 0) * FLAG_L2
            | self.maximize * FLAG_MAXIMIZE
            | self.first * FLAG_FIRST
            | self.nesterov * FLAG_NESTEROV
        )
        numbers = (self.momentum, 1 - self.dampening, -self.lr, self.weight_decay)
        return _MOMENTUM if self.momentum else _SGD, flags, self.step, numbers
