"""The placement table put to work: on which tier each flat's states rest, and what moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from wherry import native
from wherry.errors import ConfigError, WherryError
from wherry.parallel.partition import local
from wherry.parallel.topology import Topology
from wherry.placement import Placement, Resting, Tier
from wherry.plan.memory import SCALED, WORD, Cost
from wherry.sharding.flat_gradient import GradientPolicy, Landing
from wherry.sharding.grouping import UnitPlan
from wherry.sharding.unit import Flat
from wherry.tiers.budget import check_host, host_room
from wherry.tiers.buffers import zeros_on_host
from wherry.tiers.disk import DiskStore
from wherry.tiers.disk_errors import DiskSpaceError, DiskUseError, human
from wherry.tiers.homes import DiskHome, Home, MemoryHome, Shelf
from wherry.tiers.streams import Link, link_to
from wherry.update.optimizer import OptimizerSpec
from wherry.update.optimizer_states import StateTier
from wherry.update.pipeline import UpdatePolicy
from wherry.update.rules import UpdateRule
from wherry.update.sizes import records_at_once, records_waiting, weights_at_once

if TYPE_CHECKING:
    from wherry.config import Config

# Gradients are summed on the device if their sums take at most this share of what is free there.
ROOM_FOR_SUMS = 0.25


class Offload:
    """What rests where, on this rank. `close` gives back what it has opened."""

    def __init__(
        self, config: Config, placement: Placement, topology: Topology, spec: OptimizerSpec | None, *, trainable: int
    ) -> None:
        zero = config.zero_optimization
        self.config = config
        self.placement = placement
        self.topology = topology
        self.spec = spec
        self.device = topology.device
        pin = zero.offload_optimizer.pin_memory
        self.link: Link = topology.link(pin) if topology.link is not None else link_to(self.device, pin=pin)
        # Host memory for weights; optimizer state and gradients have the link's own.
        self._weights_pool = self.link.pool(zero.offload_param.pin_memory)
        self.policy = self.policy_of(placement)
        # Elements whose optimizer state stays on the device, those of the first units, whose gradients come last.
        share = 1.0 - zero.offload_optimizer.ratio if placement.optimizer.tier is not Tier.DEVICE else 0.0
        self._stays = round(share * trainable)
        self._in_host = zero.offload_param.max_in_cpu if zero.offload_param.device == "nvme" else 0
        self._state_tiers: dict[Flat, StateTier] = {}
        self._pool: native.Pool | None = None
        # Weights and optimizer state may share folders, and so a store; what is kept in memory of each they do not.
        self._open_stores: dict[tuple[str, ...], DiskStore] = {}
        self._weights_shelf: Shelf | None = None
        self._records_shelf: Shelf | None = None

    # Tiers.

    def _effective(self, tier: Tier) -> Tier:
        """Without a device of its own, memory of the host is the device's."""
        return Tier.DEVICE if tier is Tier.HOST and self.link.shared else tier

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

    def _for_weights(self) -> Shelf:
        if self._weights_shelf is None:
            folders = self.config.zero_optimization.offload_param.nvme_path
            assert folders is not None
            self._weights_shelf = Shelf(self._store(folders, "offload_param"), self._weights_pool)
        return self._weights_shelf

    def _for_records(self) -> Shelf:
        """An update reads a record once and writes it once: nothing of it is kept."""
        if self._records_shelf is None:
            folders = self.config.zero_optimization.offload_optimizer.nvme_path
            assert folders is not None
            self._records_shelf = Shelf(self._store(folders, "offload_optimizer"), self.link.host)
        return self._records_shelf

    def home_of(self, name: str, nbytes: int) -> Home | None:
        """Where the shard of a partitioned flat rests; None for the device."""
        offload = self.config.zero_optimization.offload_param
        tier = self.placement.parameters.tier
        if tier is Tier.DISK:
            itemsize = (self.config.working_dtype() or torch.float32).itemsize
            if nbytes > self._in_host * itemsize:
                shelf = self._for_weights()
                # What was used last is used first on the way back.
                shelf.keep = max(shelf.keep, (offload.buffer_count - 1) * nbytes)
                return DiskHome(shelf, name, nbytes)
            self._in_host -= nbytes // itemsize
            tier = Tier.HOST
        if self._effective(tier) is Tier.DEVICE:
            return None
        return MemoryHome(self._weights_pool.take(nbytes), self._weights_pool.give)

    @property
    def read_ahead(self) -> int:
        """Bytes of parameters that may be read from disk ahead of their use."""
        return 0 if self._weights_shelf is None else self._weights_shelf.keep

    def weights_read(self, on_disk: Sequence[Flat]) -> int:
        """The most bytes of host memory for the weights of these flats, which rest on disk."""
        buffers = self.config.zero_optimization.offload_param.buffer_count
        updated = [f for f in on_disk if f.trainable and self.spec is not None and not self.state_tier(f).apart]
        at_once = min(self.policy.depth, len(updated))
        return weights_at_once([f.shard_nbytes for f in on_disk], buffers, at_once, beside=self.policy.beside)

    def state_tier(self, flat: Flat) -> StateTier:
        """How the optimizer keeps its state of a flat."""
        known = self._state_tiers.get(flat)
        if known is not None:
            return known
        tier = self.placement.optimizer.tier
        if tier is not Tier.DEVICE and self._stays >= flat.layout.payload:
            self._stays -= flat.layout.payload
            tier = Tier.DEVICE
        if tier is Tier.DISK and flat.dtype.itemsize > torch.float32.itemsize:
            raise WherryError(
                f"{flat.name}: it has {flat.dtype} weights, and optimizer state on disk is for those of at most 32 "
                'bits: cast the model, or offload_optimizer to "cpu"'
            )
        tier = self._effective(tier)
        # An update reaches weights on its own side only, and a delayed one must leave them alone for a while.
        on_host = tier is not Tier.DEVICE or self.link.shared
        beyond_reach = not self.link.shared and (tier is Tier.DEVICE) is not (flat.home is None)
        apart = beyond_reach or (self.policy.when == "delayed" and on_host)
        # The native kernels know no float64.
        on_host = on_host and flat.dtype.itemsize <= torch.float32.itemsize
        split = self.config.wherry.master != "whole"
        self._state_tiers[flat] = StateTier(tier=tier, on_host=on_host, apart=apart, split=split)
        return self._state_tiers[flat]

    def make_rule(self, kept: StateTier) -> UpdateRule:
        assert self.spec is not None
        return self.spec.make_rule(on_host=kept.on_host, on_disk=kept.tier is Tier.DISK, pool=self._threads())

    def _threads(self) -> native.Pool | None:
        """A pool of the engine's own, where updates run beside something else and are to leave cores to it."""
        offload = self.config.zero_optimization.offload_optimizer
        if not self.policy.beside or "cpuadam_cores_perc" not in offload.model_fields_set:
            return None
        if self._pool is None:
            self._pool = native.Pool(local_ranks=self.topology.local_ranks)
            self._pool.throttle(offload.cpuadam_cores_perc)
        return self._pool

    def make_home(self, tier: Tier, name: str, nbytes: int, untouched: int) -> Home:
        if tier is Tier.DEVICE:
            if self.link.shared:
                return MemoryHome(zeros_on_host(nbytes), zeros=True, lazy=untouched)
            # What may leave the device for a while has a storage that can be resized.
            return MemoryHome(torch.zeros(nbytes, dtype=torch.uint8, device=self.device), zeros=True)
        if tier is Tier.HOST:
            pool = self.link.host
            return MemoryHome(pool.take_zeros(nbytes), pool.give, zeros=True, lazy=0 if pool.pins else untouched)
        return DiskHome(self._for_records(), name, nbytes)

    @property
    def stores(self) -> list[DiskStore]:
        """The disk's, as far as they have been opened."""
        return list(self._open_stores.values())

    # Room.

    def check_room(self, plans: Sequence[UnitPlan]) -> None:
        """Raise an error with what is missing and what would fit, before any state is made."""
        needs = _Needs(self, plans)
        here = self.topology.local_ranks
        limit = self.config.wherry.host_memory
        try:
            self._check_disk(needs, self.placement)
        except DiskSpaceError as error:
            fitting = self._less_on_disk(needs, host_room(here, limit, needs.held))
            advice = "" if fitting is None else f"; what would fit: {fitting}"
            raise DiskSpaceError(f"{error}{advice}", error.missing, error.path) from None
        check_host(needs.on_host(self.placement), here, limit, needs.held, needs.remedies())

    def _check_disk(self, needs: _Needs, placement: Placement) -> None:
        wanted: dict[DiskStore, int] = {}
        for state, shelf in (("optimizer", self._for_records), ("parameters", self._for_weights)):
            nbytes = needs.on_disk(placement, state)
            if nbytes:
                store = shelf().store
                wanted[store] = wanted.get(store, 0) + nbytes * self.topology.local_ranks
        for store, nbytes in wanted.items():
            store.check_free(nbytes)

    def _less_on_disk(self, needs: _Needs, room: int) -> str | None:
        """Keys that put less on disk than they do now, where that fits on the disk and in this room of the host."""
        optimizer, parameters = ("optimizer", "offload_optimizer"), ("parameters", "offload_param")
        for states in ([parameters], [optimizer], [optimizer, parameters]):
            there = [(state, key) for state, key in states if getattr(self.placement, state).tier is Tier.DISK]
            if len(there) < len(states):
                continue
            moved = {state: replace(getattr(self.placement, state), tier=Tier.HOST) for state, _ in there}
            other = replace(self.placement, **moved)
            nbytes = needs.on_host(other) * self.topology.local_ranks
            try:
                self._check_disk(needs, other)
            except DiskSpaceError:
                continue
            if nbytes <= room:
                keys = " and ".join(f'"{key}": {{"device": "cpu"}}' for _, key in there)
                return f"{keys} (then {human(nbytes)} of host memory)"
        return None

    # Gradients.

    def gradient_policy(self, flats: Sequence[Flat], accumulation: int) -> GradientPolicy:
        """For windows of so many micro-batches."""
        communication = self.config.communication_dtype()
        wire = communication or self.config.working_dtype()
        ranks = self.topology.data.size
        return GradientPolicy(
            accumulation_dtype=self.config.grad_accum_dtype(),
            communication_dtype=communication,
            # A sum over many ranks would leave the narrow range of fp16; a mean does not.
            predivide=float(ranks) if wire is torch.float16 else 1.0,
            accumulates=accumulation > 1,
            sums_on_device=self._sums_fit(flats),
            brief=self.policy.when == "in_backward" and accumulation == 1 and self._reduces_to_shards(),
        )

    def _reduces_to_shards(self) -> bool:
        return self.placement.optimizer.partitioned or self.topology.data.size == 1

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
        if self.link.shared or (self.spec is not None and self.state_tier(flat).tier is Tier.DEVICE):
            return Landing.STAYS
        if self.spec is None:
            return Landing.STAYS
        # Replicated gradients are summed before they are reduced, which no shard on the host can be.
        alone = self.placement.gradients.partitioned or self.topology.data.size == 1
        sums = policy.accumulates and (policy.sums_on_device or not alone)
        return Landing.COPIED if sums or not self._reduces_to_shards() else Landing.STREAMED

    # When.

    def policy_of(self, placement: Placement) -> UpdatePolicy:
        """When updates are made of states that are placed so."""
        config = self.config
        depth = config.zero_optimization.offload_optimizer.buffer_count
        when = config.wherry.update_policy
        waits = self._waits_for_all()
        tier = self._effective(placement.optimizer.tier)
        if when == "in_backward" and waits:
            raise ConfigError(f"wherry.update_policy: in_backward updates before all gradients are known, and {waits}")
        if when == "delayed" and config.zero_optimization.offload_optimizer.ratio < 1:
            raise ConfigError(
                "wherry.update_policy: delayed is for state that is all offloaded, and "
                f"zero_optimization.offload_optimizer.ratio is {config.zero_optimization.offload_optimizer.ratio}; "
                "set the ratio to 1, or another policy"
            )
        if when == "delayed" and tier is Tier.DEVICE and not self.link.shared:
            raise ConfigError(
                "wherry.update_policy: delayed is for optimizer state on the host or on disk; set "
                "zero_optimization.offload_optimizer.device, or another policy"
            )
        if when == "auto":
            when = "at_step" if tier is Tier.DEVICE else "before_use" if waits else "in_backward"
        return UpdatePolicy(when, config.wherry.delayed_update_warmup if when == "delayed" else 0, depth)

    def _waits_for_all(self) -> str | None:
        """Why an update must wait for all gradients; None if it need not."""
        config = self.config
        if config.gradient_clipping > 0:
            return f"gradient_clipping {config.gradient_clipping:g} needs their norm; set it to 0, or use before_use"
        if config.scales_loss():
            return "with fp16 a step may have to be skipped; use bf16, or before_use"
        bf16 = config.bf16
        if bf16.enabled and bf16.check_grad_overflow and "check_grad_overflow" in bf16.model_fields_set:
            return "bf16.check_grad_overflow may skip a step; leave it out, or use before_use"
        return None

    # The end.

    def close(self) -> None:
        with ExitStack() as end:
            end.callback(self.link.close)
            if self._pool is not None:
                end.callback(self._pool.close)
            for store in self.stores:
                end.callback(store.close)
            self._open_stores.clear()
            self._weights_shelf = self._records_shelf = None


