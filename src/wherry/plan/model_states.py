"""Bytes that a rank keeps for parameters, gradients and optimizer state, by the formulas of the literature."""

from __future__ import annotations

from dataclasses import dataclass

from wherry.errors import WherryError
from wherry.placement import Placement, Tier

WORKING_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one working weight, by precision."""

STATE_WORDS = {"adam": 2, "adamw": 2, "adagrad": 1, "lion": 1, "sgd": 0, "sgd-momentum": 1}
"""Values that an optimizer keeps for each parameter, besides the master weight."""

STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of one such value, by the type of the state. The scales of int8 are not counted."""

WORD = 4


@dataclass(frozen=True)
class Cost:
    """Bytes that training keeps for one parameter, by state.

    >>> Cost.of("bf16", "adamw")
    Cost(parameters=2, gradients=2, master=4, moments=8)
    """

    parameters: int
    gradients: int
    # fp32 weights are their own masters.
    master: int
    moments: int

    @classmethod
    def of(
        cls,
        precision: str = "bf16",
        optimizer: str = "adamw",
        gradients: str | None = None,
        *,
        state_dtype: str = "fp32",
        split: bool = False,
        masters: bool = True,
    ) -> Cost:
        """By precision and optimizer; `gradients` is the precision they are accumulated in, if it is another.

        A split master is the working weight and two bytes more; without `masters` there is none.
        """
        working = _look_up(WORKING_BYTES, "precision", precision)
        accumulated = _look_up(WORKING_BYTES, "gradients", gradients or precision)
        words = _look_up(STATE_WORDS, "optimizer", optimizer.lower())
        moment = _look_up(STATE_BYTES, "state_dtype", state_dtype)
        master = 0 if working == WORD or not masters else WORD - working if split else WORD
        return cls(working, accumulated, master, words * moment)

    @property
    def optimizer(self) -> int:
        """Master weight and moments: what the placement table calls optimizer state."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def _look_up(table: dict[str, int], what: str, name: str) -> int:
    if name not in table:
        raise WherryError(f"{what}: expected one of {', '.join(table)}, got {name!r}")
    return table[name]


@dataclass(frozen=True)
class States:
    """Bytes of the three states on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def by_tier(self, placement: Placement) -> dict[Tier, int]:
        """The same bytes by the tier that they rest on."""
        tiers = dict.fromkeys(Tier, 0)
        tiers[placement.parameters.tier] += self.parameters
        tiers[placement.gradients.tier] += self.gradients
        tiers[placement.optimizer.tier] += self.optimizer
        return tiers


def states(parameters: int, placement: Placement, ranks: int, cost: Cost) -> States:
    """The formulas of the literature: each state whole, or one Nth of it. No padding; a fraction counts as one more.

    >>> states(7_500_000_000, Placement.of_stage(1), 64, Cost.of("bf16", "adamw")).total
    31406250000
    """
    for name, value in (("ranks", ranks), ("parameters", parameters)):
        if value < 1:
            raise WherryError(f"{name}: expected 1 or more, got {value}")
    share = -(-parameters // ranks)
    return States(
        parameters=cost.parameters * (share if placement.parameters.partitioned else parameters),
        gradients=cost.gradients * (share if placement.gradients.partitioned else parameters),
        optimizer=cost.optimizer * (share if placement.optimizer.partitioned else parameters),
    )
