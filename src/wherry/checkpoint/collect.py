"""From shards to logical tensors: what this rank holds of each parameter, as pieces to be written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from wherry.checkpoint.manifest import BEHIND, GRADIENT, WEIGHT
from wherry.checkpoint.session import Logical, Session, addend_of, own_sum, within
from wherry.checkpoint.slices import Run
from wherry.native import Blocks8
from wherry.native.segment import BLOCK
from wherry.sharding.unit import Flat
from wherry.update.record import State


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
    """A state of one parameter with one value for all elements, such as a product of momenta."""

    name: str
    state: str
    value: float


@dataclass(frozen=True)
class Stretch:
    """A run of a parameter, and where it begins in memory that holds more."""

    name: str
    run: Run
    first: int

    @classmethod
    def of(cls, logical: Logical, start: int, stop: int, first: int) -> Stretch:
        return cls(logical.name, Run(logical.box, start, stop), first)

    def take(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.first : self.first + self.run.numel]


@dataclass(frozen=True)
class FlatCut:
    """What this rank writes of a flat: of each segment of the optimizer's state, and of the bare shard."""

    segments: list[Stretch | None] = field(default_factory=list)
    # Parameters without a master, or that it is ahead of, by what they are stored as.
    bare: list[tuple[str, Stretch]] = field(default_factory=list)


def cut_flat(session: Session, flat: Flat, share: tuple[int, int]) -> FlatCut:
    cut = FlatCut()
    if flat in session.states:
        for span in session.spans(flat):
            slot = flat.layout.slots[span.slot]
            place = within(flat, slot, *share) if session.writes(slot) else None
            if place is None:
                cut.segments.append(None)
            else:
                start, stop, at = place
                cut.segments.append(Stretch.of(session.logical(slot), start, stop, at - span.start))
    stateless = session.without_state(flat)
    behind = session.behind(flat)
    for slot in filter(session.writes, flat.layout.slots):
        state = WEIGHT if slot in stateless else BEHIND if behind else None
        place = within(flat, slot, *share)
        if state is not None and place is not None:
            cut.bare.append((state, Stretch.of(session.logical(slot), *place)))
    return cut


def flat_pieces(session: Session, flat: Flat, cut: FlatCut) -> Iterator[Piece | Scalar]:
    """The weights, masters and moments that this rank writes of a flat. Values are valid until the next."""
    with ExitStack() as stack:
        segments = stack.enter_context(session.states[flat].opened()) if cut.segments else []
        shard = stack.enter_context(flat.opened()) if cut.bare else None
        yield from pieces(cut, segments, shard)


def pieces(cut: FlatCut, segments: Sequence[dict[str, State]], shard: torch.Tensor | None) -> Iterator[Piece | Scalar]:
    """A weight with an fp32 master is stored as its master alone, from which the working weight follows; but one whose
    last update is a delayed one also as the weight that training goes on with."""
    for stretch, values in zip(cut.segments, segments, strict=True):
        if stretch is not None:
            yield from _segment_pieces(stretch, values)
    for state, stretch in cut.bare:
        assert shard is not None
        yield Piece(stretch.name, state, stretch.run, stretch.take(shard))


def _segment_pieces(stretch: Stretch, values: dict[str, State]) -> Iterator[Piece | Scalar]:
    first, last = stretch.first, stretch.first + stretch.run.numel
    for name, value in values.items():
        state = WEIGHT if name == "master" else name
        if isinstance(value, Blocks8):
            scales = value.scales[first // BLOCK : -(-last // BLOCK)]
            yield Piece(stretch.name, state, stretch.run, value.codes[first:last], scales, first % BLOCK)
        elif is_scalar(value):
            yield Scalar(stretch.name, name, float(value))
        else:
            yield Piece(stretch.name, state, stretch.run, stretch.take(value))


def is_scalar(value: State) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def gradient_pieces(session: Session, flat: Flat, share: tuple[int, int]) -> Iterator[Piece]:
    """The sums of the window so far. What is not summed over all ranks yet, each of them writes its addend of."""
    gradient = session.gradient_of.get(flat)
    if gradient is None or gradient.fresh or gradient.brief:
        return
    apart = addend_of(session, gradient)
    addend = None if apart is None else apart[0]
    part = share if apart is None else (0, flat.layout.shard_numel)
    for slot in filter(session.writes, flat.layout.slots):
        logical = session.logical(slot)
        if apart is not None and not gradient.partitioned:
            stretch, sums = Stretch.of(logical, 0, slot.numel, slot.start), gradient.accumulated
        else:
            place = within(flat, slot, *part)
            if place is None:
                continue
            stretch, sums = Stretch.of(logical, *place), own_sum(gradient)
        yield Piece(stretch.name, GRADIENT, stretch.run, stretch.take(sums), addend=addend)
