"""Weights for others: safetensors files of a given size with their index, written as they are read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError, together
from wherry.checkpoint.files import TensorWriter, replacing, sync_folder, write_text
from wherry.checkpoint.format import NAME, WEIGHT, Entry, Manifest, dtype_named
from wherry.checkpoint.reader import CheckpointReader
from wherry.checkpoint.session import Session, plain_tensors
from wherry.checkpoint.session import aliases as tied_names
from wherry.config.problems import path_meant
from wherry.observe.progress import Progress
from wherry.sharding.quantized import is_wide
from wherry.sharding.unit import Flat

INDEX = "model.safetensors.index.json"
# What an earlier write of the same model has left is replaced, and nothing else.
_OWN_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
DEFAULT_SHARD = 5_000_000_000
# Where a run of `wherry train` has its checkpoints.
IN_RUN = "checkpoints"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModelWriter:
    """Writes a model's tensors to `model.safetensors`, or to `model-00001-of-00003.safetensors` and so on.

    Files get their names once all of them are whole. `aliases` are the other names of tied weights, which are written
    once; readers of safetensors find them in the file's metadata.
    """

    def __init__(self, folder: Path, max_shard_size: int, names: Iterable[str], aliases: dict[str, str]) -> None:
        self.folder = folder
        self.max_shard_size = max_shard_size
        self._metadata = {"format": "pt", **aliases}
        self._room = sum(len(name) + 160 for name in names) + len(json.dumps(self._metadata)) + 1024
        self._parts: list[Path] = []
        self._place: dict[str, int] = {}
        self._writer: TensorWriter | None = None
        self.bytes = 0
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ModelWriter:
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.add_parts(name, tensor.dtype, tuple(tensor.shape), [tensor.detach().contiguous()])

    def add_parts(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[torch.Tensor]) -> None:
        """A tensor as it comes, in row-major order."""
        nbytes = math.prod(shape) * dtype.itemsize
        full = self._writer is not None and 0 < self._writer.data_bytes > self.max_shard_size - nbytes
        if full or (self._writer is not None and not self._writer.fits(name)):
            self._finish()
        if self._writer is None:
            path = self.folder / f".model-{len(self._parts) + 1:05}.{os.getpid()}.partial"
            path.unlink(missing_ok=True)
            self._writer = TensorWriter(path, self._room, self._metadata)
            self._parts.append(path)
        self._writer.add_parts(name, dtype, shape, parts)
        self._place[name] = len(self._parts) - 1
        self.bytes += nbytes

    def _finish(self) -> None:
        assert self._writer is not None
        self._writer.finish()
        self._writer = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._name_files()
        finally:
            if self._writer is not None:
                self._writer.close()
            for part in self._parts:
                part.unlink(missing_ok=True)

    def _name_files(self) -> None:
        if self._writer is not None:
            self._finish()
        count = len(self._parts)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for old in self.folder.glob("model*.safetensors"):
            if _OWN_FILE.fullmatch(old.name) and old.name not in names:
                old.unlink()
        for part, name in zip(self._parts, names, strict=True):
            os.replace(part, self.folder / name)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": {n: names[i] for n, i in self._place.items()}}
        sync_folder(self.folder)
        write_text(self.folder / INDEX, json.dumps(index, indent=2) + "\n")


@dataclass(frozen=True)
class Translation:
    """The form that an export gives a model, where that is another than its own.

    By the name in the checkpoint, `names` has the one there, and `turn` what becomes of the values; such a tensor is in
    memory as a whole. `files`: what else is written.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    turn: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    folder: Path
    tensors: int
    bytes: int
    with_config: bool


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = DEFAULT_SHARD,
    exclude_frozen: bool = False,
    translation_of: Callable[[Manifest, torch.dtype | None], Translation | None] = lambda *_: None,
) -> Exported:
    """Write a checkpoint's weights as a folder that transformers loads. No whole tensor is in memory, but for those
    that have another form there.

    `dtype`: of the parameters; None for the dtype that each was trained in. Buffers keep theirs. `translation_of`:
    another form for a checkpoint, or None where its model is transformers' own, or is not known there.
    """
    path = find(checkpoint)
    manifest = read_manifest(path)
    translation = translation_of(manifest, dtype) or _untranslated(manifest)
    taken = [each for pattern in ("*.safetensors", *translation.files) for each in out.glob(pattern)]
    if taken:
        raise CheckpointError(f"{out} holds {taken[0].name} already; give a folder of its own")
    verified(path)
    entries = exported_entries(path, manifest, exclude_frozen=exclude_frozen)
    named = {name: translation.names.get(name, name) for name in entries}
    aliases = {
        translation.names.get(other, other): named[name] for name, entry in entries.items() for other in entry.aliases
    }
    with (
        CheckpointReader(path, manifest) as reader,
        ModelWriter(out, max_shard_size, named.values(), aliases) as writer,
        Progress(f"exporting {path}", len(entries), unit="tensors") as progress,
    ):
        for name, entry in entries.items():
            kind = exported_dtype(entry, dtype)
            if name in translation.turn:
                writer.add(named[name], translation.turn[name](reader.tensor(name, WEIGHT, kind)))
            else:
                writer.add_parts(named[name], kind, entry.shape, reader.parts(name, WEIGHT, kind))
            progress.advance()
    for file, text in translation.files.items():
        write_text(out / file, text)
    return Exported(out, len(entries), writer.bytes, "config.json" in translation.files)


