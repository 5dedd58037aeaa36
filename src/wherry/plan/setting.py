"""What of a config decides about memory, and where it lets each flat's weights and states rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.parallel.sizes import TOGETHER
from wherry.placement import Placement, Tier
from wherry.plan.grid import ALONE, Grid
from wherry.plan.memory import STATE_WORDS, WORD, Cost, PlannedFlat, States, flat_states, plan_flats
from wherry.plan.profile import Profile
from wherry.plan.resting import Landing, Resting
from wherry.sharding.layout import FlatLayout
from wherry.update.sizes import BUCKET_NUMEL, records_at_once, records_waiting, weights_at_once

if TYPE_CHECKING:
    from wherry.config import Config


@dataclass(frozen=True)
class Placed:
    """A flat, where its weights rest, and where its optimizer state does and its gradients go."""

    flat: PlannedFlat
    home: Tier
    resting: Resting
    cost: Cost
    # The number of the record that its optimizer state is part of; of a flat that is not trained it means nothing.
    record: int

    @property
    def layout(self) -> FlatLayout:
        return self.flat.layout

    @property
    def travels(self) -> bool:
        return not self.flat.resident

    @property
    def apart(self) -> bool:
        return self.resting.apart(at_home=self.home is not Tier.DEVICE)


class _Records:
    """Numbers the records of optimizer state: small flats that follow each other, and rest alike, share one."""

    def __init__(self) -> None:
        self._last = -1
        self._numel = 0
        self._kind: tuple[Resting, bool] | None = None

    def of(self, numel: int, resting: Resting, home: Tier) -> int:
        alone, kind = home is Tier.DISK, (resting, resting.apart(at_home=home is not Tier.DEVICE))
        self._numel += numel
        if alone or kind != self._kind or self._numel > BUCKET_NUMEL:
            self._last += 1
            self._numel = numel
        self._kind = None if alone else kind
        return self._last


@dataclass(frozen=True)
class Setting:
    """What of a config decides about memory."""

    placement: Placement
    resting: Resting
    # That of flats whose optimizer state is not offloaded, and the share of elements that is theirs.
    staying: Resting
    stays: float
    cost: Cost
    staying_cost: Cost
    # Data-parallel ranks, and how many of them share out one copy of what is partitioned.
    ranks: int
    shards: int
    # Bytes of a gradient on the wire.
    wire: int
    accumulation: int
    live_limit: int
    # None where the engine is to find out.
    prefetch: int
    persistence_threshold: int
    persistence_limit: int
    # Elements of parameters that rest in memory though they may rest on disk.
    in_memory: int
    # Records of optimizer state on disk, and units of weights there, that have memory at a time.
    depth: int
    units_read: int
    # Elements of small flats that are reduced, and gathered, together.
    reduced_together: int
    gathered_together: int
    # Ranks that keep the gathered weights a second time among them; 1 for none.
    node: int
    # How a model is shared, and the micro-batches whose activations are kept at a time.
    grid: Grid
    in_flight: int
    # Micro-batches of a window that go through the model together, a unit at a time.
    together: int
    # Whether gradients stay in autograd's own tensors, which have memory from their arrival to the next forward.
    loose: bool = False

    @classmethod
    def of(
        cls, config: Config, ranks: int, optimizer: str | None = None, *, gpu: bool = False, grid: Grid = ALONE
    ) -> Setting:
        """For `ranks` data-parallel ranks, each with its part of a model shared by `grid`.

        `optimizer` is the one to count where the config names none; `gpu` says that the device is not the host.
        """
        precision, accumulated = precision_of(config), config.data_types.grad_accum_dtype
        name = optimizer_of(config) or optimizer or "adamw"
        # Of another optimizer, which the host's kernels do not know, as many moments are counted as most have.
        counted = name if name in STATE_WORDS else "adamw"
        may_split = name in STATE_WORDS and precision == "bf16" and config.wherry.master != "whole"

        def cost(on_host: bool) -> Cost:
            split = on_host and may_split
            return Cost.of(precision, counted, accumulated, state_dtype=config.state_dtype(), split=split)

        wire = {"fp32": 4, "bf16": 2, "fp16": 2}[config.communication_data_type or precision]
        return cls.with_cost(config, config.placement(), ranks, cost, wire, gpu=gpu, grid=grid)

    @classmethod
    def with_cost(
        cls,
        config: Config,
        placement: Placement,
        ranks: int,
        cost: Callable[[bool], Cost],
        wire: int,
        *,
        gpu: bool,
        grid: Grid = ALONE,
    ) -> Setting:
        """Of states placed so, perhaps elsewhere than the config says.

        `cost` is a parameter's, where the host's kernels may update it and where not; `wire` the bytes of a gradient on
        its way.
        """
        zero = config.zero_optimization
        offload = zero.offload_optimizer
        offloaded, staying = (Resting.of(config, placement, ranks, gpu=gpu, stays=stays) for stays in (False, True))
        accumulation = config.batch(ranks).accumulation
        return cls(
            placement=placement,
            resting=offloaded,
            staying=staying,
            stays=1 - offload.ratio if placement.optimizer.tier is not Tier.DEVICE else 0,
            cost=cost(offloaded.on_host),
            staying_cost=cost(staying.on_host),
            ranks=ranks,
            shards=config.shard_ranks(ranks),
            wire=wire,
            accumulation=accumulation,
            live_limit=zero.stage3_max_live_parameters,
            prefetch=zero.stage3_prefetch_bucket_size,
            persistence_threshold=zero.stage3_param_persistence_threshold,
            persistence_limit=zero.stage3_model_persistence_threshold,
            in_memory=zero.offload_param.max_in_cpu if placement.parameters.tier is Tier.DISK else 0,
            depth=offload.buffer_count,
            units_read=zero.offload_param.buffer_count,
            reduced_together=min(zero.reduce_bucket_size, TOGETHER),
            gathered_together=min(zero.allgather_bucket_size, TOGETHER),
            node=zero.zero_hpz_partition_size if placement.parameters.partitioned else 1,
            grid=grid,
            in_flight=grid.in_flight(accumulation),
            together=accumulation if config.wherry.accumulation == "layer_major" and grid.pipe == 1 else 1,
        )

    @property
    def passes(self) -> int:
        """Times that a window goes through the model: weights come, and gradients leave, once each time."""
        return -(-self.accumulation // self.together)

    def flats(self, profile: Profile) -> list[list[Placed]]:
        """The flats of each unit, in the order in which the engine places them."""
        planned = plan_flats(
            profile.units,
            self.placement,
            self.shards,
            self.persistence_threshold,
            self.persistence_limit,
            homes=self.resting.homes,
        )
        stay = round(self.stays * sum(sum(unit.trained) for unit in profile.units))
        in_memory = self.in_memory
        records = _Records()
        placed: list[list[Placed]] = []
        for unit in planned:
            placed.append([])
            for flat in unit:
                home = self.resting.parameters if not flat.resident else Tier.DEVICE
                if home is Tier.DISK and flat.layout.shard_numel <= in_memory:
                    in_memory -= flat.layout.shard_numel
                    home = Tier.HOST if self.resting.gpu else Tier.DEVICE
                if home is Tier.DEVICE and self.shards == 1:
                    flat = replace(flat, resident=True)
                stays = flat.trainable and 0 < flat.layout.payload <= stay
                stay -= flat.layout.payload if stays else 0
                resting, cost = (self.staying, self.staying_cost) if stays else (self.resting, self.cost)
                record = records.of(flat.layout.shard_numel, resting, home) if flat.trainable else -1
                placed[-1].append(Placed(flat, home, resting, cost, record))
        return placed

    def states(self, profile: Profile, rank: int = 0) -> States:
        return sum(
            (
                flat_states(each.flat, self.placement, each.cost, rank % self.shards, apart=each.apart)
                for unit in self.flats(profile)
                for each in unit
            ),
            start=States(0, 0, 0),
        )

    def rows(self, profile: Profile, rank: int = 0) -> list[tuple[str, Tier, int]]:
        """Bytes of each state on each tier where some of it rests, and of what the host's memory has of it in between.

        Of what comes and goes it is the most that there may be.
        """
        found: Counter[tuple[str, Tier]] = Counter()
        found["parameters", Tier.DEVICE] = found["gradients", Tier.DEVICE] = 0
        records: Counter[int] = Counter()
        flats = all_of(self.flats(profile))
        for each in flats:
            held = flat_states(each.flat, self.placement, each.cost, rank % self.shards, apart=each.apart)
            found["parameters", each.home] += held.parameters
            if each.travels and self.node > 1:
                found["parameters", Tier.DEVICE] += each.layout.numel // self.node * each.cost.parameters
            if each.flat.trainable:
                resting = each.resting
                found["gradients", Tier.DEVICE] += held.gradients if resting.sums_on_device else 0
                # Where the update reads them, and copies for late ones, which read while the next gradients come.
                copies = resting.gradients_on_host + resting.late
                found["gradients", Tier.HOST] += copies * each.layout.shard_numel * self._owned_width(each)
                found["optimizer", resting.optimizer] += held.optimizer
                if resting.optimizer is Tier.DISK:
                    records[each.record] += held.optimizer
                    # Late updates leave new weights in memory until they are published.
                    come = self.updated(each, rank) * each.cost.parameters if resting.late else 0
                    found["parameters to come", Tier.HOST] += come
        found["gradients", Tier.HOST] += self.waiting(flats) if self.resting.gpu else 0
        found["optimizer read", Tier.HOST] = records_at_once(records.values(), self.depth)
        found["parameters read", Tier.HOST] = self._weights_read([each for each in flats if each.home is Tier.DISK])
        order = [(state, tier) for state in ("parameters", "gradients", "optimizer") for tier in Tier]
        order += [(state, Tier.HOST) for state in ("parameters read", "optimizer read", "parameters to come")]
        return [(*place, found[place]) for place in order if found[place] or place in _ALWAYS]

    def _owned_width(self, each: Placed) -> int:
        """Bytes of an element of the gradient that an update reads: a single one is kept as it came over the wire."""
        return each.cost.gradients if each.resting.sums_on_device or self.accumulation > 1 else self.wire

    def updated(self, each: Placed, rank: int = 0) -> int:
        """Elements of a flat that a rank updates."""
        layout = each.layout
        spans = layout.segments(rank % self.shards if layout.ranks > 1 else 0)
        return sum(span.stop - span.start for span in spans)

    def _weights_read(self, on_disk: Sequence[Placed]) -> int:
        """Bytes of host memory for weights that rest on disk."""
        shards = [each.layout.shard_numel * each.cost.parameters for each in on_disk]
        # What has copies of the weights publishes them one by one.
        updated = min(self.depth, sum(each.flat.trainable and not each.apart for each in on_disk))
        return weights_at_once(shards, self.units_read, updated, beside=self.resting.policy != "at_step")

    def waiting(self, flats: Iterable[Placed]) -> int:
        """Bytes in host memory of gradients that wait for their updates in the backward, where these end then."""
        records: Counter[int] = Counter()
        for each in flats:
            on_host = not self.resting.gpu or each.resting.landing is not Landing.STAYS
            if each.flat.trainable and each.resting.brief and on_host:
                records[each.record] += each.layout.shard_numel * self.wire
        return records_at_once(records.values(), records_waiting(self.depth))

    def least_gathered(self, profile: Profile, flats: Sequence[Sequence[Placed]]) -> int:
        """Bytes of weights that are whole at some time of any step: the largest unit's, beside those that stay."""
        sizes = [sum(each.layout.numel for each in unit if each.travels) for unit in flats]
        stay = sum(size for size, unit in zip(sizes, profile.units, strict=True) if unit.root)
        largest = max((size for size, unit in zip(sizes, profile.units, strict=True) if not unit.root), default=0)
        return (stay + largest) * self.cost.parameters

    def sends_each(self, profile: Profile) -> bool:
        """Whether each micro-batch that goes alone has weights or gradients come over a wire, a bus or from a disk."""
        flats = all_of(self.flats(profile))
        if self.shards > 1 and (self.placement.gradients.partitioned or any(each.travels for each in flats)):
            return True
        away = [each for each in flats if each.travels and each.home is not Tier.DEVICE]
        # The host's memory may keep all that rests on disk.
        kept = not self.resting.gpu and self._weights_read(away) >= sum(
            each.layout.shard_numel * each.cost.parameters for each in away
        )
        return bool(away) and not kept

    def summed(self, profile: Profile, *, root: bool) -> int:
        """Bytes of the sums of gradients of micro-batches that go together, beside what one has: they are in fp32.

        Of the root unit alone, or of the largest one beside it too.
        """
        if self.together == 1:
            return 0
        units = [unit for unit in profile.units if unit.root or not root]
        most = max((sum(unit.trained) for unit in units if not unit.root), default=0)
        sums = most + sum(sum(unit.trained) for unit in units if unit.root)
        arriving = max((numel for unit in units for numel in unit.trained), default=0)
        return (WORD - self.cost.parameters) * sums + WORD * arriving

    def host_needs(self, profile: Profile) -> int:
        """Bytes of host memory that a rank's states need, whatever a step makes beside them: what a start asks for."""
        rows = self.rows(profile)
        if self.resting.gpu:
            return sum(nbytes for _, tier, nbytes in rows if tier is Tier.HOST)
        flats = self.flats(profile)
        held = sum(nbytes for _, tier, nbytes in rows if tier is not Tier.DISK)
        return held + self.waiting(all_of(flats)) + self.least_gathered(profile, flats)


def all_of(units: Iterable[Iterable[Placed]]) -> list[Placed]:
    return [each for unit in units for each in unit]


_ALWAYS = (("parameters", Tier.DEVICE), ("gradients", Tier.DEVICE))


def precision_of(config: Config) -> str:
    return "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else config.data_types.param_dtype or "fp32"


def optimizer_of(config: Config) -> str | None:
    """The optimizer of a config, as `STATE_WORDS` knows it."""
    if config.optimizer is None or config.optimizer.type is None:
        return None
    name = config.optimizer.type.lower()
    if name == "sgd" and (config.optimizer.params or {}).get("momentum"):
        return "sgd-momentum"
    return name
