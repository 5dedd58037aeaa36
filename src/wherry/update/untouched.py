"""Parameters that no rank has a gradient for are left alone by an update, as plain PyTorch leaves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from wherry.sharding.unit import Flat

if TYPE_CHECKING:
    from wherry.update.state import FlatState

# Of a segment's tensor: which, its elements, and what they were.
_Piece = tuple[int, str, int, int, torch.Tensor]


class Untouched:
    """Weights and state of such parameters: taken before an update, and put back after it.

    Where a rule counts steps, it counts them for all parameters of a flat together.
    """

    def __init__(self, states: Sequence[FlatState], absent: Mapping[Flat, Sequence[int]]) -> None:
        self._absent = absent
        self._kept: dict[FlatState, list[_Piece]] = {}
        for state in states:
            if state.flat in absent:
                with state.opened() as segments:
                    self._kept[state] = [
                        (place, name, start, stop, tensor[start:stop].clone())
                        for place, start, stop in self._pieces(state)
                        for name, tensor in _element_wise(segments[place], state, place)
                    ]

    def _pieces(self, state: FlatState) -> Iterator[tuple[int, int, int]]:
        """What these parameters have in this rank's segments: (segment, start, stop)."""
        layout = state.flat.layout
        for index in self._absent[state.flat]:
            overlap = layout.overlap(layout.slots[index], state.flat.rank)
            if overlap is None:
                continue
            first, last, start = overlap
            for place, segment in enumerate(state.segments):
                low, high = max(start, segment.start), min(start + last - first, segment.stop)
                if low < high:
                    yield place, low - segment.start, high - segment.start

    def put_back(self, state: FlatState) -> None:
        kept = self._kept.get(state)
        if not kept:
            return
        with state.opened(write=True) as segments:
            known = {(place, name) for place, name, *_ in kept}
            for place, start, stop in self._pieces(state):
                for name, tensor in _element_wise(segments[place], state, place):
                    if (place, name) not in known:
                        tensor[start:stop].zero_()  # state that this update has made
            for place, name, start, stop, before in kept:
                dict(_element_wise(segments[place], state, place))[name][start:stop].copy_(before)


def _element_wise(values: Mapping[str, Any], state: FlatState, place: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a segment that have a number for each of its elements."""
    numel = state.segments[place].stop - state.segments[place].start
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.shape == (numel,):
            yield name, value
