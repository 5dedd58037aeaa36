"""The buffers through which gradients travel in a step, and those of small flats that travel together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from wherry.parallel.sizes import SMALL
from wherry.plan.resting import Landing
from wherry.plan.setting import Placed, Setting
from wherry.update.sizes import records_waiting

IN_FLIGHT = 2
GRAIN = 512


@dataclass
class Together:
    """What flats on their way take beside their own memory, until one of them is waited for."""

    nbytes: int


@dataclass
class Buffers:
    """Bytes of the buffers in which small flats travel together, or in which sums are received: now, and the most since
    somebody looked.
    """

    live: int = 0
    most: int = 0

    def take(self, nbytes: int) -> Together:
        self.live += nbytes
        self.most = max(self.most, self.live)
        return Together(nbytes)

    def free(self, together: Together | None) -> None:
        if together is not None:
            self.live -= together.nbytes
            together.nbytes = 0

    def look(self) -> int:
        most, self.most = self.most, self.live
        return most


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
    together: Together | None = None


class Reductions:
    """The reductions of one micro-batch after another, as the engine launches them and waits for them."""

    def __init__(self, setting: Setting, flats: Iterable[Placed]) -> None:
        self.setting = setting
        self._flats_of = Counter(each.record for each in flats if each.flat.trainable)
        self.pool = _Pool()
        self.buffers = Buffers()
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
        setting = self.setting
        # Where sums are whole on every rank one number more travels with the last of them.
        self._send_waiting(joined=self.boundary and setting.ranks > 1 and not setting.placement.optimizer.partitioned)
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

    def _send_waiting(self, *, joined: bool = False) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._travel(waiting, joined=joined)

    def _travel(self, reductions: list[_Reduction], *, joined: bool = False) -> None:
        numel = sum(reduction.each.layout.numel for reduction in reductions)
        nbytes = 0
        if len(reductions) > 1 or joined:
            own = numel // self.setting.shards if self.setting.placement.optimizer.partitioned else 0
            nbytes += (numel + own) * self.setting.wire
        if nbytes:
            together = self.buffers.take(nbytes)
            for reduction in reductions:
                reduction.together = together
        self._travelling += reductions

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
