"""The most bytes that a rank holds in a step: a profile's activations, and beside them what a placement adds.

The gathers, releases and buffers of the engine are followed event by event, with its own budgets.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wherry.config import Config
from wherry.placement import Placement, Tier
from wherry.plan.memory import STATE_WORDS, Cost, PlannedFlat, States, padded_states, plan_flats
from wherry.plan.profile import Moment, Profile
from wherry.plan.resting import Landing, Resting

IN_FLIGHT = 2
GRAIN = 512


@dataclass(frozen=True)
class Setting:
    """What of a config decides about memory."""

    placement: Placement
    resting: Resting
    cost: Cost
    ranks: int
    # Bytes of a gradient on the wire.
    wire: int
    accumulation: int
    live_limit: int
    prefetch: int
    persistence_threshold: int
    persistence_limit: int

    @classmethod
    def of(cls, config: Config, ranks: int, optimizer: str | None = None, *, gpu: bool = False) -> Setting:
        """`optimizer` is the one to count where the config names none; `gpu` says that the device is not the host."""
        zero = config.zero_optimization
        precision = precision_of(config)
        accumulated = config.data_types.grad_accum_dtype
        name = optimizer_of(config) or optimizer or "adamw"
        wire = config.communication_data_type or precision
        resting = Resting.of(config, ranks, gpu=gpu, precision=precision, native=name in STATE_WORDS)
        return cls(
            config.placement(),
            resting,
            Cost.of(precision, name, accumulated, state_dtype=config.state_dtype(), split=resting.split),
            ranks,
            {"fp32": 4, "bf16": 2, "fp16": 2}[wire],
            config.batch(ranks).accumulation,
            zero.stage3_max_live_parameters,
            zero.stage3_prefetch_bucket_size,
            zero.stage3_param_persistence_threshold,
            zero.stage3_model_persistence_threshold,
        )

    def flats(self, profile: Profile) -> list[list[PlannedFlat]]:
        return plan_flats(
            profile.units,
            self.placement,
            self.ranks,
            self.persistence_threshold,
            self.persistence_limit,
            homes=self.resting.homes,
        )

    def states(self, profile: Profile, rank: int = 0) -> States:
        return padded_states(
            profile.units,
            self.placement,
            self.ranks,
            self.cost,
            rank=rank,
            persistence_threshold=self.persistence_threshold,
            persistence_limit=self.persistence_limit,
            homes=self.resting.homes,
            apart=self.resting.apart,
        )

    def rows(self, profile: Profile, rank: int = 0) -> list[tuple[str, Tier, int]]:
        """Bytes of each state on each tier where some of it rests."""
        resting = self.resting
        found = self.states(profile, rank)
        flats = [flat for unit in self.flats(profile) for flat in unit]
        away = [flat for flat in flats if resting.homes and not flat.resident]
        at_home = sum(flat.layout.shard_numel for flat in away) * self.cost.parameters
        rows = [("parameters", Tier.DEVICE, found.parameters - at_home)]
        if resting.homes:
            rows.append(("parameters", resting.parameters, at_home))
        summed = found.gradients if resting.sums_on_device else 0
        rows.append(("gradients", Tier.DEVICE, summed))
        if resting.gradients_on_host:
            width = self.cost.gradients if resting.sums_on_device or self.accumulation > 1 else self.wire
            owned = sum(flat.layout.shard_numel for flat in flats if flat.trainable)
            rows.append(("gradients", Tier.HOST, owned * width))
        rows.append(("optimizer", resting.optimizer, found.optimizer))
        return [row for row in rows if row[2] or (row[1] is Tier.DEVICE and row[0] != "optimizer")]


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


@dataclass(frozen=True)
class Peak:
    """Bytes where the sum of gathered weights and activations is highest, and the highest of each by itself."""

    gathered: int
    activations: int
    highest_gathered: int
    highest_activations: int


class _Weights:
    """Which units are whole, as the engine's gatherer would have it."""

    def __init__(self, setting: Setting, profile: Profile, flats: list[list[PlannedFlat]]) -> None:
        self.setting = setting
        self.travelling = [[flat for flat in unit if not flat.resident] for unit in flats]
        self.roots = [index for index, unit in enumerate(profile.units) if unit.root]
        self.whole: list[set[int]] = [set() for _ in flats]
        self.order = [moment.unit for moment in profile.moments if moment.kind == "enter"]
        self.place: dict[int, int] = {}
        for position, unit in enumerate(self.order):
            self.place.setdefault(unit, position)
        self.live = 0
        self._last_wanted: int | None = None

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
        elif kind == "end":
            for index in range(len(self.whole)):
                self.live -= sum(self.travelling[index][i].layout.numel for i in self.whole[index])
                self.whole[index].clear()

    def gather(self, unit: int) -> None:
        for index, flat in enumerate(self.travelling[unit]):
            if index not in self.whole[unit]:
                self.whole[unit].add(index)
                self.live += flat.layout.numel

    def release(self, unit: int, *, frozen_only: bool = False, trained_only: bool = False) -> None:
        if unit in self.roots:
            return
        for index in list(self.whole[unit]):
            flat = self.travelling[unit][index]
            if (frozen_only and flat.trainable) or (trained_only and not flat.trainable):
                continue
            self.whole[unit].discard(index)
            self.live -= flat.layout.numel

    def prefetch(self, followers: Iterable[int]) -> None:
        ahead = 0
        for unit in followers:
            size = sum(f.layout.numel for i, f in enumerate(self.travelling[unit]) if i not in self.whole[unit])
            ahead += size
            too_far = ahead > self.setting.prefetch and ahead > size
            if self.live + size > self.setting.live_limit or too_far:
                return
            self.gather(unit)
            # What rests on disk is gathered one unit ahead only: reading is what looks further.
            if ahead > self.setting.prefetch or self.setting.resting.parameters is Tier.DISK:
                return