def _untranslated(manifest: Manifest) -> Translation:
    """The model as it is, with what one of transformers' is built from again."""
    configs = {"config.json": "model_config", "generation_config.json": "generation_config"}
    return Translation(files={file: manifest.engine[key] for file, key in configs.items() if key in manifest.engine})


def exported_entries(path: Path, manifest: Manifest, *, exclude_frozen: bool = False) -> dict[str, Entry]:
    """What of a checkpoint goes into an export, by name."""
    if exclude_frozen:
        return {name: entry for name, entry in manifest.entries.items() if entry.kind != "frozen"}
    if manifest.engine.get("frozen_excluded"):
        raise CheckpointError(f"{path} was saved without the frozen parameters, so it holds no whole model")
    return manifest.entries


def exported_dtype(entry: Entry, wanted: torch.dtype | None) -> torch.dtype:
    own = dtype_named(entry.dtype)
    return wanted if wanted is not None and entry.kind != "buffer" and is_wide(own) else own


def find(path: Path) -> Path:
    """A checkpoint's folder: the one given, or the latest of those in it, or of those of the run whose folder it is."""
    if (path / NAME).exists():
        return path
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder{path_meant(path)}")
    for folder in (path, path / IN_RUN):
        tag = folders.locate(folder, None, cleans=False) if folder.is_dir() else None
        if tag is not None:
            return folder / tag
    runs = sorted((each.parent for each in path.glob(f"*/{IN_RUN}")), key=os.path.getmtime, reverse=True)[:3]
    inside = f"; name one of its runs, newest first: {', '.join(map(str, runs))}" if runs else ""
    raise CheckpointError(f"{path} is no checkpoint and holds none: there is no {NAME} in it{inside}")


def verified(path: Path) -> Manifest:
    """The manifest of a checkpoint, every byte of which has been checked."""
    manifest = read_manifest(path)
    problems = folders.damage(path, manifest)
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems[:8])}. {folders.offer(path.parent, path.name)}")
    return manifest


# From a live engine.


