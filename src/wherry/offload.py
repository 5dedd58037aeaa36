"""The placement table put to work: what each flat's states rest in, and what moves them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from wherry import native
from wherry.errors import WherryError
from wherry.observe.log import say, warn
from wherry.parallel.topology import Topology
from wherry.placement import Tier
from wherry.sharding.flat_gradient import GradientPolicy, Landing
from wherry.sharding.unit import Flat
from wherry.tier_choice import TierChoice
from wherry.tiers.buffers import HostPool, untouched_zeros
from wherry.tiers.disk import DiskStore
from wherry.tiers.disk_errors import DiskUseError
from wherry.tiers.storage import DiskCache, DiskStorage, MemoryStorage, Storage
from wherry.tiers.streams import Link, link_to
from wherry.update.optimizer import OptimizerSpec
from wherry.update.optimizer_states import StateTier
from wherry.update.rules import UpdateRule
from wherry.update.streamed import StreamedUpdates, measured_share

if TYPE_CHECKING:
    from wherry.config import Config

# Gradients are summed on the device if their sums take at most this share of what is free there.
ROOM_FOR_SUMS = 0.25


class Offload:
    """What rests where, on this rank. `close` gives back what it has opened."""

    def __init__(self, config: Config, topology: Topology, spec: OptimizerSpec | None) -> None:
        zero = config.zero_optimization
        self.config = config
        self.placement = config.placement()
        self.topology = topology
        self.spec = spec
        self.device = topology.device
        pin = zero.offload_optimizer.pin_memory
        self.link: Link = topology.link(pin) if topology.link is not None else link_to(self.device, pin=pin)
        # Host memory for weights; optimizer state and gradients have the link's own.
        self._weights_pool = self.link.pool(zero.offload_param.pin_memory)
        # What the optimizer has been given, and in which of its groups.
        groups = spec.groups if spec is not None else []
        self.trained: dict[torch.Tensor, dict[str, Any]] = {p: group for group in groups for p in group["params"]}
        self.streamed = StreamedUpdates(self.link)
        self._share = self._share_on_device()
        self.choice = self.new_choice()
        self.policy = self.choice.policy
        self._state_tiers: dict[Flat, StateTier] = {}
        self._pool: native.Pool | None = None
        # Weights and optimizer state may share folders, and so a store; what is kept in memory of each they do not.
        self._open_stores: dict[tuple[str, ...], DiskStore] = {}
        self._weights_cache: DiskCache | None = None
        self._records_cache: DiskCache | None = None

    # Tiers.

    def new_choice(self) -> TierChoice:
        """As `choice` was before it was asked of any flat."""
        trained = sum(p.numel() for p in self.trained)
        return TierChoice(
            self.config, self.placement, self.topology, shared=self.link.shared, trained=trained, share=self._share
        )

    def _share_on_device(self) -> float:
        """The share of the optimizer's state outside of the device that is updated there."""
        asked, spec = self.config.wherry.update_on, self.spec
        if spec is None or self.placement.optimizer.tier is Tier.DEVICE:
            return 0.0
        if self.link.shared:
            if asked not in (None, "host", "auto", 0.0):
                warn("wherry.update_on: %r has no effect here, as no accelerator has memory of its own", asked)
            return 0.0
        if not spec.recorded:
            kind = type(spec.instance).__name__
            if asked == "auto":
                say("wherry.update_on: auto is the host, as the form of the state of %s is not known", kind)
            elif asked not in (None, "host", 0.0):
                raise WherryError(
                    f"wherry.update_on: {asked!r} is for optimizers whose state has a known form, got {kind}; leave it "
                    'out, or set "host"'
                )
            return 0.0
        if asked == "auto" and not spec.whole:
            # The same on all ranks, as it decides what they send together.
            found = self.topology.data.gather_objects(measured_share(self.link))
            share = sum(found) / len(found)
            say("wherry.update_on: %.0f%% of the updates are made on the device, by the rates measured", 100 * share)
            return share
        if asked in (None, "auto"):
            return 1.0 if spec.whole else 0.0
        return asked if isinstance(asked, float) else 1.0 if asked == "device" else 0.0

    def _store(self, folders: str | Sequence[str], block: str) -> DiskStore:
        """The store on these folders, which a block of the config names; opened when it is first needed."""
        key = (folders,) if isinstance(folders, str) else tuple(folders)
        store = self._open_stores.get(key)
        if store is None:
            aio = self.config.aio
            try:
                store = self._open_stores[key] = self.topology.open_store(
                    list(key),
                    name=f"rank{self.topology.global_rank}",
                    block_size=aio.block_size,
                    queue_depth=aio.queue_depth * max(1, aio.intra_op_parallelism),
                    checksum=aio.checksum,
                )
            except DiskUseError as error:
                raise DiskUseError(f"zero_optimization.{block}.nvme_path: {error}") from None
        return store

    def for_weights(self) -> DiskCache:
        if self._weights_cache is None:
            folders = self.config.zero_optimization.offload_param.nvme_path
            assert folders is not None
            self._weights_cache = DiskCache(self._store(folders, "offload_param"), self._weights_pool)
        return self._weights_cache

    def for_records(self) -> DiskCache:
        """An update reads a record once and writes it once: nothing of it is kept."""
        if self._records_cache is None:
            folders = self.config.zero_optimization.offload_optimizer.nvme_path
            assert folders is not None
            self._records_cache = DiskCache(self._store(folders, "offload_optimizer"), self.link.host)
        return self._records_cache

    def storage_of(self, name: str, nbytes: int) -> Storage | None:
        """Where the shard of a partitioned flat rests; None for the device."""
        tier = self.choice.of_weights(nbytes)
        if tier is Tier.DISK:
            cache = self.for_weights()
            # What was used last is used first on the way back.
            cache.allow((self.config.zero_optimization.offload_param.buffer_count - 1) * nbytes)
            return DiskStorage(cache, name, nbytes)
        if tier is Tier.DEVICE:
            return None
        return MemoryStorage(self._weights_pool.take_zeros(nbytes), self._weights_pool.give)

    @property
    def read_ahead(self) -> int:
        """Bytes of parameters that may be read from disk ahead of their use."""
        return 0 if self._weights_cache is None else self._weights_cache.keep

    def state_tier(self, flat: Flat) -> StateTier:
        """How the optimizer keeps its state of a flat."""
        if flat not in self._state_tiers:
            self._state_tiers[flat] = self.choice.of_state(flat.name, flat.layout.payload, flat.dtype, flat.tier)
        return self._state_tiers[flat]

    def make_rule(self, kept: StateTier) -> UpdateRule:
        assert self.spec is not None
        on_disk = kept.tier is Tier.DISK
        by_kernels = kept.on_host or kept.streamed
        return self.spec.make_rule(on_host=by_kernels, on_disk=on_disk, pool=self._threads(), masters=kept.masters)

    def _threads(self) -> native.Pool | None:
        """A pool of the engine's own, where updates run beside something else and are to leave cores to it."""
        offload = self.config.zero_optimization.offload_optimizer
        if not self.policy.beside or "cpuadam_cores_perc" not in offload.model_fields_set:
            return None
        if self._pool is None:
            self._pool = native.Pool(local_ranks=self.topology.local_ranks, share=offload.cpuadam_cores_perc)
        return self._pool

    def make_storage(self, tier: Tier, name: str, nbytes: int) -> Storage:
        if tier is Tier.DEVICE:
            # What may leave the device for a while has a storage that can be resized.
            return MemoryStorage(untouched_zeros(nbytes, torch.uint8, self.device))
        if tier is Tier.HOST:
            pool = self.link.host
            return MemoryStorage(pool.take_zeros(nbytes), pool.give)
        return DiskStorage(self.for_records(), name, nbytes)

    @property
    def host_pools(self) -> set[HostPool]:
        return {self.link.host, self._weights_pool}

    @property
    def stores(self) -> list[DiskStore]:
        """The disk's, as far as they have been opened."""
        return list(self._open_stores.values())

    # Gradients.

    def gradient_policy(self, flats: Sequence[Flat], accumulation: int) -> GradientPolicy:
        """For windows of so many micro-batches."""
        return self.choice.gradient_policy(accumulation, sums_fit=self._sums_fit(flats))

    def _sums_fit(self, flats: Sequence[Flat]) -> bool:
        free = self.link.free_bytes()
        if free is None:
            return True
        width = (self.config.grad_accum_dtype() or self.config.working_dtype() or torch.float32).itemsize
        held = (f.layout.shard_numel if self.placement.gradients.partitioned else f.layout.numel for f in flats)
        fit = sum(held) * width <= free * ROOM_FOR_SUMS
        # Replicas meet with every micro-batch, or once in a window: all of them alike.
        return all(self.topology.replicas.gather_objects(fit))

    def way_of(self, policy: GradientPolicy, flat: Flat) -> Landing:
        """How a flat's gradient gets to where its update finds it."""
        return self.choice.way_of(policy, self.state_tier(flat) if self.spec is not None else None)

    # The end.

    def close(self) -> None:
        with ExitStack() as end:
            end.callback(self.link.close)
            end.callback(self.streamed.trim)
            if self._pool is not None:
                end.callback(self._pool.close)
            for store in self.stores:
                end.callback(store.close)
            self._open_stores.clear()
            self._weights_cache = self._records_cache = None
