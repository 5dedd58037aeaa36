"""The most bytes that a rank holds in a step: a profile's activations, and beside them what a placement adds.

The gathers, releases and buffers of the engine are followed event by event, with its own budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wherry.parallel.sizes import SMALL
from wherry.placement import Tier
from wherry.plan.memory import WORD
from wherry.plan.profile import Moment, Profile
from wherry.plan.reductions import Buffers, Reductions, Together
from wherry.plan.setting import Placed, Setting, all_of
from wherry.update.sizes import BUCKET_NUMEL


@dataclass
class Peak:
    """Bytes where their sum is highest: of gathered weights, of activations, of buffers for a while, and of gradients
    that stay loose.

    The highest of the first by itself, and of the next two together, are beside them.
    """

    gathered: int = 0
    activations: int = 0
    merged: int = 0
    loose: int = 0
    highest_gathered: int = 0
    highest_working: int = 0

    def see(self, gathered: int, activations: int, merged: int, loose: int = 0) -> None:
        self.highest_gathered = max(self.highest_gathered, gathered)
        self.highest_working = max(self.highest_working, activations + merged)
        if gathered + activations + merged + loose > self.gathered + self.activations + self.merged + self.loose:
            self.gathered, self.activations, self.merged, self.loose = gathered, activations, merged, loose


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
        self.look_ahead = setting.prefetch
        self.buffers = Buffers()
        self._together: dict[tuple[int, int], Together] = {}
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
        ahead, under_way, large, wanted = 0, False, False, list[int]()
        for unit in followers:
            released = [each for i, each in enumerate(self.travelling[unit]) if i not in self.whole[unit]]
            size = sum(each.layout.numel for each in released)
            small = all(map(self._is_small, released))
            under_way = under_way or not released
            too_far = ahead + size > self.look_ahead and (large or (small and ahead > 0))
            if self.live + ahead + size > self.setting.live_limit or too_far:
                break
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
    weights, reductions = _Weights(setting, profile, flats), Reductions(setting, all_of(flats))
    reduced: set[int] = set()
    highest = Peak()
    came = [sum(unit.trained) * setting.cost.gradients if setting.loose else 0 for unit in profile.units]
    # As a start asks for it: what the last unit's backward gathers beside all others' gradients.
    highest.see(setting.least_gathered(profile, flats), 0, 0, sum(came))
    others = (max(setting.in_flight, setting.together) - 1) * profile.kept
    sums = {"turn": setting.summed(profile, root=True)}
    sums |= dict.fromkeys(("want", "done"), setting.summed(profile, root=False))
    loose = 0
    for moment in profile.moments:
        if moment.kind == "done":
            reduced.add(moment.unit)
            loose += came[moment.unit]
            _reduce(reductions, flats[moment.unit], fresh=True)
        weights.follow(moment)
        merged = weights.buffers.look() + reductions.buffers.look()
        activations = moment.activations + others + sums.get(moment.kind, 0)
        highest.see(weights.live * setting.cost.parameters, activations, merged, loose)
    # The backward has ended, and has let go of all weights: what still waits is reduced. Then comes the update.
    for index in reversed(range(len(flats))):
        if index not in reduced:
            _reduce(reductions, flats[index], fresh=True)
    reductions.end()
    highest.see(0, 0, reductions.buffers.look(), sum(came))
    highest.see(0, 0, _refreshed(setting, all_of(flats)))
    highest.see(0, _converted(setting, all_of(flats)), 0)
    return highest


def _reduce(reductions: Reductions, flats: Iterable[Placed], *, fresh: bool) -> None:
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
        if batch > BUCKET_NUMEL:
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
    flats = [each for each in all_of(units) if each.flat.trainable]
    place: dict[int, int] = {}
    for index, unit in enumerate(profile.units):
        if unit.trained:
            place[index] = len(place)
    completed = [place[moment.unit] for moment in profile.moments if moment.kind == "done"]
    completed += [i for i in reversed(range(len(flats))) if i not in set(completed)]
    reductions = Reductions(setting, flats)
    # The first backward reduces backwards, the later ones in the order that it saw.
    for order in (list(reversed(range(len(flats)))), completed):
        for micro in range(min(setting.accumulation, 2)):
            reductions.boundary = micro == min(setting.accumulation, 2) - 1
            _reduce(reductions, (flats[i] for i in order), fresh=micro == 0)
            reductions.end()
    return max(reductions.pool.allocated, 0 if setting.resting.gpu else setting.waiting(flats))