class _Needs:
    """Bytes that the states of these units take on one rank, on the host and on disk, by placement.

    They are the formulas of the placement table, and what of states on disk is in memory at a time.
    """

    def __init__(self, offload: Offload, plans: Sequence[UnitPlan]) -> None:
        config, spec = offload.config, offload.spec
        self.offload = offload
        parameters = [p for plan in plans for _, p in plan.parameters]
        # What of the model is in host memory already.
        self.held = sum(local(p).untyped_storage().nbytes() for p in parameters if p.device.type == "cpu")
        floating = (p.dtype for p in parameters if p.is_floating_point())
        self.working = config.working_dtype() or next(floating, torch.float32)
        self.gradient = (config.grad_accum_dtype() or self.working).itemsize
        self.wire = (config.communication_dtype() or self.working).itemsize
        given = {p for group in spec.groups for p in group["params"]} if spec is not None else set()
        # Elements of each unit: all of them, and those that are trained.
        self.numels = [sum(local(p).numel() for _, p in plan.parameters if p.is_floating_point()) for plan in plans]
        self.trained = [sum(local(p).numel() for _, p in plan.parameters if p in given) for plan in plans]
        self.root = sum(numel for plan, numel in zip(plans, self.numels, strict=True) if plan.root)
        # Moments: those of the host's kernels, or a guess at those of another optimizer.
        wide = max(4, self.working.itemsize)
        self.moments, self.coded, self.splits = [wide, wide], False, False
        rule = spec.make_rule(on_host=True) if spec is not None else None
        if rule is not None and rule.splits and wide == 4:
            assert spec is not None
            fields = rule.fields(spec.groups[0], SCALED)
            self.moments, self.splits = [field.dtype.itemsize for field in fields], True
            self.coded = any(field.coded for field in fields)

    def _cost(self, on_host: bool) -> Cost:
        working = self.working.itemsize
        split = on_host and self.splits and self.working is torch.bfloat16
        split = split and self.offload.config.wherry.master != "whole"
        return Cost(
            parameters=working,
            gradients=self.gradient,
            master=0 if working >= WORD else WORD - working if split else WORD,
            moments=sum(self.moments),
            words=len(self.moments),
            coded=self.coded,
        )

    def _share(self, resting: Resting, numel: int) -> int:
        return -(-numel // self.offload.topology.shards.size) if resting.partitioned else numel

    def _here(self, tier: Tier) -> bool:
        """Whether it is memory of the host: without a device of its own, that of the device as well."""
        return tier is Tier.HOST or (tier is Tier.DEVICE and self.offload.link.shared)

    def on_host(self, placement: Placement, in_memory: int | None = None) -> int:
        """`in_memory` elements of weights stay there that may rest on disk; those of the config by default."""
        policy = self.offload.policy_of(placement)
        return (
            self._weights(placement, policy, in_memory)
            + self._gradients(placement, policy)
            + self._optimizer(placement, policy)
        )

    def _weights_on_disk(self, placement: Placement, in_memory: int | None = None) -> list[int]:
        """Bytes of the shards that rest there: all but those that come first, as far as there is room for them."""
        if placement.parameters.tier is not Tier.DISK:
            return []
        left = self.offload.config.zero_optimization.offload_param.max_in_cpu if in_memory is None else in_memory
        found = []
        for numel in self.numels:
            shard = self._share(placement.parameters, numel)
            if shard <= left:
                left -= shard
            else:
                found.append(shard * self.working.itemsize)
        return found

    def _weights(self, placement: Placement, policy: UpdatePolicy, in_memory: int | None) -> int:
        resting, width = placement.parameters, self.working.itemsize
        on_disk = self._weights_on_disk(placement, in_memory)
        buffers = self.offload.config.zero_optimization.offload_param.buffer_count
        needed = weights_at_once(on_disk, buffers, min(policy.depth, len(on_disk)), beside=policy.beside)
        tier = Tier.HOST if resting.tier is Tier.DISK else resting.tier
        if self._here(tier):
            needed += sum(self._share(resting, numel) for numel in self.numels) * width - sum(on_disk)
        if self.offload.link.shared and (on_disk or (resting.partitioned and self.offload.topology.shards.size > 1)):
            # The largest unit is whole at some time of any step, beside the one that stays.
            needed += (self.root + max(self.numels, default=0)) * width
        return needed

    def _gradients(self, placement: Placement, policy: UpdatePolicy) -> int:
        topology, tier = self.offload.topology, placement.optimizer.tier
        accumulation = self.offload.config.batch(topology.data.size).accumulation
        alone = topology.data.size == 1
        shards = [self._share(placement.optimizer, numel) for numel in self.trained]
        if policy.when == "in_backward" and accumulation == 1 and (placement.optimizer.partitioned or alone):
            # They have memory from their arrival to their update.
            return records_at_once((shard * self.wire for shard in shards), records_waiting(policy.depth))
        copies = sum(shards) * (self.gradient if accumulation > 1 else self.wire)
        needed = copies if policy.when == "delayed" else 0
        if self.offload.link.shared:
            return needed + sum(self._share(placement.gradients, numel) for numel in self.trained) * self.gradient
        return needed + (copies if tier is not Tier.DEVICE else 0)

    def _optimizer(self, placement: Placement, policy: UpdatePolicy) -> int:
        resting = placement.optimizer
        if resting.tier is Tier.DISK:
            records = [self._record(placement, policy, numel) for numel in self.trained]
            at_once = records_at_once(records, policy.depth)
            late = sum(self._share(resting, numel) for numel in self.trained) if policy.when == "delayed" else 0
            return at_once + late * self.working.itemsize + self._staying(placement, policy)
        away = sum(self.trained) - self._stays(placement)
        needed = self._record(placement, policy, away) if self._here(resting.tier) else 0
        return needed + self._staying(placement, policy)

    def _record(self, placement: Placement, policy: UpdatePolicy, numel: int, *, stays: bool = False) -> int:
        """Bytes of the optimizer's state of so many elements, or of what of it `stays` on the device."""
        shared = self.offload.link.shared
        on_device = stays or placement.optimizer.tier is Tier.DEVICE
        at_home = placement.parameters.tier is not Tier.DEVICE
        apart = (policy.when == "delayed" and (shared or not on_device)) or (not shared and on_device is at_home)
        return self._cost(shared or not on_device).record(self._share(placement.optimizer, numel), apart=apart)

    def _stays(self, placement: Placement) -> int:
        """Elements whose state stays on the device."""
        ratio = self.offload.config.zero_optimization.offload_optimizer.ratio
        return round((1 - ratio) * sum(self.trained)) if placement.optimizer.tier is not Tier.DEVICE else 0

    def _staying(self, placement: Placement, policy: UpdatePolicy) -> int:
        shared = self.offload.link.shared
        return self._record(placement, policy, self._stays(placement), stays=True) if shared else 0

    def on_disk(self, placement: Placement, state: str) -> int:
        if state == "parameters":
            return sum(self._weights_on_disk(placement))
        if placement.optimizer.tier is not Tier.DISK:
            return 0
        policy = self.offload.policy_of(placement)
        return self._record(placement, policy, sum(self.trained) - self._stays(placement))

    def remedies(self) -> Iterator[tuple[str, int]]:
        """Other placements, by the keys that choose them, and what they need of host memory."""
        if not self.splits:
            return  # state on disk is for optimizers that the host's kernels know
        mine = self.offload.placement
        on_disk = replace(mine, optimizer=replace(mine.optimizer, tier=Tier.DISK))
        if mine.optimizer.tier is not Tier.DISK:
            yield '"offload_optimizer": {"device": "nvme", "nvme_path": ...}', self.on_host(on_disk)
        if mine.parameters.partitioned and mine.parameters.tier is not Tier.DISK:
            all_on_disk = replace(on_disk, parameters=replace(mine.parameters, tier=Tier.DISK))
            yield "that and the same for offload_param, with max_in_cpu 0", self.on_host(all_on_disk, 0)
