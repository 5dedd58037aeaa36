"""Where each parameter lies: in a flat, in a rank's shard of it, in the layer that it is a tile of.

Arithmetic, no copies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wherry.parallel.partition import LogicalSlice

# Every parameter starts on a multiple of this many elements: 64 bytes in bf16 or more, what vector kernels like.
PARAMETER_ALIGNMENT = 32
# A shard is a multiple of this many elements, so that norms summed by blocks do not depend on the number of ranks.
SHARD_ALIGNMENT = 128


@dataclass(frozen=True)
class Slot:
    """One parameter in a flat."""

    name: str
    shape: tuple[int, ...]
    group: int
    start: int
    # What of the logical parameter this is, where tensor-parallel ranks have cut it. `shape` is that of this part.
    part: LogicalSlice | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class SegmentSpan:
    """What a shard has of one parameter, the `slot`-th of its flat; positions count from the shard's start."""

    group: int
    start: int
    stop: int
    slot: int


@dataclass(frozen=True)
class FlatLayout:
    """Slots laid end to end, ordered by optimizer group, padded to divide by the ranks."""

    slots: tuple[Slot, ...]
    numel: int
    ranks: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks

    @property
    def payload(self) -> int:
        """Elements that are parameters; the rest is padding."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in a buffer of the flat's size."""
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.slots]

    def gaps(self) -> list[tuple[int, int]]:
        """The padding, as ranges of the flat."""
        gaps, position = [], 0
        for slot in self.slots:
            if slot.start > position:
                gaps.append((position, slot.start))
            position = slot.stop
        if self.numel > position:
            gaps.append((position, self.numel))
        return gaps

    def segments(self, rank: int) -> list[SegmentSpan]:
        """What the shard has of each parameter, without the padding between them."""
        spans: list[SegmentSpan] = []
        for index, slot in enumerate(self.slots):
            overlap = self.overlap(slot, rank)
            if overlap is not None:
                first, last, start = overlap
                spans.append(SegmentSpan(slot.group, start, start + last - first, index))
        return spans

    def cut_ranges(self, rank: int) -> list[tuple[int, int]]:
        """The stretches of a rank's shard whose parameters tensor-parallel ranks have cut, padding included."""
        low, high = self.shard_range(rank)
        ranges: list[tuple[int, int]] = []
        for slot in self.slots:
            if slot.part is None:
                continue
            start, stop = max(low, slot.start), min(high, _round_up(slot.stop, SHARD_ALIGNMENT))
            if start >= stop:
                continue
            if ranges and start - low <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], stop - low
            else:
                ranges.append((start - low, stop - low))
        return ranges

    def overlap(self, slot: Slot, rank: int) -> tuple[int, int, int] | None:
        """The part of `slot` in a rank's shard: (start in the parameter, stop in the parameter, start in the shard)."""
        low, high = self.shard_range(rank)
        start, stop = max(low, slot.start), min(high, slot.stop)
        if start >= stop:
            return None
        return start - slot.start, stop - slot.start, start - low


def lay_out(
    parameters: Sequence[tuple[str, Sequence[int], int]],
    ranks: int,
    shard_alignment: int = SHARD_ALIGNMENT,
    parts: Mapping[str, LogicalSlice] | None = None,
    whole: Collection[int] = (),
) -> FlatLayout:
    """Lay out `(name, shape, group)` parameters for `ranks` shards.

    `parts` are the slices of those that tensor-parallel ranks have cut. Within a group these come first, and blocks of
    `SHARD_ALIGNMENT` hold either them or others: their norm is taken apart. Where a parameter is of a group in `whole`,
    no shard's end cuts any: ranks have whole parameters, of about as many elements, and padding.

    >>> lay_out([("w", (4, 8), 0), ("b", (4,), 0)], ranks=2).shard_numel
    128
    >>> [slot.start for slot in lay_out([("w", (30, 30), 0), ("v", (20, 20), 0)], ranks=2, whole=[0]).slots]
    [0, 1024]
    """
    parts = parts or {}
    ordered = sorted(parameters, key=lambda item: (item[2], item[0] not in parts))
    uncut = ranks > 1 and any(group in whole for _, _, group in ordered)
    shards = _balanced(ordered, ranks) if uncut else [ordered]
    laid = [_end_to_end(shard, parts) for shard in shards]
    if not uncut:
        [(slots, stop)] = laid
        return FlatLayout(tuple(slots), _round_up(max(stop, 1), ranks * shard_alignment), ranks)
    size = _round_up(max(1, *(stop for _, stop in laid)), shard_alignment)
    moved = [replace(slot, start=rank * size + slot.start) for rank, (slots, _) in enumerate(laid) for slot in slots]
    return FlatLayout(tuple(moved), ranks * size, ranks)


Parameters = Sequence[tuple[str, Sequence[int], int]]


def _end_to_end(parameters: Parameters, parts: Mapping[str, LogicalSlice]) -> tuple[list[Slot], int]:
    slots: list[Slot] = []
    position = 0
    for name, shape, group in parameters:
        part = parts.get(name)
        if slots and (slots[-1].part is None) != (part is None):
            position = _round_up(position, SHARD_ALIGNMENT)
        slots.append(Slot(name, tuple(shape), group, position, part))
        position = _round_up(slots[-1].stop, PARAMETER_ALIGNMENT)
    return slots, position


def _balanced(parameters: Parameters, ranks: int) -> list[list[tuple[str, Sequence[int], int]]]:
    """Whole parameters for each rank, the largest first to whoever has least; each rank's in the order they had."""
    loads = [0] * ranks
    owner: dict[int, int] = {}
    sizes = [_round_up(math.prod(shape), PARAMETER_ALIGNMENT) for _, shape, _ in parameters]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = loads.index(min(loads))
        owner[index] = rank
        loads[rank] += sizes[index]
    return [[each for index, each in enumerate(parameters) if owner[index] == rank] for rank in range(ranks)]


@dataclass(frozen=True)
class Place:
    """Where a tile's parameter lies in that of the whole layer."""

    whole: str
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))]


def tile_places(model: nn.Module) -> dict[str, Place]:
    """For each tile's parameter, by its name in `model`, where it lies, with the whole's name in `model`.

    A module that is cut has a true `cut_into_tiles`, and a method `places` for its parameters by their names in it.
    """
    found: dict[str, Place] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "cut_into_tiles", False):
            dot = prefix + "." if prefix else ""
            for name, place in module.places().items():
                found[dot + name] = Place(dot + place.whole, place.whole_shape, place.offsets, place.shape)
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
