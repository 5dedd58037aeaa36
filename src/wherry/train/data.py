"""Text as bytes: by default the standard library's sources, which every Python already has.

Which bytes a sample holds depends on the seed and on the sample's number in the run alone. The ranks of a step share
its numbers out among them, so a run on other numbers of ranks reads the same text in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wherry.errors import WherryError
from wherry.observe.progress import Progress

if TYPE_CHECKING:
    import torch

# Packages that a distribution may leave out or a user may add would make the text differ between machines.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "ensurepip"}
_BETWEEN_FILES = b"\n"
_VALIDATION_EVERY = 32
_VALIDATION_TAIL = 1 / 32


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on, mapped from disk."""

    train: np.ndarray
    validation: np.ndarray
    source: str

    def check_length(self, sequence: int) -> None:
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) < sequence + 1:
                raise WherryError(
                    f"--data {self.source}: its {name} part holds {len(part)} bytes and a sample takes "
                    f"{sequence + 1}; give more text or a shorter --seq-length"
                )


def load_text(data: str | None = None, *, cache: Path | None = None, rank: int = 0) -> Text:
    """The text of a file, of a folder's text files, or (None) of the standard library's sources.

    Several files are joined once, in the cache folder. Of several files every 32nd validates, of one file its last
    32nd part.
    """
    if data is None:
        folder = Path(os.__file__).parent
        return _joined(folder, _python_sources(folder), "the standard library", cache, rank)
    path = Path(data).expanduser()
    if path.is_dir():
        return _joined(path, _text_files(path), str(path), cache, rank)
    if not path.is_file():
        raise WherryError(f"--data {data}: there is no such file or folder")
    if path.stat().st_size == 0:
        raise WherryError(f"--data {data}: the file is empty")
    if not os.access(path, os.R_OK):
        raise WherryError(f"--data {data}: the file cannot be read")
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    cut = len(whole) - max(1, int(len(whole) * _VALIDATION_TAIL))
    return Text(whole[:cut], whole[cut:], str(path))


def _python_sources(folder: Path) -> list[Path]:
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(here, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _text_files(folder: Path) -> list[Path]:
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        paths = (Path(here, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file() and _is_text(path, folder)]
    if not found:
        raise WherryError(f"--data {folder}: the folder holds no text file")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _is_text(path: Path, folder: Path) -> bool:
    if not os.access(path, os.R_OK):
        raise WherryError(f"--data {folder}: {path} cannot be read; change its mode, or name a folder without it")
    with open(path, "rb") as file:
        head = file.read(8192)
    return bool(head) and b"\0" not in head


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wherry"


def _joined(folder: Path, paths: list[Path], source: str, cache: Path | None, rank: int) -> Text:
    described = [(path.relative_to(folder).as_posix(), *_size_and_time(path)) for path in paths]
    key = hashlib.sha256(json.dumps([str(folder), described]).encode()).hexdigest()[:16]
    cache = cache or default_cache()
    target = cache / f"text-{key}.bin"
    index = target.with_suffix(".json")
    if not (target.is_file() and index.is_file()):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _join(paths, target, index, source, rank)
        except OSError as error:
            raise WherryError(
                f"the text of {source} is put together in {cache}, and that fails: {error.filename or ''} "
                f"{error.strerror}; let XDG_CACHE_HOME name a folder with room, or give a single file as --data"
            ) from error
    cut = json.loads(index.read_text())["train_bytes"]
    whole = np.memmap(target, dtype=np.uint8, mode="r")
    return Text(whole[:cut], whole[cut:], source)


def _size_and_time(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _join(paths: list[Path], target: Path, index: Path, source: str, rank: int) -> None:
    train = [path for number, path in enumerate(paths, 1) if number % _VALIDATION_EVERY]
    validation = [path for number, path in enumerate(paths, 1) if not number % _VALIDATION_EVERY] or train[-1:]
    cut = 0
    # Ranks that find no cache all write one, each its own; the last rename wins, and all have the same bytes.
    mine = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(mine, "wb") as out, Progress(f"reading {source}", len(paths), unit="files", rank=rank) as progress:
            for part in (train, validation):
                if part is validation:
                    cut = out.tell()
                for path in part:
                    out.write(path.read_bytes() + _BETWEEN_FILES)
                    progress.advance()
        os.replace(mine, target)
        mine.write_text(json.dumps({"source": source, "files": len(paths), "train_bytes": cut}))
        os.replace(mine, index)
    finally:
        mine.unlink(missing_ok=True)


_MIX = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """A well mixed 64-bit number for each number of `x` (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = x + _MIX
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(numbers: np.ndarray, size: int, seed: int) -> np.ndarray:
    """A pseudo-random order of 0..size-1, computed for the given places alone: nothing of length `size` is kept.

    A Feistel network over the next even power of two, walked until it falls inside `size`.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    result = numbers.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    keys = _mix(np.arange(4, dtype=np.uint64) + _mix(np.array([seed], dtype=np.uint64)))
    while outside.any():
        walked = result[outside]
        left, right = walked >> shift, walked & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << shift) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


class Samples:
    """Sample number n of a run: a window of `sequence` + 1 bytes. Every window is seen once an epoch.

    The windows of an epoch begin at an offset of its own, so that their borders move.
    """

    def __init__(self, text: np.ndarray, sequence: int, seed: int) -> None:
        self.text = text
        self.sequence = sequence
        self.seed = seed
        # One window fewer than would fit leaves room for the offset.
        self.windows = max(1, (len(text) - 1) // sequence - 1)
        self.room = len(text) - 1 - self.windows * sequence

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Where in the text these samples begin."""
        epochs, places = np.divmod(numbers.astype(np.int64), self.windows)
        starts = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = int(_mix(np.array([(self.seed * 1_000_003 + int(epoch)) % 2**64], dtype=np.uint64))[0])
            offset = key % (min(self.sequence, self.room) + 1)
            starts[chosen] = permute(places[chosen], self.windows, key) * self.sequence + offset
        return starts

    def batch(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """These samples as (ids, labels), each (batch, sequence) of int64."""
        import torch

        rows = np.stack([self.text[start : start + self.sequence + 1] for start in self.starts(numbers)])
        whole = torch.from_numpy(rows.astype(np.int64))
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


@dataclass(frozen=True)
class Share:
    """Which samples one rank reads: every step of a run takes the next ranks x micro x accumulation numbers."""

    rank: int
    ranks: int
    micro: int
    accumulation: int
    # Added to every number: a resumed run goes on where the one before ended, whatever its batch was.
    offset: int = 0

    def numbers(self, step: int, micro_step: int) -> np.ndarray:
        """The sample numbers of micro-batch `micro_step` of `step` (both from 0) on this rank."""
        first = (step * self.accumulation + micro_step) * self.ranks * self.micro + self.rank * self.micro
        first += self.offset
        return np.arange(first, first + self.micro, dtype=np.int64)


def batches(samples: Samples, share: Share, steps: int, first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's micro-batches of steps `first` to `steps`, in order."""
    for step in range(first, steps):
        for micro_step in range(share.accumulation):
            yield samples.batch(share.numbers(step, micro_step))
