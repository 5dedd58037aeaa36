"""Models of many equal blocks, run with the first few and the last few: what the others do is what their neighbours do.

Of blocks nothing is guessed: those on both sides of the gap must have done the same, operation by operation and byte by
byte, each keeping as much more as the one before it. Where they did not, `Differs` says that the whole model must run.
What a model does between its blocks by counting them, at places in the gap alone, cannot be seen so: `trace.Profiler`
runs a model that is not known as a whole once, and compares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wherry.plan.profile import Interval, Operation
from wherry.sharding.grouping import UnitPlan

LONGEST = 8
"""Blocks after which a pattern of several kinds of them must come again."""

STAY, STAY_NUMBERED = 2, 4
"""Periods that stay on each side of a gap, and before it where blocks know their places: a habit by number shows."""


class Differs(Exception):
    """Blocks that look the same do not do the same."""


@dataclass(frozen=True)
class Gap:
    """Blocks that are left out: the first unit behind them, the units of one period, and how many periods.

    Units are counted in the model without these blocks, and with those of the gaps before it. `stay` periods like them
    are before the gap, and two behind it.
    """

    behind: int
    period: int
    periods: int
    stay: int = STAY

    @property
    def units(self) -> int:
        return self.period * self.periods


@contextmanager
def thinned(model: nn.Module, plans: Sequence[UnitPlan], every: int = 1) -> Iterator[tuple[list[UnitPlan], list[Gap]]]:
    """Leave equal blocks out of `model`, which is whole again afterwards; the units that stay, and the gaps.

    What is done to every so many units is done to the same ones: `every` divides what is left out.
    """
    gone: set[int] = set()
    gaps: list[Gap] = []
    changed: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []

    def visit(module: nn.Module) -> None:
        blocks = list(module.children())
        units = [_units_of(block, plans) for block in blocks] if _is_container(module) else []
        found = _left_out(blocks, units, every) if units else None
        if found is None:
            for block in blocks:
                visit(block)
            return
        run, period, stay = found
        removed = [unit for place in run for unit in units[place]]
        first = next(index for index, plan in enumerate(plans) if plan is removed[0])
        gaps.append(Gap(first, len(removed) * period // len(run), len(run) // period, stay))
        gone.update(map(id, removed))
        changed.append((module, module._modules))
        module._modules = _renumbered(module, [block for place, block in enumerate(blocks) if place not in run])

    try:
        visit(model)
        yield [plan for plan in plans if id(plan) not in gone], gaps
    finally:
        for module, modules in changed:
            module._modules = modules


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _renumbered(container: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module | None]:
    """Blocks by the names that they must have: a list's are numbers without a gap."""
    if not isinstance(container, nn.ModuleDict):
        return {str(place): block for place, block in enumerate(blocks)}
    names = {id(block): name for name, block in container.named_children()}
    return {names[id(block)]: block for block in blocks}


