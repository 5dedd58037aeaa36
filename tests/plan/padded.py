"""What the formulas of a flat come to for a whole rank."""

from __future__ import annotations

from collections.abc import Sequence

from wherry.placement import Placement
from wherry.plan.memory import Cost, States, UnitSizes, flat_states, plan_flats


def padded_states(
    units: Sequence[UnitSizes],
    placement: Placement,
    ranks: int,
    cost: Cost,
    *,
    rank: int = 0,
    persistence_threshold: int = 0,
) -> States:
    """Every padding of its flats included; the last ranks hold a little less, hence `rank`."""
    planned = plan_flats(units, placement, ranks, persistence_threshold)
    return sum(
        (flat_states(flat, placement, cost, rank, apart=False) for flats in planned for flat in flats),
        start=States(0, 0, 0),
    )
