"""Whether what a manifest says fits together, and fits its files. A checkpoint may come from anywhere: nothing in it is
believed, and no memory is taken for it, before that."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint.errors import CheckpointError, describe
from wherry.checkpoint.files import DTYPES, Stored, inside
from wherry.checkpoint.format import KIND, NAME, UNREAD, WEIGHT, Entry, Manifest, OptimizerValues, Slice, dtype_named
from wherry.checkpoint.reshard import Box
from wherry.errors import one_line
from wherry.native.segment import blocks_of
from wherry.regular import read_regular

# A manifest is read whole: no run writes one so long.
LONGEST = 1 << 30
_FLOATS = frozenset(dtype for dtype in DTYPES if dtype.is_floating_point)
_CODES = frozenset((torch.uint8, torch.int8))
_SCALES = frozenset((torch.float32,))
# Of a tensor: how many elements, and of which dtypes; None where that is its own affair.
Expected = tuple[int | None, Collection[torch.dtype] | None]


def read_manifest(folder: Path) -> Manifest:
    """Raises `CheckpointError`, as for everything that is wrong with it."""
    try:
        path = inside(folder, NAME)
        manifest = Manifest.from_text(read_regular(path, LONGEST).decode(), path)
    except FileNotFoundError:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder") from None
        raise CheckpointError(f"{folder} holds no {NAME}: it is no Wherry checkpoint, or not a whole one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / NAME} cannot be read: {describe(error)}") from error
    try:
        check(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {one_line(str(error), 1000)}") from error
    return manifest


def check(manifest: Manifest) -> None:
    """Every element of every state is in one slice, every tensor is of one slice or value, and every file is one of
    the checkpoint's own folder, with checksums."""
    for file, record in manifest.files.items():
        if os.path.basename(file) != file or not file.strip("."):
            raise CheckpointError(f"{file!r} is no file of its own folder")
        if not record.fits:
            raise CheckpointError(f"{file}: its {len(record.blocks)} checksums are not those of {record.bytes:,} bytes")
    for name, entry in manifest.entries.items():
        dtype_named(entry.dtype)
        if WEIGHT not in entry.states and entry.numel:
            raise CheckpointError(f"{name}: no rank wrote it")
        for state in entry.states.keys() - UNREAD:
            own: dict[int | None, list[Slice]] = {None: []}
            for piece in entry.states[state]:
                run = piece.run(entry.shape)
                plain = state != WEIGHT and piece.scales is None and piece.addend is None
                if piece.own is not None and not (piece.own and plain and run.numel == run.box.numel):
                    raise CheckpointError(f"{name}, {state}: it cannot have a shape of its own, {list(piece.own)}")
                own.setdefault(piece.addend, []).append(piece)
            for slices in own.values():
                _check_cover(f"{name}, {state}", entry, slices)
    optimizer = manifest.engine.get("optimizer")
    lacking = OptimizerValues.__annotations__.keys() - {"parameter_steps"} - optimizer.keys() if optimizer else ()
    if lacking:
        raise CheckpointError(f"its optimizer lacks {', '.join(sorted(lacking))}")
    uses = Counter((piece.file, piece.tensor) for _, _, piece in manifest.slices())
    uses.update(_uses_of_values(manifest))
    for (file, tensor), count in uses.items():
        if file not in manifest.files:
            raise CheckpointError(f"{tensor}: it is in {file!r}, of which there are no checksums")
        if count > 1:
            raise CheckpointError(f"{tensor} of {file}: {count} slices or values are said to be this one tensor")


def _uses_of_values(manifest: Manifest) -> Iterator[tuple[str, str]]:
    scales = (piece.scales for _, _, piece in manifest.slices() if piece.scales is not None)
    for name in (*scales, *_references([manifest.engine, *manifest.ranks])):
        if name not in manifest.tensors:
            raise CheckpointError(f"tensor {name!r}: it is said in no place which file holds it")
        yield manifest.tensors[name], name


def _references(value: Any) -> Iterator[str]:
    """The tensors that encoded values name."""
    if isinstance(value, dict):
        if value.get(KIND) in ("tensor", "array"):
            yield str(value.get("value"))
        value = value.values()
    for item in value:
        if isinstance(item, list | dict):
            yield from _references(item)


def _check_cover(what: str, entry: Entry, slices: list[Slice]) -> None:
    """Slices hold each element once: runs of a box follow each other, and boxes are the cells of a grid."""
    held = sum(piece.stop - piece.start for piece in slices)
    if held != entry.numel:
        raise CheckpointError(
            f"{what}: the ranks wrote {held:,} elements, expected {entry.numel:,}; do all of them hold the same model?"
        )
    runs: dict[Box, list[tuple[int, int]]] = {}
    for piece in slices:
        run = piece.run(entry.shape)
        box = run.box
        inside = len(box.offsets) == len(box.shape) == len(entry.shape) and all(
            offset + size <= whole for offset, size, whole in zip(box.offsets, box.shape, entry.shape, strict=True)
        )
        if not inside or not run.start <= run.stop <= box.numel:
            raise CheckpointError(
                f"{what}: elements {run.start:,} to {run.stop:,} of a box of {list(box.shape)} at {list(box.offsets)} "
                f"are not in a tensor of {list(entry.shape)}"
            )
        if run.numel:
            runs.setdefault(box, []).append((run.start, run.stop))
    twice = [box for box, found in runs.items() if _overlap(sorted(found))]
    for sides in zip(*([*zip(box.offsets, box.shape, strict=True)] for box in runs), strict=True):
        if _overlap(sorted((offset, offset + size) for offset, size in set(sides))):
            twice += runs
    if twice:
        raise CheckpointError(f"{what}: slices overlap in a box of {list(twice[0].shape)} at {list(twice[0].offsets)}")


def _overlap(stretches: list[tuple[int, int]]) -> bool:
    return any(after[0] < before[1] for before, after in pairwise(stretches))


# The tensors of files.


def expected_tensors(manifest: Manifest) -> dict[str, dict[str, Expected]]:
    """What the manifest says of the tensors of each file."""
    found: dict[str, dict[str, Expected]] = {file: {} for file in manifest.files}
    for name, file in manifest.tensors.items():
        if file in found:
            found[file][name] = None, None
    for entry, state, piece in manifest.slices():
        numel, own = piece.numel, dtype_named(entry.dtype)
        kinds = _FLOATS if state != WEIGHT or own.is_floating_point else frozenset((own,))
        if piece.scales is not None:
            kinds = _CODES
            found[manifest.tensors[piece.scales]][piece.scales] = blocks_of(piece.phase + numel), _SCALES
        found[piece.file][piece.tensor] = numel, kinds if piece.own is None else None
    return found


def unlike(stored: Mapping[str, Stored], expected: Mapping[str, Expected]) -> str | None:
    """What is wrong with the tensors of a file."""
    for name, (numel, kinds) in expected.items():
        found = stored.get(name)
        if found is None:
            return f"it holds no tensor {name!r}"
        if numel is not None and found.numel != numel:
            return f"{name} has {found.numel:,} elements, expected {numel:,}"
        if kinds is not None and found.dtype not in kinds:
            wanted = " or ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            return f"{name} is of {str(found.dtype).removeprefix('torch.')}, expected {wanted}"
    return None
