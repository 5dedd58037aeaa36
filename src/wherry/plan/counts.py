"""What a dry run counts of one rank, and what follows for more blocks, or more micro-batches, than were run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from wherry.observe.footprint import WORKING

if TYPE_CHECKING:
    from wherry.plan.operations import Operation

HOST = "host"
"""What a footprint calls buffers of host memory."""
GATHERED = "gathered"
TENSOR = " within tensor-parallel ranks"
"""What collectives among them are called, behind their names."""
STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Line:
    """Bytes of one category on one tier: where the sum was highest, and its own highest."""

    category: str
    tier: str
    at_peak: int
    highest: int


@dataclass(frozen=True)
class Counts:
    """Of one window and its update: every number grows evenly with equal blocks, and with micro-batches from two on."""

    # Of the model, and those of them that are trained.
    parameters: float
    trained: float
    # Bytes of each state on each tier, as they rest, and all bytes on disk.
    states: Mapping[tuple[str, str], float]
    on_disk: float
    # By phase of a step: bytes by category when their sum was highest; and the highest of each category by itself.
    peaks: Mapping[str, Mapping[str, float]]
    highest: Mapping[str, float]
    # Bytes of activations between a forward and its backward.
    kept: float
    # Collectives, and bytes of their whole tensors; bytes up and down a link, those that come down of state which is
    # updated on the device and does not rest there, and bytes read from and written to a disk.
    calls: Mapping[str, float]
    bytes: Mapping[str, float]
    moved: Mapping[str, float]
    operations: Mapping[Operation, float]

    def toward(self, other: Counts, steps: float) -> Counts:
        """On the straight line from this through `other`, which is one step away."""
        return _sum((self, 1 - steps), (other, steps))

    def with_difference(self, one: Counts, other: Counts) -> Counts:
        """As much more as `other` has than `one`; of peaks, what is there at the highest."""
        top = [replace(each, peaks={"top": each.top()}) for each in (self, one, other)]
        return _sum((top[0], 1), (top[1], -1), (top[2], 1))

    def top(self, *, gpu: bool = True) -> Mapping[str, float]:
        """Bytes by category in the phase where their sum was highest."""
        return max(self.peaks.values(), key=lambda found: _total(found, gpu=gpu))

    def lines(self, *, gpu: bool) -> list[Line]:
        """Bytes by category and tier. Where there is no `gpu`, device and host are one memory with one peak."""
        top = self.top(gpu=gpu)
        on_host, highest_on_host = (
            self.highest.get(HOST, 0.0) if gpu else top.get(HOST, 0.0),
            self.highest.get(HOST, 0.0),
        )
        rest = _total(top, gpu=True)
        lines = []
        for category in (GATHERED, WORKING):
            lines.append(_of(category, "device", top.get(category, 0.0), self.highest.get(category, 0.0)))
            rest -= top.get(category, 0.0)
        states = dict(self.states)
        rest -= sum(nbytes for (state, tier), nbytes in states.items() if tier == "device" and state != "gradients")
        # Some gradients rest only from their arrival to the next step: they are not there at every peak.
        arrived = min(states.get(("gradients", "device"), 0.0), max(0.0, rest))
        states["gradients", "device"] = arrived
        found = [_of(*place, nbytes, nbytes) for place, nbytes in states.items()]
        found.append(_of("buffers", "device", rest - arrived, rest - arrived))
        if highest_on_host:
            stated = sum(nbytes for (_, tier), nbytes in states.items() if tier == "host")
            found.append(_of("buffers", "host", on_host - stated, highest_on_host - stated))
        beside = self.on_disk - sum(nbytes for (_, tier), nbytes in states.items() if tier == "disk")
        if beside > 0:
            found.append(_of(WORKING, "disk", beside, beside))
        return [*found, *lines]


def _of(category: str, tier: str, at_peak: float, highest: float) -> Line:
    return Line(category, tier, max(0, round(at_peak)), max(0, round(highest)))


def _total(found: Mapping[str, float], *, gpu: bool) -> float:
    return sum(nbytes for category, nbytes in found.items() if category != HOST or not gpu)


def _sum(*weighed: tuple[Counts, float]) -> Counts:
    """Each number times its weight."""
    return Counts(
        **{each.name: _weighed(*((getattr(c, each.name), by) for c, by in weighed)) for each in fields(Counts)}
    )


def _weighed(*terms: tuple[Any, float]) -> Any:
    if not isinstance(terms[0][0], Mapping):
        return sum(by * value for value, by in terms)
    keys = dict.fromkeys(key for found, _ in terms for key in found)
    nested = any(isinstance(value, Mapping) for found, _ in terms for value in found.values())
    return {key: _weighed(*((found.get(key, {} if nested else 0.0), by) for found, by in terms)) for key in keys}
