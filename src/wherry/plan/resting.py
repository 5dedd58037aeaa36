"""Where the states of a config rest on a machine: as the engine decides it when it knows its device."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.placement import Placement, Tier

if TYPE_CHECKING:
    from wherry.config import Config


class Landing(enum.Enum):
    """Where the update finds a gradient."""

    STAYS = "where it was summed"
    COPIED = "on the host, after it was summed on the device"
    STREAMED = "on the host, where each micro-batch is added"


@dataclass(frozen=True)
class Resting:
    """What rests where, once it is known whether the device is the host."""

    gpu: bool
    parameters: Tier
    optimizer: Tier
    policy: str
    landing: Landing
    # Gradients have memory only from their arrival to their update.
    brief: bool
    # An update is late on the host, and leaves the weights alone until it has ended.
    late: bool
    # Whether the host's kernels may update it.
    on_host: bool

    @classmethod
    def of(cls, config: Config, placement: Placement, ranks: int, *, gpu: bool, stays: bool = False) -> Resting:
        """Of states placed so, perhaps elsewhere than the config says; `stays`: the optimizer's are not offloaded.

        That is so of a share of the flats, by the offload's `ratio`; when they are updated is the same for all.
        """
        offloaded, parameters = (
            Tier.DEVICE if tier is Tier.HOST and not gpu else tier
            for tier in (placement.optimizer.tier, placement.parameters.tier)
        )
        accumulation = config.batch(ranks).accumulation
        policy = _policy(config, offloaded)
        optimizer = Tier.DEVICE if stays else offloaded
        to_shards = placement.optimizer.partitioned or ranks == 1
        brief = policy == "in_backward" and accumulation == 1 and to_shards
        on_host = optimizer is not Tier.DEVICE or not gpu
        return cls(
            gpu,
            parameters,
            optimizer,
            policy,
            _landing(placement, ranks, accumulation, stays=not gpu or optimizer is Tier.DEVICE),
            brief,
            policy == "delayed" and on_host,
            on_host,
        )

    @property
    def homes(self) -> bool:
        """Whether parameters rest off the device."""
        return self.parameters is not Tier.DEVICE

    def apart(self, *, at_home: bool) -> bool:
        """Whether a record has a copy of the working weights: of a flat that rests off the device, or on it."""
        return self.late or (self.gpu and (self.optimizer is Tier.DEVICE) is at_home)

    @property
    def sums_on_device(self) -> bool:
        return not self.brief and self.landing is not Landing.STREAMED

    @property
    def gradients_on_host(self) -> bool:
        return not self.brief and self.landing is not Landing.STAYS


def _landing(placement: Placement, ranks: int, accumulation: int, *, stays: bool) -> Landing:
    if stays:
        return Landing.STAYS
    # Sums of several micro-batches are kept on the device, where they are taken to have room.
    to_shards = placement.optimizer.partitioned or ranks == 1
    return Landing.COPIED if accumulation > 1 or not to_shards else Landing.STREAMED


def _policy(config: Config, optimizer: Tier) -> str:
    when = config.wherry.update_policy
    if when != "auto":
        return when
    if optimizer is Tier.DEVICE:
        return "at_step"
    checked = config.bf16.enabled and config.bf16.check_grad_overflow
    waits = (
        config.gradient_clipping > 0
        or config.scales_loss()
        or (checked and "check_grad_overflow" in config.bf16.model_fields_set)
    )
    return "before_use" if waits else "in_backward"