def _units_of(block: nn.Module, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """The units whose modules are the block or inside of it, if they have all its parameters; else none."""
    inside = set(block.modules())
    units = [plan for plan in plans if not plan.root and plan.modules[0] in inside]
    held = sum(len(plan.parameters) for plan in units)
    return units if units and held == len(list(block.parameters())) else []


def _left_out(
    blocks: Sequence[nn.Module], units: Sequence[Sequence[UnitPlan]], every: int
) -> tuple[range, int, int] | None:
    """The blocks that may be left out, how many make a period, and how many periods stay before them.

    Two stay behind them.
    """
    best: tuple[range, int, int] | None = None
    for step in range(1, min(LONGEST, len(blocks) // 5) + 1):
        compared = [_Pair(i, i + step) for i in range(len(blocks) - step)]
        like = [
            bool(units[pair.place])
            and len(units[pair.place]) == len(units[pair.other])
            and pair.alike(blocks[pair.place], blocks[pair.other])
            for pair in compared
        ]
        start, length = _longest_run(like)
        stay = STAY_NUMBERED if any(pair.numbered for pair in compared[start : start + length]) else STAY
        width = sum(map(len, units[start : start + step])) or 1
        # As many blocks as make whole turns of what is done to every so many units.
        period = step * (every // math.gcd(every, width))
        spare = (length + step) // period - stay - STAY if length else 0
        if spare > 0 and (best is None or spare * period > len(best[0])):
            first = start + stay * period
            best = range(first, first + spare * period), period, stay
        if length + step == len(blocks):
            break  # no longer pattern has more
    return best


def _longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    best, position = (0, 0), 0
    for flag, group in itertools.groupby(flags):
        length = len(list(group))
        if flag and length > best[1]:
            best = position, length
        position += length
    return best


class _Pair:
    """Two blocks by their places: whether they are the same but for values, and for numbers that tell their places."""

    def __init__(self, place: int, other: int) -> None:
        self.place, self.other = place, other
        # Whether there are such numbers, so that they may do something else where nothing shows it.
        self.numbered = False

    def alike(self, one: nn.Module, other: nn.Module) -> bool:
        modules, others = list(one.named_modules()), list(other.named_modules())
        return len(modules) == len(others) and all(
            name == other_name and type(a) is type(b) and self._same_state(vars(a), vars(b))
            for (name, a), (other_name, b) in zip(modules, others, strict=True)
        )

    def _same_state(self, state: dict[str, Any], others: dict[str, Any]) -> bool:
        if state.keys() != others.keys():
            return False
        for key, value in state.items():
            if key in ("_parameters", "_buffers"):
                if _shapes(value) != _shapes(others[key]):
                    return False
            elif key != "_modules" and not self._same(value, others[key]):  # those are compared by name
                return False
        return True

    def _same(self, value: Any, other: Any) -> bool:
        if value is other:
            return True
        if type(value) is not type(other):
            return False
        if type(value) is int and value != other:
            self.numbered = True
            return bool(value - self.place == other - self.other)
        if isinstance(value, tuple | list):
            return len(value) == len(other) and all(map(self._same, value, other))
        if isinstance(value, dict):  # of hooks, too: each of those has a key of its own
            return value.keys() == other.keys() and all(self._same(value[key], other[key]) for key in value)
        kinds = str | int | float | bool | complex | set | frozenset | torch.dtype | torch.device
        return isinstance(value, kinds) and bool(value == other)


def _shapes(tensors: dict[str, torch.Tensor | None]) -> list[Any]:
    return [(name, None if t is None else (t.shape, t.dtype, t.requires_grad)) for name, t in tensors.items()]


# What the blocks that were left out would have done.


def filled(intervals: Sequence[Interval], gap: Gap) -> tuple[list[Interval], int]:
    """The intervals with those of the blocks of `gap` among them, and the bytes that these keep for the backward."""
    places = {(each.kind, each.unit): position for position, each in enumerate(intervals)}
    if len(places) != len(intervals):
        raise Differs  # a unit that runs more than once
    behind, period = gap.behind, gap.period
    for unit in range(behind - gap.stay * period, behind + period):
        if _forward(intervals, places, unit) != _forward(intervals, places, unit + period):
            raise Differs
    enters = [_place(places, "enter", behind + offset) for offset in (-period, 0, period)]
    turns = places["turn", 0]
    wants = [
        next((i for i in range(turns, len(intervals)) if first <= intervals[i].unit < first + period), None)
        for first in (behind, behind - period, behind - 2 * period)
    ]
    if None in wants:
        raise Differs  # no gradient comes so far
    forward, backward = _segments(intervals, enters), _segments(intervals, [w for w in wants if w is not None])
    grown = _grown(forward[0], forward[1], period)
    if _grown(backward[1], backward[0], period) != grown:
        raise Differs
    into, back = enters[1], wants[1]
    assert back is not None
    end = back + len(backward[1])
    if any(behind <= each.unit < behind + period for each in intervals[end:]):
        raise Differs  # its gradients come later than in the blocks before it

    def place(position: int, each: Interval) -> Interval:
        """One that ran, as it is in the whole model. The block before the gap may see the end of one in the gap."""
        in_gap = back <= position < end and each.unit < behind + period
        units = gap.units if each.unit >= behind and not in_gap else 0
        return each.moved(units, gap.periods * grown if into <= position < back else 0)

    ran = [place(position, each) for position, each in enumerate(intervals)]
    return [
        *ran[:into],
        *(each.moved(k * period, k * grown) for k in range(1, gap.periods + 1) for each in forward[0]),
        *ran[into:back],
        *(each.moved(k * period, k * grown) for k in range(gap.periods, 0, -1) for each in backward[1]),
        *ran[back:],
    ], gap.periods * grown


def _place(places: dict[tuple[str, int], int], kind: str, unit: int) -> int:
    if (kind, unit) not in places:
        raise Differs  # a block that is not called, or not by itself
    return places[kind, unit]


def _forward(intervals: Sequence[Interval], places: dict[tuple[str, int], int], unit: int) -> list[Operation]:
    """The operations of a unit's forward, with those of units inside of it."""
    inside = intervals[_place(places, "enter", unit) : _place(places, "exit", unit)]
    return [operation for each in inside for operation in each.operations]


def _segments(intervals: Sequence[Interval], starts: Sequence[int]) -> list[Sequence[Interval]]:
    return [intervals[a:b] for a, b in itertools.pairwise(starts)]


def _grown(one: Sequence[Interval], next_one: Sequence[Interval], units: int) -> int:
    """How many bytes more there are in the next period than in this one, which is otherwise the same."""
    if not one or len(one) != len(next_one):
        raise Differs
    grown = next_one[0].activations - one[0].activations
    if [each.moved(units, grown) for each in one] != list(next_one):
        raise Differs
    return grown
