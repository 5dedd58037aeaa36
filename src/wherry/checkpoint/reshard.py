"""Which elements of a logical tensor a stored slice holds, and how two slices overlap. Arithmetic only.

A rank's shard cuts a parameter anywhere: its part is a run of elements in row-major order. With tensor parallelism the
parameter itself is a box of a larger, logical tensor. So a slice is a run of elements inside a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """A block of a logical tensor: where it begins in each dim, and how large it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        offsets, shape = [], []
        for mine, size, theirs, length in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            start, stop = max(mine, theirs), min(mine + size, theirs + length)
            if start >= stop:
                return None
            offsets.append(start)
            shape.append(stop - start)
        return Box(tuple(offsets), tuple(shape))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds `outer`."""
        return tuple(
            slice(mine - theirs, mine - theirs + size)
            for mine, size, theirs in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )


@dataclass(frozen=True)
class Run:
    """Elements `start` to `stop`, in row-major order, of a box."""

    box: Box
    start: int
    stop: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Run:
        """All of a tensor."""
        box = Box.whole(shape)
        return cls(box, 0, box.numel)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """The run as boxes of the logical tensor, each with its place in the run. At most two for each dim.

        >>> [box.shape for _, box in Run(Box.whole((4, 5)), 3, 17).boxes()]
        [(1, 2), (2, 5), (1, 2)]
        """
        for start, box in _boxes(self.box.shape, self.start, self.stop):
            offsets = tuple(a + b for a, b in zip(self.box.offsets, box.offsets, strict=True))
            yield start - self.start, Box(offsets, box.shape)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    if start >= stop:
        return
    if not shape:
        yield 0, Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        rest = shape[1:]
        yield first * row, Box((first, *(0 for _ in rest)), (last - first, *rest))
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    base = row * math.prod(shape[1:])
    for place, box in _boxes(shape[1:], start - base, stop - base):
        yield base + place, Box((row, *box.offsets), (1, *box.shape))


@dataclass(frozen=True)
class Overlap:
    """What two runs share: a box, as it lies in each of them.

    `source` and `target` are each the start of a stretch of the run, and the box that this stretch holds.
    """

    common: Box
    source: tuple[int, Box]
    target: tuple[int, Box]

    def view(self, run: torch.Tensor, place: tuple[int, Box]) -> torch.Tensor:
        start, box = place
        return run[start : start + box.numel].view(box.shape)[self.common.within(box)]


def overlaps(source: Run, target: Run) -> Iterator[Overlap]:
    """How to fill `target` from `source`, as far as they meet."""
    if source.box == target.box:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            line = Box((0,), (stop - start,))
            yield Overlap(line, (start - source.start, line), (start - target.start, line))
        return
    for source_start, source_box in source.boxes():
        for target_start, target_box in target.boxes():
            common = source_box.intersect(target_box)
            if common is not None:
                yield Overlap(common, (source_start, source_box), (target_start, target_box))
