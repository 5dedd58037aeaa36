"""The recorded order of units, from which prefetch is decided, and which ranks keep to in their gathers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from wherry.observe.log import logger
from wherry.sharding.unit import Unit

DIGEST = 1_000_003
# After so many windows in which every rank took one and the same other path, the program itself changes its path.
TRUST = 4


class Pass(enum.Enum):
    """What a way through the units is for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    # A forward without gradients.
    LOOK = "look"
    # Members are single objects, and the hash that Python gives an enum is a call each time.
    __hash__ = object.__hash__


class Schedule:
    """The order in which units are expected, in forwards and in backwards.

    Collectives must come in one order on every rank. A rank whose model passes over a unit that is expected stands in
    for it: it takes part in the unit's gather, and in backward in its reduction, because other ranks may use the unit.
    So ranks may skip different units, and the results are those of missing gradients.

    Until the first step, the order in which the model holds its units is expected. After each window the ranks learn,
    by a digest that travels with the gradients' norm, whether they all took one path. If they did, it is expected from
    then on; units that no rank uses are expected a few windows longer. Ranks that have once differed keep to the union.
    """

    def __init__(self, units: Sequence[Unit], ranks: int) -> None:
        self._all = [unit for unit in units if unit.travelling and not unit.root]
        self._ranks = ranks
        self._expected: dict[Pass, list[Unit]] = {
            Pass.FORWARD: self._all,
            Pass.BACKWARD: self._all[::-1],
            Pass.LOOK: [],
        }
        # What is known, and no guess: only for these passes units are gathered ahead. The same on every rank.
        self._proven: set[Pass] = set()
        # The pass that runs, what it has reached, and how far along the expected order it is.
        self.running: Pass | None = None
        self._path: list[Unit] = []
        self._place = 0
        # Of the window: what each kind of pass did last, and a digest of all that they did.
        self._seen: dict[Pass, list[Unit]] = {}
        self.digest = 0
        self._alike = 0
        self._differences = 0
        # Every rank takes the path of the others, whatever it is: nobody needs a stand-in.
        self._trusted = ranks == 1

    # A pass.

    def begin(self, kind: Pass) -> None:
        self.running = kind
        self._path = []
        self._place = 0
        if kind is not Pass.LOOK:
            self.digest = (self.digest * 31 + 7) % DIGEST

    def reach(self, unit: Unit) -> Iterator[Unit]:
        """This rank needs `unit` now. Yields the units to stand in for before it, in their order."""
        if self.running is None or (unit.whole and self._path and self._path[-1] is unit):
            return  # several micro-batches go through the unit, one after another
        self._path.append(unit)
        if self.running is not Pass.LOOK:
            self.digest = (self.digest * 31 + unit.index + 1) % DIGEST
        expected = self._expected[self.running]
        place = next((place for place in range(self._place, len(expected)) if expected[place] is unit), None)
        if place is None:
            return  # not expected any more: gathered as it comes
        if not self._trusted and self.running is not Pass.LOOK:
            yield from self._until(place)
        self._place = place + 1

    def end(self) -> Iterator[Unit]:
        """The pass has ended. Yields the units to stand in for."""
        kind = self.running
        if kind is None:
            return
        if not self._trusted and self.running is not Pass.LOOK:
            yield from self._until(len(self._expected[kind]))
        self.running = None
        if kind is Pass.LOOK or self._trusted:
            self._follow(kind)
        if kind is not Pass.LOOK:
            self._seen[kind] = self._path

    def _follow(self, kind: Pass) -> None:
        """What this pass did is what the next is expected to do."""
        self._proven.add(kind)
        if self._path == self._expected[kind]:
            return
        if self._expected[kind]:
            logger.debug("the model took another path through its units; the schedule follows it")
        self._expected[kind] = self._path
        if kind is Pass.FORWARD:
            self._expected[Pass.BACKWARD] = self._path[::-1]

    def abandon(self) -> None:
        """The pass was broken off."""
        self.running = None

    def _until(self, place: int) -> Iterator[Unit]:
        assert self.running is not None
        expected = self._expected[self.running]
        while self._place < place:
            self._place += 1
            yield expected[self._place - 1]

    def ahead(self) -> Iterator[Unit]:
        """The units that are expected next, nearest first; none while the order is no more than a guess."""
        kind = self.running
        proven = kind in self._proven or (kind is Pass.BACKWARD and Pass.FORWARD in self._proven)
        if kind is None or not proven:
            return iter(())
        return iter(self._expected[kind][self._place :])

    # Between windows.

    def settle(self, one_path: bool, exchange: Callable[[Any], list[Any]]) -> None:
        """After a window, on every rank alike: what was done is what the next window is expected to do.

        `one_path`: every rank did the same. `exchange` gives every rank's value to all.
        """
        seen, self._seen, self.digest = self._seen, {}, 0
        if self._ranks == 1:
            return
        self._proven |= seen.keys()
        if not one_path:
            self._ranks_differ(seen, exchange)
        elif not self._trusted and any(path != self._expected[kind] for kind, path in seen.items()):
            self._alike += 1
            self._trusted = self._alike >= TRUST and not self._differences
            for kind, path in seen.items():
                self._expected[kind] = path if self._trusted else self._with_rest(kind, path, seen)

    def _ranks_differ(self, seen: dict[Pass, list[Unit]], exchange: Callable[[Any], list[Any]]) -> None:
        if not self._differences:
            logger.debug("ranks run different units; each stands in for the units that it skips")
        self._differences += 1
        self._trusted = False
        if self._differences & (self._differences - 1):
            return  # layers dropped at random differ in every window: the 1st, 2nd, 4th, 8th time is often enough
        by_index = {unit.index: unit for unit in self._all}
        paths = exchange({kind.value: [unit.index for unit in path] for kind, path in seen.items()})
        for kind in (Pass.FORWARD, Pass.BACKWARD):
            for theirs in paths:
                path = [by_index[index] for index in theirs.get(kind.value, [])]
                self._expected[kind] = self._with_rest(kind, path, {})

    def _with_rest(self, kind: Pass, path: list[Unit], seen: dict[Pass, list[Unit]]) -> list[Unit]:
        """An order that holds `path` and all other units; but units that ran forward only need have no backward."""
        done = set(seen.get(Pass.FORWARD, ())) if kind is Pass.BACKWARD and not self._differences else set()
        order = self._expected[kind]
        if not (_within(path, order) and self._differences):
            order = _merged(path, order, without=done)
        return _merged(order, self._all if kind is Pass.FORWARD else self._all[::-1], without=done)

    def distrust(self) -> None:
        """The ranks have gone different ways where they were trusted not to."""
        self._trusted = False
        self._differences += 1
        for kind in (Pass.FORWARD, Pass.BACKWARD):
            self._expected[kind] = self._with_rest(kind, self._expected[kind], {})


def _within(path: list[Unit], order: list[Unit]) -> bool:
    """Whether `order` holds the units of `path` in their order, among others."""
    rest = iter(order)
    return all(unit in rest for unit in path)


def _merged(path: list[Unit], other: list[Unit], without: Collection[Unit] = ()) -> list[Unit]:
    """`path` with what only `other` has, each such unit behind the one that it follows there."""
    merged, place, here = list(path), 0, set(path)
    for unit in other:
        if unit in here:
            place = merged.index(unit) + 1
        elif unit not in without:
            merged.insert(place, unit)
            place += 1
    return merged
