"""Text as bytes: by default the standard library's sources, which every Python already has.

Which bytes a sample holds depends on the seed and on the sample's number in the run alone. The ranks of a step share
its numbers out among them, so a run on other numbers of ranks reads the same text in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wherry.errors import WherryError

if TYPE_CHECKING:
    import torch

# Packages that a distribution may leave out or a user may add would make the text differ between machines.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "ensurepip"}
_BETWEEN_FILES = b"\n"
# Of several files every 32nd validates, of one file its last 32nd part.
_VALIDATION = 32


class Bytes:
    """Files end to end, a line break behind each, of which slices are read from disk when they are asked for.

    `span`: of a single file a part of its bytes, without the break.
    """

    def __init__(self, paths: Sequence[Path], span: tuple[int, int] | None = None) -> None:
        self.paths = paths
        self.ends = np.cumsum([path.stat().st_size + len(_BETWEEN_FILES) for path in paths])
        self.begin, self.end = span or (0, int(self.ends[-1]))

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, stop, _ = wanted.indices(len(self))
        place, stop = self.begin + start, self.begin + stop
        found = b""
        while place < stop:
            index = int(np.searchsorted(self.ends, place, side="right"))
            until = min(stop, int(self.ends[index]))
            try:
                with open(self.paths[index], "rb") as file:
                    file.seek(place - (int(self.ends[index - 1]) if index else 0))
                    part = (file.read(until - place) + _BETWEEN_FILES)[: until - place]
            except OSError as error:
                raise WherryError(
                    f"--data: {self.paths[index]} cannot be read any more ({error.strerror}), and the run needs it; "
                    "put it back, and --resume goes on"
                ) from error
            if len(part) < until - place:
                raise WherryError(f"--data: {self.paths[index]} has become shorter since the run began")
            found += part
            place = until
        return np.frombuffer(found, dtype=np.uint8)


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on."""

    train: Bytes
    validation: Bytes
    source: str

    def check_length(self, sequence: int) -> None:
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) < sequence + 1:
                raise WherryError(
                    f"--data {self.source}: its {name} part holds {len(part)} bytes and a sample takes "
                    f"{sequence + 1}; give more text or a shorter --seq-length"
                )


def load_text(data: str | None = None) -> Text:
    """The text of a file, of a folder's text files, or (None) of the standard library's sources."""
    if data is None:
        folder = Path(os.__file__).parent
        return _several(folder, _files_of(folder, _SKIPPED_FOLDERS, ".py"), "the standard library")
    path = Path(data).expanduser()
    if path.is_dir():
        texts = [found for found in _files_of(path, {"__pycache__"}) if _is_text(found, path)]
        if not texts:
            raise WherryError(f"--data {path}: the folder holds no text file")
        return _several(path, texts, str(path))
    if not path.exists():
        raise WherryError(f"--data {data}: there is no such file or folder")
    if not path.is_file():
        raise WherryError(
            f"--data {data}: neither a file nor a folder, but a device or a pipe, and samples are read at any place of "
            "the text; write it to a file, and name that"
        )
    size = path.stat().st_size
    if size == 0:
        raise WherryError(f"--data {data}: the file is empty")
    if not os.access(path, os.R_OK):
        raise WherryError(f"--data {data}: the file cannot be read")
    cut = size - max(1, size // _VALIDATION)
    return Text(Bytes([path], (0, cut)), Bytes([path], (cut, size)), str(path))


def _several(folder: Path, paths: list[Path], source: str) -> Text:
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    train = [path for number, path in enumerate(paths, 1) if number % _VALIDATION]
    return Text(Bytes(train), Bytes(paths[_VALIDATION - 1 :: _VALIDATION] or train[-1:]), source)


def _files_of(folder: Path, skipped: set[str], suffix: str = "") -> list[Path]:
    """Files below a folder, but for hidden ones and those in folders of a name that is skipped."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(here, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return [path for path in found if path.is_file()]


def _is_text(path: Path, folder: Path) -> bool:
    if not os.access(path, os.R_OK):
        raise WherryError(f"--data {folder}: {path} cannot be read; change its mode, or name a folder without it")
    with open(path, "rb") as file:
        head = file.read(8192)
    return bool(head) and b"\0" not in head


def _mix(x: np.ndarray) -> np.ndarray:
    """A well mixed 64-bit number for each number of `x`, and another one for another (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
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

    def __init__(self, text: Bytes | np.ndarray, sequence: int, seed: int) -> None:
        self.text = text
        self.sequence = sequence
        self.seed = seed
        # One window fewer than would fit leaves room for the offset.
        self.windows = max(1, (len(text) - 1) // sequence - 1)
        self.room = len(text) - 1 - self.windows * sequence

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Where in the text these samples begin."""
        epochs, places = np.divmod(numbers.astype(np.int64), self.windows)
        found = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = int(_mix(np.array([(self.seed * 1_000_003 + int(epoch)) % 2**64], dtype=np.uint64))[0])
            offset = key % (min(self.sequence, self.room) + 1)
            found[chosen] = permute(places[chosen], self.windows, key) * self.sequence + offset
        return found

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
        return np.arange(first, first + self.micro, dtype=np.int64) + self.offset


def batches(samples: Samples, share: Share, steps: int, first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's micro-batches of steps `first` to `steps`, in order."""
    for step in range(first, steps):
        for micro_step in range(share.accumulation):
            yield samples.batch(share.numbers(step, micro_step))
