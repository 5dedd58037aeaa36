"""The placement table: for each training state, is it partitioned over ranks, and on which tier does it rest?"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Tier(enum.Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    def __str__(self) -> str:
        return self.value


def effective(tier: Tier, *, shared: bool) -> Tier:
    """Where device and host have one memory, the host's is the device's."""
    return Tier.DEVICE if tier is Tier.HOST and shared else tier


def place_name(tier: Tier | str, *, gpu: bool) -> str:
    """What people read for a tier. Without a GPU what computes is the host, and its memory has that one name.

    >>> place_name(Tier.DEVICE, gpu=False)
    'host'
    """
    return str(Tier.HOST if str(tier) == str(Tier.DEVICE) and not gpu else tier)


@dataclass(frozen=True)
class Resting:
    """How one state rests: `partitioned` means that a rank holds 1/N of it."""

    partitioned: bool
    tier: Tier = Tier.DEVICE

    def __str__(self) -> str:
        return f"{'partitioned' if self.partitioned else 'replicated'}, {self.tier}"


@dataclass(frozen=True)
class Placement:
    """One row of the table. The engine reads it and nothing else to decide what to communicate and what to move.

    >>> Placement.of_stage(2).gradients.partitioned
    True
    """

    optimizer: Resting
    gradients: Resting
    parameters: Resting

    @classmethod
    def of_stage(
        cls,
        stage: int,
        *,
        optimizer: Tier = Tier.DEVICE,
        parameters: Tier = Tier.DEVICE,
    ) -> Placement:
        """The row that a ZeRO stage names, with its optimizer and parameters on the given tiers."""
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage: expected 0, 1, 2 or 3, got {stage!r}")
        gradients = Tier.DEVICE if optimizer is Tier.DEVICE else Tier.HOST
        return cls(
            optimizer=Resting(stage >= 1, optimizer),
            gradients=Resting(stage >= 2, gradients),
            parameters=Resting(stage >= 3, parameters),
        )

    @property
    def name(self) -> str:
        """The name people know this row by."""
        opt, grad, par = self.optimizer, self.gradients, self.parameters
        stage = 3 if par.partitioned else 2 if grad.partitioned else 1 if opt.partitioned else 0
        tiers = {opt.tier, par.tier}
        if Tier.DISK in tiers:
            return "ZeRO-Infinity (disk)"
        if Tier.HOST in tiers:
            return "ZeRO-3 Offload" if stage == 3 else "ZeRO-Offload"
        return "data parallel" if stage == 0 else f"ZeRO-{stage}"

    def rows(self) -> list[tuple[str, str, str]]:
        """(state, partitioned or replicated, tier), as printed to people."""
        return [
            (name, "partitioned" if resting.partitioned else "replicated", str(resting.tier))
            for name, resting in (
                ("parameters", self.parameters),
                ("gradients", self.gradients),
                ("optimizer", self.optimizer),
            )
        ]