def live_weights(
    session: Session, *, precise: bool = False, exclude_frozen: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer, whole on every rank, a flat at a time; valid until the next flat. Ranks
    gather as they iterate: each does so to the end.

    `precise`: the fp32 master, where the working weights are less.
    """
    if session.tensor.size > 1:
        raise CheckpointError(
            "weights that tensor-parallel ranks have cut are put together from a checkpoint: save_checkpoint, then "
            "`wherry export`"
        )
    begun: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for flat in session.flats:
        if exclude_frozen and not flat.trainable:
            continue
        whole = _whole(session, flat, precise)
        for slot in flat.layout.slots:
            tensor, place = whole[slot.start : slot.stop].view(slot.shape), session.places.get(slot.name)
            if place is None:
                yield slot.name, tensor
                continue
            # Tiles are put together on the host, as the linear layer that they are of.
            layer = begun.setdefault(place.whole, torch.empty(place.whole_shape, dtype=tensor.dtype))
            place.of(layer).copy_(tensor.detach())
            missing[place.whole] = missing.get(place.whole, layer.numel()) - tensor.numel()
            if not missing[place.whole]:
                yield place.whole, begun.pop(place.whole)
    if begun:
        raise CheckpointError(f"{', '.join(begun)}: some of its tiles are frozen and left out, and others are not")
    yield from plain_tensors(session, exclude_frozen=exclude_frozen).items()


@torch.no_grad()
def _whole(session: Session, flat: Flat, precise: bool) -> torch.Tensor:
    state = session.states.get(flat) if precise and flat.dtype.itemsize < torch.float32.itemsize else None
    if state is None and flat.resident:
        return flat.whole
    with flat.opened() as working:
        shard = working.to(session.device, torch.float32 if state is not None else flat.dtype, copy=True)
    if state is not None:
        with state.opened() as segments:
            for span, values in zip(session.spans(flat), segments, strict=True):
                shard[span.start : span.stop].copy_(values["master"])  # type: ignore[arg-type]
    if flat.layout.ranks == 1:
        return shard
    whole = torch.empty(flat.layout.numel, dtype=shard.dtype, device=session.device)
    session.gatherer.comm.all_gather(whole, shard).wait()
    return whole


def write_model(
    session: Session,
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    exclude_frozen: bool,
    max_shard_size: int = DEFAULT_SHARD,
) -> None:
    """Write the working weights of a live engine; every rank calls it, rank 0 writes, a flat at a time."""
    tied = {other: name for name, others in tied_names(session.module).items() for other in others}
    names = [*_names(session), *plain_tensors(session)]
    weights = live_weights(session, exclude_frozen=exclude_frozen)

    def write() -> None:
        try:
            if session.comm.rank == 0:
                with ModelWriter(folder, max_shard_size, names, tied) as writer:
                    for name, tensor in weights:
                        writer.add(name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
        finally:
            _drain(weights)  # whatever has become of the files

    together(session.comm, f"writing the weights to {folder}", write)


def consolidated(
    session: Session, *, dtype: torch.dtype | None = None, exclude_frozen: bool = False
) -> dict[str, torch.Tensor] | None:
    """All weights and buffers on rank 0's host, under all their names; None on the other ranks."""
    weights = live_weights(session, precise=dtype == torch.float32, exclude_frozen=exclude_frozen)
    if session.comm.rank:
        _drain(weights)
        return None
    tied, plain = tied_names(session.module), plain_tensors(session)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        cast = dtype is not None and is_wide(tensor.dtype) and name not in plain
        copy = tensor.detach().to("cpu", dtype if cast else tensor.dtype, copy=True)
        found.update({each: copy for each in (name, *tied.get(name, ()))})
    return {name: found[name] for name in dict.fromkeys([*_names(session, tied=True), *found]) if name in found}


def _drain(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in weights:
        pass


def _names(session: Session, *, tied: bool = False) -> list[str]:
    """The parameters' names; a tiled layer's as if it were not."""
    names = (session.whole_name(name) for name, _ in session.module.named_parameters(remove_duplicate=not tied))
    return list(dict.fromkeys(names))


def write_torch(weights: dict[str, torch.Tensor] | None, path: Path) -> None:
    """The weights as torch.save writes them, for programs that want that; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        torch.save(weights, aside)
