"""What becomes of each unit's activations, and which choice costs least where memory is short."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Policy(enum.Enum):
    """What becomes of what a unit's forward saves."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Cost:
    """One unit, measured: seconds of its forward, bytes that it saves, and bytes of its inputs (a checkpoint)."""

    forward_s: float
    saved: int
    inputs: int

    def worst(self, other: Cost) -> Cost:
        """Of two ranks' measurements the more cautious."""
        return Cost(
            max(self.forward_s, other.forward_s), max(self.saved, other.saved), max(self.inputs, other.inputs)
        )


@dataclass(frozen=True)
class Speeds:
    """Bytes a second to where activations are put away, and back; 0 where they cannot be."""

    down: float = 0.0
    up: float = 0.0


def offload_cost(cost: Cost, speeds: Speeds) -> float:
    """Seconds that copies outlast what hides them: the unit's forward on the way out, its backward on the way in."""
    out = max(0.0, cost.saved / speeds.down - cost.forward_s)
    back = max(0.0, cost.saved / speeds.up - 2 * cost.forward_s)
    return out + back


def choose(costs: Sequence[Cost], speeds: Speeds, budget: int, *, checkpoints_stay: bool = True) -> list[Policy]:
    """A policy for each unit, so that what stays on the device is within `budget` bytes, at the least extra time.

    Earlier units go first: a later one's activations are wanted back sooner. If even the cheapest in memory does not
    fit, everything is recomputed or offloaded, whichever leaves less.

    >>> choose([Cost(1.0, 100, 10)] * 3, Speeds(), budget=210)
    [<Policy.RECOMPUTE: 'recompute'>, <Policy.KEEP: 'keep'>, <Policy.KEEP: 'keep'>]
    """
    policies = [Policy.KEEP] * len(costs)
    excess = sum(cost.saved for cost in costs) - budget
    ways: list[tuple[float, int, int, Policy]] = []
    for place, cost in enumerate(costs):
        recomputed = cost.saved - (cost.inputs if checkpoints_stay else 0)
        if recomputed > 0:
            ways.append((cost.forward_s / recomputed, place, recomputed, Policy.RECOMPUTE))
        if speeds.down > 0 and speeds.up > 0 and cost.saved > 0:
            ways.append((offload_cost(cost, speeds) / cost.saved, place, cost.saved, Policy.OFFLOAD))
    freed_by = [0] * len(costs)
    for _, place, freed, policy in sorted(ways, key=lambda way: (way[0], way[1])):
        if excess <= 0:
            break
        # Each unit goes its cheapest way first; a way that frees more is taken only while that is not enough.
        if freed > freed_by[place]:
            excess -= freed - freed_by[place]
            freed_by[place] = freed
            policies[place] = policy
    return policies
