"""A checkpoint that is being read: any run of any state, put together from the slices that hold it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError, describe
from wherry.checkpoint.files import FilePool, TensorReader
from wherry.checkpoint.format import Manifest, Slice, decode, dtype_named
from wherry.checkpoint.reshard import Box, Overlap, Run, overlaps
from wherry.native import Blocks8, dequantize
from wherry.native.segment import BLOCK, blocks_of

# Elements that are converted at once, so that memory stays small whatever the slice.
PART = 1 << 22
# Files that are open at once.
OPEN_FILES = 64
# Of rows up to this many bytes that are wanted in part, all is read: a disk reads no less than pages.
WHOLE_ROWS = 16384


class CheckpointReader:
    """Reads what is asked for, and nothing else.

    with CheckpointReader(folder) as reader:
        weight = reader.tensor("blocks.0.mix.weight", "weight")
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.manifest = manifest or read_manifest(folder)
        self._readers: dict[str, TensorReader] = {}
        self._pool = FilePool()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
        for reader in self._readers.values():
            reader.close()

    def _reader(self, file: str) -> TensorReader:
        reader = self._readers.pop(file, None)
        if reader is None:
            if len(self._readers) >= OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            reader = TensorReader(self.folder / file, self._pool)
        self._readers[file] = reader  # the last one used comes last
        return reader

    def value(self, encoded: Any, what: str = "a value") -> Any:
        """What `encode` was given; `what` names it in errors."""

        def tensor(name: str) -> torch.Tensor:
            reader = self._reader(self.manifest.tensors[name])
            return reader.read(name).view(reader.tensors[name].shape)

        try:
            return decode(encoded, tensor)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{what} cannot be read: {describe(error)}") from error

    def tensor(
        self, name: str, state: str, dtype: torch.dtype | None = None, *, addend: int | None = None
    ) -> torch.Tensor:
        """A whole state of a parameter, or a buffer."""
        entry = self.manifest.entries[name]
        whole = Run.of(entry.shape)
        shape = entry.own_shape(state, whole.box) or entry.shape
        found = torch.empty(math.prod(shape), dtype=dtype or self.dtype(name, state))
        self.read(name, state, whole, found, addend=addend)
        return found.view(shape)

    def parts(self, name: str, state: str, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """A whole state in row-major order, a part of it at a time; each is valid until the next."""
        entry = self.manifest.entries[name]
        buffer = torch.empty(min(PART, entry.numel), dtype=dtype or self.dtype(name, state))
        box = Box.whole(entry.shape)
        for start in range(0, entry.numel, PART):
            part = buffer[: min(PART, entry.numel - start)]
            self.read(name, state, Run(box, start, start + part.numel()), part)
            yield part

    def dtype(self, name: str, state: str) -> torch.dtype:
        """The dtype a state is stored in; that of 8-bit states is fp32, as they are read."""
        slices = self.manifest.entries[name].states.get(state, [])
        if not slices:  # of a tensor without elements
            return dtype_named(self.manifest.entries[name].dtype)
        if slices[0].scales is not None:
            return torch.float32
        return self._reader(slices[0].file).tensors[slices[0].tensor].dtype

    def read(self, name: str, state: str, run: Run, out: torch.Tensor, *, addend: int | None = None) -> None:
        """Fill `out`, of one dim, with a run of a state; of one with a shape of its own, with all of it.

        `addend`: of a buffer, the one that this rank wrote.
        """
        slices = [piece for piece in self._slices(name, state) if piece.addend == addend]
        whole = self.manifest.entries[name].shape
        filled = 0
        for piece in slices:
            if piece.own is not None:
                if piece.run(whole) == run and piece.numel == out.numel():
                    self._copy_line(piece, 0, out)
                    filled += run.numel
                continue
            for overlap in overlaps(piece.run(whole), run):
                self._copy(piece, overlap, out)
                filled += overlap.common.numel
        if filled != run.numel:
            raise CheckpointError(
                f"{self.folder}: {name} has {filled:,} of the {run.numel:,} elements that are wanted; its manifest "
                "does not fit the model"
            )

    def addends(self, name: str, state: str) -> set[int]:
        return {piece.addend for piece in self._slices(name, state) if piece.addend is not None}

    def _slices(self, name: str, state: str) -> list[Slice]:
        return self.manifest.entries[name].states.get(state, [])

    def _copy(self, piece: Slice, overlap: Overlap, out: torch.Tensor) -> None:
        start, box = overlap.source
        offsets = tuple(c - b for c, b in zip(overlap.common.offsets, box.offsets, strict=True))
        self._copy_box(piece, start, box.shape, offsets, overlap.view(out, overlap.target))

    def _copy_box(
        self, piece: Slice, start: int, shape: tuple[int, ...], offsets: tuple[int, ...], target: torch.Tensor
    ) -> None:
        """Fill `target` with the box at `offsets` of the block of this shape that begins at element `start`.

        Little more is read than is wanted, and little is in memory beside the target.
        """
        if not shape:
            self._copy_line(piece, start, target.view(1))
            return
        row = math.prod(shape[1:])
        start += offsets[0] * row
        if tuple(target.shape[1:]) == shape[1:] and target.is_contiguous():
            self._copy_line(piece, start, target.view(-1))
            return
        rows = max(1, PART // max(1, row)) if row * self._itemsize(piece) <= WHOLE_ROWS else 1
        for first in range(0, target.shape[0], rows):
            part = target[first : first + rows]
            at = start + first * row
            if rows == 1:
                self._copy_box(piece, at, shape[1:], offsets[1:], part[0])
                continue
            values = self._values(self._reader(piece.file), piece, at, part.shape[0] * row)
            wanted = tuple(slice(o, o + n) for o, n in zip(offsets[1:], part.shape[1:], strict=True))
            part.copy_(values.view(part.shape[0], *shape[1:])[(slice(None), *wanted)])

    def _copy_line(self, piece: Slice, start: int, target: torch.Tensor) -> None:
        """Elements that follow each other in both."""
        reader = self._reader(piece.file)
        stored = reader.tensors[piece.tensor].dtype
        if piece.scales is None and target.dtype == stored and target.device.type == "cpu":
            reader.read(piece.tensor, start, target.numel(), target)
            return
        for first in range(0, target.numel(), PART):
            count = min(PART, target.numel() - first)
            target[first : first + count].copy_(self._values(reader, piece, start + first, count))

    def _itemsize(self, piece: Slice) -> int:
        return self._reader(piece.file).tensors[piece.tensor].dtype.itemsize

    def _values(self, reader: TensorReader, piece: Slice, first: int, count: int) -> torch.Tensor:
        """Elements of a slice; those of 8-bit states as fp32."""
        if piece.scales is None:
            return reader.read(piece.tensor, first, count)
        codes, scales = self.codes(piece, first, count)
        phase = (piece.phase + first) % BLOCK
        padded = torch.zeros(phase + count, dtype=codes.dtype)
        padded[phase:] = codes
        values = torch.empty(phase + count)
        dequantize(Blocks8(padded, scales), values)
        return values[phase:]

    def codes(self, piece: Slice, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """8-bit codes of a slice from element `first`, and the scales of the blocks that they lie in."""
        assert piece.scales is not None
        codes = self._reader(piece.file).read(piece.tensor, first, count)
        begin = (piece.phase + first) // BLOCK
        blocks = blocks_of((piece.phase + first) % BLOCK + count)
        scales = self._reader(self.manifest.tensors[piece.scales]).read(piece.scales, begin, blocks)
        return codes, scales

    def read_codes(self, name: str, state: str, run: Run, out: Blocks8) -> bool:
        """Fill 8-bit blocks with a run of a parameter, if no block has to be cut anew.

        False, with nothing changed, where blocks of the slices and of `out` do not lie on each other.
        """
        codes: list[tuple[int, torch.Tensor]] = []
        scales: dict[int, torch.Tensor] = {}
        for piece in self._slices(name, state):
            source_run = piece.run(self.manifest.entries[name].shape)
            if piece.scales is None or source_run.box != run.box:
                return False
            start, stop = max(source_run.start, run.start), min(source_run.stop, run.stop)
            if start >= stop:
                continue
            first, target = start - source_run.start, start - run.start
            if (piece.phase + first) % BLOCK != target % BLOCK:
                return False
            found, own = self.codes(piece, first, stop - start)
            if found.dtype != out.codes.dtype:
                return False
            codes.append((target, found))
            for number, scale in enumerate(own, target // BLOCK):
                # Two slices meet in a block that was two blocks, if their scales differ.
                if not torch.equal(scales.setdefault(number, scale), scale):
                    return False
        for target, found in codes:
            out.codes[target : target + found.numel()] = found
        for number, scale in scales.items():
            out.scales[number] = scale
        return True