def peak(profile: Profile, setting: Setting) -> Peak:
    weights = _Weights(setting, profile, setting.flats(profile))
    gathered = activations = highest_gathered = 0
    for moment in profile.moments:
        weights.follow(moment)
        held = weights.live * setting.cost.parameters
        highest_gathered = max(highest_gathered, held)
        if held + moment.activations > gathered + activations:
            gathered, activations = held, moment.activations
    return Peak(gathered, activations, highest_gathered, profile.activations)


def buffers(profile: Profile, setting: Setting) -> int:
    """Bytes of the device's buffers through which gradients travel, once all that a step needs have been made."""
    if setting.ranks == 1 and setting.resting.sums_on_device:
        return 0
    flats = [flat for unit in setting.flats(profile) for flat in unit if flat.trainable]
    place: dict[int, int] = {}
    for index, unit in enumerate(profile.units):
        if unit.trained:
            place[index] = len(place)
    completed = [place[moment.unit] for moment in profile.moments if moment.kind == "done"]
    completed += [i for i in reversed(range(len(flats))) if i not in set(completed)]
    pool = _Pool()
    # The first backward reduces backwards, the later ones in the order that it saw.
    for order in (list(reversed(range(len(flats)))), completed):
        for micro in range(min(setting.accumulation, 2)):
            _reduce_all(pool, setting, [flats[i] for i in order], fresh=micro == 0)
    return pool.allocated


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


def _reduce_all(pool: _Pool, setting: Setting, flats: Sequence[PlannedFlat], *, fresh: bool) -> None:
    """One micro-batch's reductions: each flat's whole gradient, and its shard on the way to where that is summed."""
    resting = setting.resting
    same_type = setting.cost.gradients == setting.wire
    to_shards = setting.placement.gradients.partitioned or not resting.sums_on_device
    # Buffers go back when a reduction ends, and a shard that is copied to the host when its copy has ended.
    travelling: deque[tuple[list[int], list[int]]] = deque()
    descending: deque[list[int]] = deque()
    kept: list[int] = []

    def finish() -> None:
        whole, shard = travelling.popleft()
        pool.give(whole)
        if resting.sums_on_device:
            pool.give(shard)
        elif resting.landing is Landing.STAYS:
            kept.extend(shard)  # until the flat's own update, which nobody times here
        else:
            descending.append(shard)
            if len(descending) > IN_FLIGHT:
                pool.give(descending.popleft())

    for flat in flats:
        if len(travelling) == IN_FLIGHT:
            finish()
        whole: list[int] = []
        shard: list[int] = []
        if to_shards:
            whole.append(pool.take(flat.layout.numel * setting.wire))
            if not (resting.sums_on_device and fresh and same_type):
                if setting.ranks == 1:
                    whole, shard = [], whole
                else:
                    shard.append(pool.take(flat.layout.shard_numel * setting.wire))
        elif not same_type and (fresh or setting.accumulation == 1):
            whole.append(pool.take(flat.layout.numel * setting.wire))
        travelling.append((whole, shard))
    while travelling:
        finish()
    while descending:
        pool.give(descending.popleft())
    pool.give(kept)
