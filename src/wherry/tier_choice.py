"""The placement table read for each flat: on which tier its states rest, and when and how they get there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wherry.errors import WherryError
from wherry.parallel.topology import Topology
from wherry.placement import Placement, Tier, effective
from wherry.sharding.flat_gradient import GradientPolicy, Landing
from wherry.update.optimizer_states import StateTier
from wherry.update.policy import update_policy

if TYPE_CHECKING:
    from wherry.config import Config


class TierChoice:
    """Asked once for each flat, in the order in which they are made: the first ones have room where others have none.

    `shared` says that the device's memory is the host's. `trained` are the elements that are. Of state that does not
    rest on the device, a `share` is updated there.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        topology: Topology,
        *,
        shared: bool,
        trained: int,
        share: float = 0.0,
    ) -> None:
        zero = config.zero_optimization
        self.config = config
        self.placement = placement
        self.shared = shared
        self._ranks = topology.data.size
        self.policy = update_policy(config, placement, shared=shared)
        # Elements whose optimizer state stays on the device, those of the first units, whose gradients come last.
        stays = 1.0 - zero.offload_optimizer.ratio if placement.optimizer.tier is not Tier.DEVICE else 0.0
        self._stays = round(stays * trained)
        # Elements of those that are on the device for their update alone, of those that might be.
        self._share = share
        self._streamed = self._seen = 0
        # Bytes of weights that may rest in host memory though their place is the disk.
        itemsize = (config.working_dtype() or torch.float32).itemsize
        self._in_memory = itemsize * zero.offload_param.max_in_cpu

    def of_weights(self, nbytes: int) -> Tier:
        """Where a shard of so many bytes rests, of a flat that is partitioned."""
        tier = self.placement.parameters.tier
        if tier is Tier.DISK and nbytes <= self._in_memory:
            self._in_memory -= nbytes
            tier = Tier.HOST
        return effective(tier, shared=self.shared)

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
        tier = effective(tier, shared=self.shared)
        # An update reaches weights on its own side only, and a delayed one must leave them alone for a while.
        on_host = tier is not Tier.DEVICE or self.shared
        beyond_reach = not self.shared and (tier is Tier.DEVICE) is not (weights is Tier.DEVICE)
        # The native kernels know no float64.
        narrow = dtype.itemsize <= torch.float32.itemsize
        streamed = narrow and tier is not Tier.DEVICE and self._is_streamed(payload)
        apart = (beyond_reach and not streamed) or (self.policy.when == "delayed" and on_host)
        on_host = on_host and narrow
        masters = self.config.keeps_masters()
        split = masters and self.config.wherry.master != "whole"
        return StateTier(tier, on_host=on_host, apart=apart, split=split, masters=masters, streamed=streamed)

    def _is_streamed(self, payload: int) -> bool:
        """Whether this flat is among the share, which is spread over all of them."""
        self._seen += payload
        if self.shared or self._streamed + payload > self._share * self._seen * (1 + 1e-9):
            return False
        self._streamed += payload
        return True

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
        if self.shared or kept is None or kept.tier is Tier.DEVICE or (kept.streamed and policy.brief):
            return Landing.STAYS
        # Replicated gradients are summed before they are reduced, which no shard on the host can be.
        alone = self.placement.gradients.partitioned or self._ranks == 1
        sums = policy.accumulates and (policy.sums_on_device or not alone)
        return Landing.COPIED if sums or not self._reduces_to_shards else Landing.STREAMED
