"""Covering arrays: few cases in which all values of two factors meet."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Case = dict[str, Any]


def covering(
    factors: dict[str, tuple[Any, ...]],
    groups: Iterable[tuple[str, ...]],
    allowed: Callable[[Case], bool] = lambda case: True,
    costs: Mapping[tuple[str, Any], int] | None = None,
) -> tuple[Case, ...]:
    """Choose cases in which all values of the factors of each group meet, as few as a greedy choice finds.

    `allowed` may reject a case of which some factors are missing. A value that costs N times as much is chosen N times
    more seldom, where others cover as much.
    """
    left: dict[tuple[str, ...], dict[tuple[Any, ...], None]] = {}
    for group in groups:
        combinations = itertools.product(*(factors[name] for name in group))
        left[group] = {values: None for values in combinations if allowed(dict(zip(group, values, strict=True)))}
    of_factor = {name: [group for group in left if name in group] for name in factors}
    uses: Counter[tuple[str, Any]] = Counter()

    def complete(case: Case) -> Case | None:
        """Give the factors that are left the values that cover most, and of those the least used."""
        name = next((name for name in factors if name not in case), None)
        if name is None:
            return case
        known = [group for group in of_factor[name] if all(other in case or other == name for other in group)]
        found = []
        for value in factors[name]:
            full = case | {name: value}
            if allowed(full):
                gain = sum(tuple(full[other] for other in group) in left[group] for group in known)
                found.append((-gain, uses[name, value], len(found), full))
        return next((done for *_, full in sorted(found) if (done := complete(full)) is not None), None)

    chosen = []
    while any(left.values()):
        group = max(left, key=lambda group: len(left[group]))
        values = next(iter(left[group]))
        case = complete(dict(zip(group, values, strict=True)))
        if case is None:  # it fits no values of the other factors
            del left[group][values]
            continue
        for group in left:
            left[group].pop(tuple(case[name] for name in group), None)
        uses.update({item: (costs or {}).get(item, 1) for item in case.items()})
        chosen.append({name: case[name] for name in factors})
    return tuple(chosen)


def pairs(**factors: tuple[Any, ...]) -> tuple[Case, ...]:
    """Choose cases in which each two values of two factors meet."""
    return covering(factors, itertools.combinations(factors, 2))


def name_of(case: Case) -> str:
    return "-".join(str(value) for value in case.values())
