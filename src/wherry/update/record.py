"""How optimizer state lies in memory: the fields of several segments end to end, which is also their record on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wherry import native
from wherry.native.segment import blocks_of

# Fields begin at multiples of this many bytes: a cache line.
ALIGNMENT = 64

State = torch.Tensor | native.Blocks8


@dataclass(frozen=True)
class Field:
    """One named tensor of a segment. `coded` means codes of 8 bits, whose scales follow them."""

    name: str
    dtype: torch.dtype
    numel: int
    coded: bool = False
    # Of a state that has not an element for each of the parameter's.
    shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        scales = 4 * blocks_of(self.numel) if self.coded else 0
        return self._codes_nbytes + scales

    @property
    def payload(self) -> int:
        """Bytes without what aligns them."""
        return self.numel * self.dtype.itemsize + (4 * blocks_of(self.numel) if self.coded else 0)

    @property
    def _codes_nbytes(self) -> int:
        own = self.numel * self.dtype.itemsize
        return _round_up(own) if self.coded else own

    def view(self, memory: torch.Tensor) -> State:
        """The field in its bytes."""
        values = memory[: self.numel * self.dtype.itemsize].view(self.dtype)
        if not self.coded:
            return values if self.shape is None else values.view(self.shape)
        scales = memory[self._codes_nbytes : self._codes_nbytes + 4 * blocks_of(self.numel)].view(torch.float32)
        return native.Blocks8(values, scales)


class RecordLayout:
    """Where each field of each segment begins.

    >>> layout = RecordLayout([[Field("low", torch.int16, 100), Field("exp_avg", torch.float32, 100)]])
    >>> layout.nbytes, sorted(layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))[0])
    (704, ['exp_avg', 'low'])
    """

    def __init__(self, segments: Sequence[Sequence[Field]]) -> None:
        self.fields: list[list[tuple[Field, int]]] = []
        position = 0
        for fields in segments:
            placed = []
            for field in fields:
                placed.append((field, position))
                position += _round_up(field.nbytes)
            self.fields.append(placed)
        self.nbytes = position
        self.payload = sum(field.payload for fields in segments for field in fields)

    def views(self, memory: torch.Tensor) -> list[dict[str, State]]:
        """The fields of each segment, by name, in memory of `nbytes` bytes."""
        return [
            {field.name: field.view(memory[start : start + field.nbytes]) for field, start in placed}
            for placed in self.fields
        ]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
