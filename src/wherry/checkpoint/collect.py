"""From shards to logical tensors: what this rank holds of each parameter, as pieces to be written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from wherry.checkpoint.manifest import GRADIENT, WEIGHT
from wherry.checkpoint.session import Session, box_of, own_sum, within
from wherry.checkpoint.slices import Run
from wherry.native import Blocks8
from wherry.native.blocks import BLOCK
from wherry.sharding.layout import Slot
from wherry.sharding.unit import Flat


@dataclass(frozen=True)
class Piece:
    """Elements of one state of one parameter: a run of them, and their values in one dim."""

    name: str
    state: str
    run: Run
    values: torch.Tensor
    # Of 8-bit states: the scales of the blocks that the values lie in, and the first value's place in its block.
    scales: torch.Tensor | None = None
    phase: int = 0
    addend: int | None = None


@dataclass(frozen=True)
class Scalar:
    """A state of an optimizer group with one value for all elements, such as a product of momenta."""

    group: int
    state: str
    value: float


def flat_pieces(session: Session, flat: Flat, share: tuple[int, int]) -> Iterator[Piece | Scalar]:
    """The weights, masters and moments of the part of a shard that this rank writes. Values are valid until the next.

    A weight with an fp32 master is stored as its master alone, from which the working weight follows.
    """
    state = session.states.get(flat)
    if state is not None:
        with state.opened() as segments:
            for span, values in zip(session.spans(flat), segments, strict=True):
                for name, value in values.items():
                    if is_scalar(value):
                        yield Scalar(span.group, name, float(value))  # type: ignore[arg-type]
                for slot in flat.layout.slots:
                    if slot.group == span.group and session.writes(slot):
                        yield from _segment_pieces(flat, slot, span.start, span.stop, values, share)
    rest = [slot for slot in session.without_state(flat) if session.writes(slot)]
    if rest:
        with flat.opened() as shard:
            for slot in rest:
                place = within(flat, slot, share[0], share[1])
                if place is not None:
                    start, stop, at = place
                    box, _ = box_of(flat, slot)
                    yield Piece(slot.name, WEIGHT, Run(box, start, stop), shard[at : at + stop - start])


def _segment_pieces(
    flat: Flat,
    slot: Slot,
    low: int,
    high: int,
    values: dict[str, torch.Tensor | Blocks8],
    share: tuple[int, int],
) -> Iterator[Piece]:
    place = within(flat, slot, max(low, share[0]), min(high, share[1]))
    if place is None:
        return
    start, stop, at = place
    box, _ = box_of(flat, slot)
    run = Run(box, start, stop)
    first = at - low
    last = first + run.numel
    for name, value in values.items():
        state = WEIGHT if name == "master" else name
        if is_scalar(value):
            continue
        if isinstance(value, Blocks8):
            scales = value.scales[first // BLOCK : -(-last // BLOCK)]
            yield Piece(slot.name, state, run, value.codes[first:last], scales, first % BLOCK)
        else:
            yield Piece(slot.name, state, run, value[first:last])


def is_scalar(value: torch.Tensor | Blocks8) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def gradient_pieces(session: Session, flat: Flat, share: tuple[int, int]) -> Iterator[Piece]:
    """The sums of the window so far. What is not summed over the ranks yet, every rank writes as its addend."""
    gradient = session.gradient_of.get(flat)
    if gradient is None or gradient.fresh or gradient.brief:
        return
    apart = not gradient.partitioned and not gradient.reduced and session.data.size > 1
    for slot in filter(session.writes, flat.layout.slots):
        box, _ = box_of(flat, slot)
        if apart:
            values = gradient.accumulated[slot.start : slot.stop]
            yield Piece(slot.name, GRADIENT, Run(box, 0, slot.numel), values, addend=session.data.rank)
            continue
        place = within(flat, slot, *share)
        if place is not None:
            start, stop, at = place
            yield Piece(slot.name, GRADIENT, Run(box, start, stop), own_sum(gradient)[at : at + stop - start])
