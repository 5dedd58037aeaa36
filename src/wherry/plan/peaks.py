"""The most bytes that a rank holds in a step: a profile's activations, and beside them what a placement adds.

The gathers, releases and buffers of the engine are followed event by event, with its own budgets.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.parallel.sizes import ABREAST, EXCHANGED, SMALL, TOGETHER
from wherry.placement import Placement, Tier
from wherry.plan.grid import ALONE, Grid
from wherry.plan.memory import STATE_WORDS, WORD, Cost, PlannedFlat, States, flat_states, plan_flats
from wherry.plan.profile import Moment, Profile
from wherry.plan.resting import Landing, Resting
from wherry.sharding.layout import FlatLayout
from wherry.sharding.reach import furthest
from wherry.update.sizes import BATCH_NUMEL, records_at_once, records_waiting, weights_at_once

if TYPE_CHECKING:
    from wherry.config import Config

PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
IN_FLIGHT = 2
GRAIN = 512


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
        if alone or kind != self._kind or self._numel > BATCH_NUMEL:
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
    prefetch: int | None
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
            prefetch=None if PREFETCH in config.auto else zero.stage3_prefetch_bucket_size,
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

    @property
    def over_gloo(self) -> bool:
        """Whether ranks talk to each other over gloo, as they do where the device is the host."""
        return not self.resting.gpu

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
        flats = _all(self.flats(profile))
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
        flats = _all(self.flats(profile))
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
        return held + self.waiting(_all(flats)) + self.least_gathered(profile, flats)


def _all(units: Iterable[Iterable[Placed]]) -> list[Placed]:
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


@dataclass
class Peak:
    """Bytes where their sum is highest: of gathered weights, of activations, and of buffers for a while.

    The highest of the first by itself, and of the other two together, are beside them.
    """

    gathered: int = 0
    activations: int = 0
    merged: int = 0
    highest_gathered: int = 0
    highest_working: int = 0

    def see(self, gathered: int, activations: int, merged: int) -> None:
        self.highest_gathered = max(self.highest_gathered, gathered)
        self.highest_working = max(self.highest_working, activations + merged)
        if gathered + activations + merged > self.gathered + self.activations + self.merged:
            self.gathered, self.activations, self.merged = gathered, activations, merged


@dataclass
class _Together:
    """What flats on their way take beside their own memory, until one of them is waited for."""

    nbytes: int


@dataclass
class _Buffers:
    """Bytes of the buffers in which small flats travel together, or in which sums are received: now, and the most since
    somebody looked.
    """

    live: int = 0
    most: int = 0

    def take(self, nbytes: int) -> _Together:
        self.live += nbytes
        self.most = max(self.most, self.live)
        return _Together(nbytes)

    def free(self, together: _Together | None) -> None:
        if together is not None:
            self.live -= together.nbytes
            together.nbytes = 0

    def look(self) -> int:
        most, self.most = self.most, self.live
        return most


class _Weights:
    """Which units are whole, as the engine's gatherer would have it."""

    def __init__(self, setting: Setting, profile: Profile, flats: list[list[Placed]]) -> None:
        self.setting = setting
        self.travelling = [[each for each in unit if each.travels] for unit in flats]
        self.roots = [index for index, unit in enumerate(profile.units) if unit.root]
        self.whole: list[set[int]] = [set() for _ in flats]
        self.order = [moment.unit for moment in profile.moments if moment.kind == "enter"]
        self.place: dict[int, int] = {}
        for position, unit in enumerate(self.order):
            self.place.setdefault(unit, position)
        self.live = 0
        self.look_ahead = self._furthest() if setting.prefetch is None else setting.prefetch
        self.buffers = _Buffers()
        self._together: dict[tuple[int, int], _Together] = {}
        # Large flats that are on their way, and how many are worth having on it at once.
        self._carried: set[tuple[int, int]] = set()
        self._abreast = ABREAST if setting.over_gloo and setting.shards > 1 else None
        self._last_wanted: int | None = None

    def _furthest(self) -> int:
        """The most that a search comes to: what is planned for must hold whatever it finds."""
        sizes = [
            sum(each.layout.numel for each in unit)
            for index, unit in enumerate(self.travelling)
            if index not in self.roots and not any(each.home is Tier.DISK for each in unit)
        ]
        return furthest(max(sizes, default=0), self.setting.live_limit)

    def follow(self, moment: Moment) -> None:
        kind, unit = moment.kind, moment.unit
        if kind in ("begin", "turn"):
            for root in self.roots:
                self.gather(root)
        elif kind == "enter":
            self.gather(unit)
            self.prefetch(self.order[self.place[unit] + 1 :])
        elif kind == "exit":
            self.release(unit)
        elif kind == "want":
            if self._last_wanted is not None:
                self.release(self._last_wanted, frozen_only=True)
            self._last_wanted = unit
            self.gather(unit)
            self.prefetch(reversed(self.order[: self.place[unit]]))
        elif kind == "done":
            self.release(unit, trained_only=True)

    def gather(self, unit: int) -> None:
        self.start(unit)
        for index in range(len(self.travelling[unit])):
            self._wait(unit, index)

    def start(self, *units: int) -> None:
        """As the engine sends them: small flats that follow each other together."""
        together: list[tuple[int, int]] = []
        for unit in units:
            for index, each in enumerate(self.travelling[unit]):
                if index in self.whole[unit]:
                    continue
                self.whole[unit].add(index)
                self.live += each.layout.numel
                if not self._is_small(each):
                    self._carried.add((unit, index))
                    continue
                if self._numel(together) + each.layout.numel > self.setting.gathered_together:
                    self._send(together)
                    together = []
                together.append((unit, index))
        self._send(together)

    def _is_small(self, each: Placed) -> bool:
        return each.home is Tier.DEVICE and each.layout.numel <= min(SMALL, self.setting.gathered_together)

    def _numel(self, flats: list[tuple[int, int]]) -> int:
        return sum(self.travelling[unit][index].layout.numel for unit, index in flats)

    def _send(self, flats: list[tuple[int, int]]) -> None:
        if len(flats) > 1:
            numel = self._numel(flats)
            own = numel // self.setting.shards
            self._together.update(dict.fromkeys(flats, self.buffers.take((numel + own) * self.setting.cost.parameters)))

    def _wait(self, unit: int, index: int) -> None:
        self._carried.discard((unit, index))
        self.buffers.free(self._together.pop((unit, index), None))

    def release(self, unit: int, *, frozen_only: bool = False, trained_only: bool = False) -> None:
        if unit in self.roots:
            return
        for index in list(self.whole[unit]):
            each = self.travelling[unit][index]
            if (frozen_only and each.flat.trainable) or (trained_only and not each.flat.trainable):
                continue
            self._wait(unit, index)
            self.whole[unit].discard(index)
            self.live -= each.layout.numel

    def prefetch(self, followers: Iterable[int]) -> None:
        ahead, begun, under_way, large, wanted = 0, 0, False, False, list[int]()
        for unit in followers:
            released = [each for i, each in enumerate(self.travelling[unit]) if i not in self.whole[unit]]
            size = sum(each.layout.numel for each in released)
            small = all(map(self._is_small, released))
            under_way = under_way or not released
            too_far = ahead + size > self.look_ahead and (large or (small and ahead > 0))
            if self.live + ahead + size > self.setting.live_limit or too_far:
                break
            more = 0 if small else len(released)
            if more and self._abreast is not None and len(self._carried) + begun >= self._abreast:
                break
            begun += more
            ahead += size
            large = large or not small
            if released:
                wanted.append(unit)
            # What rests on disk is gathered one unit ahead only: reading is what looks further.
            if ahead > self.look_ahead or any(each.home is Tier.DISK for each in self.travelling[unit]):
                break
        if not (under_way and not large and ahead < self.setting.gathered_together // 2):
            self.start(*wanted)


def peak(profile: Profile, setting: Setting) -> Peak:
    """The step's highest point, once the order of its units is known."""
    flats = setting.flats(profile)
    weights, reductions = _Weights(setting, profile, flats), _Reductions(setting, _all(flats))
    reduced: set[int] = set()
    highest = Peak()
    highest.see(setting.least_gathered(profile, flats), 0, 0)
    others = (max(setting.in_flight, setting.together) - 1) * profile.kept
    sums = {"turn": setting.summed(profile, root=True)}
    sums |= dict.fromkeys(("want", "done"), setting.summed(profile, root=False))
    for moment in profile.moments:
        if moment.kind == "done":
            reduced.add(moment.unit)
            _reduce(reductions, flats[moment.unit], fresh=True)
        weights.follow(moment)
        merged = weights.buffers.look() + reductions.buffers.look()
        activations = moment.activations + others + sums.get(moment.kind, 0)
        highest.see(weights.live * setting.cost.parameters, activations, merged)
    # The backward has ended, and has let go of all weights: what still waits is reduced. Then comes the update.
    for index in reversed(range(len(flats))):
        if index not in reduced:
            _reduce(reductions, flats[index], fresh=True)
    reductions.end()
    highest.see(0, 0, reductions.buffers.look())
    highest.see(0, 0, _refreshed(setting, _all(flats)))
    highest.see(0, _converted(setting, _all(flats)), 0)
    return highest


def _reduce(reductions: _Reductions, flats: Iterable[Placed], *, fresh: bool) -> None:
    for each in flats:
        if each.flat.trainable:
            reductions.launch(each, fresh=fresh)


def _converted(setting: Setting, flats: Iterable[Placed]) -> int:
    """Bytes of gradients in fp32 that an update on a GPU makes, a record at a time; its fused kernel needs no more."""
    records: Counter[int] = Counter()
    for each in flats:
        if each.flat.trainable and not each.resting.on_host:
            records[each.record] += setting.updated(each) * max(WORD, each.cost.parameters)
    return max(records.values(), default=0)


def _refreshed(setting: Setting, flats: Sequence[Placed]) -> int:
    """Bytes of the buffers in which updated weights that rest whole are gathered: of all, before any is waited for."""
    total, together, batch = 0, list[int](), 0

    def send() -> None:
        nonlocal total
        if len(together) > 1:
            total += (sum(together) + sum(together) // setting.shards) * setting.cost.parameters
        together.clear()

    for each in flats:
        layout = each.layout
        if not (each.flat.trainable and each.flat.resident and layout.ranks > 1):
            continue
        batch += layout.shard_numel
        if batch > BATCH_NUMEL:
            send()
            batch = layout.shard_numel
        if layout.numel > min(SMALL, setting.gathered_together):
            continue
        if sum(together) + layout.numel > setting.gathered_together:
            send()
        together.append(layout.numel)
    send()
    return total


def buffers(profile: Profile, setting: Setting) -> int:
    """Bytes of the device's buffers through which gradients travel, once all that a step needs have been made."""
    units = setting.flats(profile)
    flats = [each for each in _all(units) if each.flat.trainable]
    place: dict[int, int] = {}
    for index, unit in enumerate(profile.units):
        if unit.trained:
            place[index] = len(place)
    completed = [place[moment.unit] for moment in profile.moments if moment.kind == "done"]
    completed += [i for i in reversed(range(len(flats))) if i not in set(completed)]
    reductions = _Reductions(setting, flats)
    # The first backward reduces backwards, the later ones in the order that it saw.
    for order in (list(reversed(range(len(flats)))), completed):
        for micro in range(min(setting.accumulation, 2)):
            reductions.boundary = micro == min(setting.accumulation, 2) - 1
            _reduce(reductions, (flats[i] for i in order), fresh=micro == 0)
            reductions.end()
    return max(reductions.pool.allocated, 0 if setting.resting.gpu else setting.waiting(flats))


class _Pool:
    """Buffers by size class: what is given back is lent again, and nothing is freed."""

    def __init__(self) -> None:
        self.idle: Counter[int] = Counter()
        self.allocated = 0

    def take(self, nbytes: int) -> int:
        size = -(-nbytes // GRAIN) * GRAIN
        if self.idle[size]:
            self.idle[size] -= 1
        else:
            self.allocated += size
        return size

    def give(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            self.idle[size] += 1


@dataclass
class _Reduction:
    """A flat's whole gradient, and its shard on the way to where that is summed."""

    each: Placed
    whole: list[int]
    shard: list[int]
    together: _Together | None = None


class _Reductions:
    """The reductions of one micro-batch after another, as the engine launches them and waits for them."""

    def __init__(self, setting: Setting, flats: Iterable[Placed]) -> None:
        self.setting = setting
        self._flats_of = Counter(each.record for each in flats if each.flat.trainable)
        self.pool = _Pool()
        self.buffers = _Buffers()
        # Buffers go back when a reduction ends, and a shard that is copied to the host when its copy has ended.
        self._waiting: list[_Reduction] = []
        self._travelling: deque[_Reduction] = deque()
        # Shards on their way between the replicas.
        self._between: deque[_Reduction] = deque()
        self.boundary = True
        self._descending: deque[list[int]] = deque()
        # Shards that wait for their own updates, by record, and how many flats of each have landed.
        self._kept: dict[int, list[int]] = {}
        self._landed: Counter[int] = Counter()

    def launch(self, each: Placed, *, fresh: bool) -> None:
        setting = self.setting
        if setting.ranks == 1 and each.resting.sums_on_device:
            return  # it is summed where it lies
        self._drain(IN_FLIGHT - 1)
        reduction = self._prepared(each, fresh=fresh)
        numel = each.layout.numel
        if setting.ranks == 1 or numel > min(SMALL, setting.reduced_together):
            self._travel([reduction])
            return
        if sum(other.each.layout.numel for other in self._waiting) + numel > setting.reduced_together:
            self._send_waiting()
        self._waiting.append(reduction)

    def end(self) -> None:
        """The backward has ended."""
        self._send_waiting()
        self._drain(0)
        while self._descending:
            self.pool.give(self._descending.popleft())
        for record in list(self._kept):
            self._let_go(record)

    def _prepared(self, each: Placed, *, fresh: bool) -> _Reduction:
        setting, layout = self.setting, each.layout
        same_type = each.cost.gradients == setting.wire
        sums = each.resting.sums_on_device
        whole: list[int] = []
        shard: list[int] = []
        if (setting.placement.gradients.partitioned and setting.shards > 1) or not sums:
            whole.append(self.pool.take(layout.numel * setting.wire))
            if not (sums and fresh and same_type):
                if setting.shards == 1:
                    whole, shard = [], whole
                else:
                    shard.append(self.pool.take(layout.shard_numel * setting.wire))
        elif not same_type and self.boundary:
            whole.append(self.pool.take(layout.numel * setting.wire))
        return _Reduction(each, whole, shard)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._travel(waiting)

    def _travel(self, reductions: list[_Reduction]) -> None:
        numel = sum(reduction.each.layout.numel for reduction in reductions)
        nbytes = self._received(numel)
        if len(reductions) > 1:
            own = numel // self.setting.shards if self.setting.placement.optimizer.partitioned else 0
            nbytes += (numel + own) * self.setting.wire
        if nbytes:
            together = self.buffers.take(nbytes)
            for reduction in reductions:
                reduction.together = together
        self._travelling += reductions

    def _received(self, numel: int) -> int:
        """Bytes of what a reduce-scatter receives beside what it sums, where it is an exchange."""
        setting = self.setting
        exchanged = setting.over_gloo and setting.placement.optimizer.partitioned and setting.shards > 1
        nbytes = numel * setting.wire
        return nbytes if exchanged and nbytes <= EXCHANGED else 0

    def _drain(self, keep: int) -> None:
        crossing: list[_Reduction] = []
        while len(self._travelling) > keep:
            reduction = self._travelling.popleft()
            self.buffers.free(reduction.together)
            self.pool.give(reduction.whole)
            if self._crosses(reduction):
                crossing.append(reduction)
            else:
                self._land(reduction)
        for reduction in crossing:
            if len(self._between) == IN_FLIGHT:
                self._land(self._between.popleft())
            self._between.append(reduction)
        while keep == 0 and self._between:
            self._land(self._between.popleft())

    def _crosses(self, reduction: _Reduction) -> bool:
        """Whether it is summed over the replicas: at the boundary, or with every micro-batch that leaves the device."""
        setting, each = self.setting, reduction.each
        sums = each.resting.sums_on_device
        if setting.shards == setting.ranks or not setting.placement.optimizer.partitioned:
            return False
        if sums and self.boundary:
            self.pool.give(reduction.shard)
            same_type = each.cost.gradients == setting.wire
            reduction.shard = [] if same_type else [self.pool.take(each.layout.shard_numel * setting.wire)]
        return self.boundary or not sums

    def _land(self, reduction: _Reduction) -> None:
        resting = reduction.each.resting
        if resting.sums_on_device:
            self.pool.give(reduction.shard)
        elif resting.landing is Landing.STAYS:
            self._keep(reduction)
        else:
            self._descending.append(reduction.shard)
            if len(self._descending) > IN_FLIGHT:
                self.pool.give(self._descending.popleft())

    def _keep(self, reduction: _Reduction) -> None:
        """Until its own update: a GPU's is made at once, the host's as late as the engine lets it be."""
        record = reduction.each.record
        self._kept.setdefault(record, []).extend(reduction.shard)
        self._landed[record] += 1
        if self.setting.resting.gpu and self._landed[record] == self._flats_of[record]:
            self._let_go(record)
        elif len(self._kept) > records_waiting(self.setting.depth):
            self._let_go(next(iter(self._kept)))

    def _let_go(self, record: int) -> None:
        self._landed[record] = 0
        self.pool.give(self._kept.pop(record))
