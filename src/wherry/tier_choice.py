"""The placement table read for each flat: on which tier its states rest, and when and how they get there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wherry.errors import ConfigError, WherryError
from wherry.parallel.topology import Topology
from wherry.placement import Placement, Tier
from wherry.sharding.flat_gradient import GradientPolicy, Landing
from wherry.update.optimizer_states import StateTier
from wherry.update.updater import UpdatePolicy

if TYPE_CHECKING:
    from wherry.config import Config


class TierChoice:
    """Asked once for each flat, in the order in which they are made: the first ones have room where others have none.

    `shared` says that the device's memory is the host's. `trained` are the elements that are.
    """

    def __init__(self, config: Config, placement: Placement, topology: Topology, *, shared: bool, trained: int) -> None:
        zero = config.zero_optimization
        self.config = config
        self.placement = placement
        self.shared = shared
        self._ranks = topology.data.size
        self.policy = self._update_policy()
        # Elements whose optimizer state stays on the device, those of the first units, whose gradients come last.
        share = 1.0 - zero.offload_optimizer.ratio if placement.optimizer.tier is not Tier.DEVICE else 0.0
        self._stays = round(share * trained)
        # Bytes of weights that may rest in host memory though their place is the disk.
        itemsize = (config.working_dtype() or torch.float32).itemsize
        self._in_memory = itemsize * zero.offload_param.max_in_cpu

    def _effective(self, tier: Tier) -> Tier:
        """Without a device of its own, memory of the host is the device's."""
        return Tier.DEVICE if tier is Tier.HOST and self.shared else tier

    def of_weights(self, nbytes: int) -> Tier:
        """Where a shard of so many bytes rests, of a flat that is partitioned."""
        tier = self.placement.parameters.tier
        if tier is Tier.DISK and nbytes <= self._in_memory:
            self._in_memory -= nbytes
            tier = Tier.HOST
        return self._effective(tier)

    def of_state(self, name: str, payload: int, dtype: torch.dtype, weights: Tier) -> StateTier:
        """How the optimizer keeps its state of a flat of so many elements, whose weights rest there."""
        tier = self.placement.optimizer.tier
        if tier is not Tier.DEVICE and self._stays >= payload:
            self._stays -= payload
            tier = Tier.DEVICE
        if tier is Tier.DISK and dtype.itemsize > torch.float32.itemsize:
            raise WherryError(
                f"{name}: it has {dtype} weights, and optimizer state on disk is for those of at most 32 bits: cast "
                'the model, or offload_optimizer to "cpu"'
            )
        tier = self._effective(tier)
        # An update reaches weights on its own side only, and a delayed one must leave them alone for a while.
        on_host = tier is not Tier.DEVICE or self.shared
        beyond_reach = not self.shared and (tier is Tier.DEVICE) is not (weights is Tier.DEVICE)
        apart = beyond_reach or (self.policy.when == "delayed" and on_host)
        # The native kernels know no float64.
        on_host = on_host and dtype.itemsize <= torch.float32.itemsize
        return StateTier(tier=tier, on_host=on_host, apart=apart, split=self.config.wherry.master != "whole")

    # Gradients.

    @property
    def _reduces_to_shards(self) -> bool:
        return self.placement.optimizer.partitioned or self._ranks == 1

    def gradient_policy(self, accumulation: int, *, sums_fit: bool = True) -> GradientPolicy:
        """For windows of so many micro-batches."""
        communication = self.config.communication_dtype()
        wire = communication or self.config.working_dtype()
        return GradientPolicy(
            accumulation_dtype=self.config.grad_accum_dtype(),
            communication_dtype=communication,
            # A sum over many ranks would leave the narrow range of fp16; a mean does not.
            predivide=float(self._ranks) if wire is torch.float16 else 1.0,
            accumulates=accumulation > 1,
            sums_on_device=sums_fit,
            brief=self.policy.when == "in_backward" and accumulation == 1 and self._reduces_to_shards,
        )

    def way_of(self, policy: GradientPolicy, kept: StateTier | None) -> Landing:
        """How the gradient of a flat whose state is kept so gets to where its update finds it."""
        if self.shared or kept is None or kept.tier is Tier.DEVICE:
            return Landing.STAYS
        # Replicated gradients are summed before they are reduced, which no shard on the host can be.
        alone = self.placement.gradients.partitioned or self._ranks == 1
        sums = policy.accumulates and (policy.sums_on_device or not alone)
        return Landing.COPIED if sums or not self._reduces_to_shards else Landing.STREAMED

    # When.

    def _update_policy(self) -> UpdatePolicy:
        config = self.config
        offload = config.zero_optimization.offload_optimizer
        when = config.wherry.update_policy
        waits = _waits_for_all(config)
        tier = self._effective(self.placement.optimizer.tier)
        if when == "in_backward" and waits:
            raise ConfigError(f"wherry.update_policy: in_backward updates before all gradients are known, and {waits}")
        if when == "delayed" and offload.ratio < 1:
            raise ConfigError(
                "wherry.update_policy: delayed is for state that is all offloaded, and "
                f"zero_optimization.offload_optimizer.ratio is {offload.ratio}; set the ratio to 1, or another policy"
            )
        if when == "delayed" and tier is Tier.DEVICE and not self.shared:
            raise ConfigError(
                "wherry.update_policy: delayed is for optimizer state on the host or on disk; set "
                "zero_optimization.offload_optimizer.device, or another policy"
            )
        if when == "auto":
            when = "at_step" if tier is Tier.DEVICE else "before_use" if waits else "in_backward"
        return UpdatePolicy(when, config.wherry.delayed_update_warmup if when == "delayed" else 0, offload.buffer_count)


def _waits_for_all(config: Config) -> str | None:
    """Why an update must wait for all gradients; None if it need not."""
    if config.gradient_clipping > 0:
        return f"gradient_clipping {config.gradient_clipping:g} needs their norm; set it to 0, or use before_use"
    if config.scales_loss():
        return "with fp16 a step may have to be skipped; use bf16, or before_use"
    bf16 = config.bf16
    if bf16.enabled and bf16.check_grad_overflow and "check_grad_overflow" in bf16.model_fields_set:
        return "bf16.check_grad_overflow may skip a step; leave it out, or use before_use"
    return None
