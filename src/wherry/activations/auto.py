"""`auto`: what each unit's activations cost, measured in the first step, and the choice that costs least time."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from wherry.activations.stores import Store
from wherry.parallel.comm import Comm

# The size of the transfer that the speed of a store is taken from.
PROBE = 16 << 20

Mark = Any


class Policy(enum.Enum):
    """What becomes of what a unit's forward saves."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class UnitCost:
    """One unit, measured: seconds of its forward, bytes that it saves, and bytes of its inputs (a checkpoint)."""

    forward_s: float
    saved: int
    inputs: int

    def worst(self, other: UnitCost) -> UnitCost:
        """Of two ranks' measurements the more cautious."""
        return UnitCost(
            max(self.forward_s, other.forward_s), max(self.saved, other.saved), max(self.inputs, other.inputs)
        )


def choose(costs: Sequence[UnitCost], speed: float, budget: int, *, checkpoints_stay: bool = True) -> list[Policy]:
    """A policy for each unit, so that what stays on the device is within `budget` bytes, at the least extra time.

    `speed`: bytes a second to where activations are put away and back; 0 where they cannot be. Earlier units go first:
    a later one's activations are wanted back sooner. If even the cheapest in memory does not fit, everything is
    recomputed or offloaded, whichever leaves less.

    >>> choose([UnitCost(1.0, 100, 10)] * 3, speed=0, budget=210)
    [<Policy.RECOMPUTE: 'recompute'>, <Policy.KEEP: 'keep'>, <Policy.KEEP: 'keep'>]
    """
    policies = [Policy.KEEP] * len(costs)
    excess = sum(cost.saved for cost in costs) - budget
    ways: list[tuple[float, int, int, Policy]] = []
    for place, cost in enumerate(costs):
        recomputed = cost.saved - (cost.inputs if checkpoints_stay else 0)
        if recomputed > 0:
            ways.append((cost.forward_s / recomputed, place, recomputed, Policy.RECOMPUTE))
        if speed > 0 and cost.saved > 0:
            # What outlasts that which hides it: the unit's forward on the way out, its backward on the way in.
            copy = cost.saved / speed
            uncovered = max(0.0, copy - cost.forward_s) + max(0.0, copy - 2 * cost.forward_s)
            ways.append((uncovered / cost.saved, place, cost.saved, Policy.OFFLOAD))
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


class Meter:
    """Counts what is saved inside `watching`, and times it; the numbers are there once the device has caught up."""

    def __init__(self, device: torch.device, weights: Callable[[], set[int]]) -> None:
        self.device = device
        self._weights = weights
        self._spans: dict[int, tuple[Mark, Mark]] = {}
        self._saved: dict[int, int] = {}
        self._inputs: dict[int, int] = {}

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def watching(self, place: int, inputs: int) -> Iterator[None]:
        """Around the forward of unit `place`, inside whatever hooks autograd's saved tensors go through."""
        storages: dict[int, int] = {}
        weights = self._weights()
        above = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: torch.Tensor) -> Any:
            if not is_strange(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in weights:
                    storages[storage._cdata] = storage.nbytes()
            return above[0](tensor) if above is not None else tensor

        def unpack(saved: Any) -> torch.Tensor:
            return above[1](saved) if above is not None else saved

        begin = self._mark()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        # A unit that runs more than once in a forward counts as often.
        self._spans[place] = begin, self._mark()
        self._saved[place] = self._saved.get(place, 0) + sum(storages.values())
        self._inputs[place] = self._inputs.get(place, 0) + inputs

    def decide(
        self, units: int, store: Store | None, free: int, comms: Sequence[Comm], *, checkpoints_stay: bool
    ) -> tuple[list[Policy], int]:
        """A policy for each unit, and the bytes that may stay: the same on all ranks that hold these units."""
        costs = [
            UnitCost(self._seconds(place), self._saved.get(place, 0), self._inputs.get(place, 0))
            for place in range(units)
        ]
        speed = _speed_of(store, self.device)
        for comm in comms:
            for other_costs, other_speed, other_free in comm.gather_objects((costs, speed, free)):
                # Of two measurements the more cautious.
                costs = [cost.worst(other) for cost, other in zip(costs, other_costs, strict=True)]
                speed, free = min(speed, other_speed), min(free, other_free)
        return choose(costs, speed, free, checkpoints_stay=checkpoints_stay), free

    def _seconds(self, place: int) -> float:
        if place not in self._spans:
            return 0.0
        begin, end = self._spans[place]
        if isinstance(begin, float):
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def is_strange(tensor: torch.Tensor) -> bool:
    """Whether it has no storage of its own to look at."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided


def _speed_of(store: Store | None, device: torch.device) -> float:
    """How fast a store takes and gives back: the mean of both, from one round trip after a first."""
    if store is None:
        return 0.0
    data = torch.zeros(PROBE, dtype=torch.uint8, device=device)
    seconds = 0.0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        store.put(data).take()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return 2 * PROBE / max(seconds, 1e-6)
