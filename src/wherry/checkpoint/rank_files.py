"""What one rank writes of a checkpoint: its files and its part of the manifest; how ranks meet without a collective."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from wherry.checkpoint.contents import Piece
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import TensorWriter, write_text
from wherry.checkpoint.format import Manifest, Slice
from wherry.checkpoint.reshard import Box

# Bytes of a rank's note: a block, so that its text takes no more room than it has.
NOTE = 4096
PAUSE = 0.02


class RankFiles:
    """The files of one rank: one, and another when the first one's header is full. `part` is what the rank has of the
    manifest; its entries are there before their pieces come."""

    def __init__(self, partial: Path, rank: int, room: int, part: Manifest) -> None:
        self.partial = partial
        self.rank = rank
        self.room = room
        self.part = part
        self._writer: TensorWriter | None = None

    def put(self, name: str, tensor: torch.Tensor) -> str:
        """Write a tensor; returns the name of its file."""
        if self._writer is not None and not self._writer.fits(name):
            self.finish()
        if self._writer is None:
            number = len(self.part.files)
            path = self.partial / f"rank-{self.rank:05}{f'-{number}' if number else ''}.safetensors"
            self._writer = TensorWriter(path, max(self.room, len(name) + 1024))
        self._writer.add(name, tensor)
        return self._writer.path.name

    def put_piece(self, piece: Piece) -> None:
        entry, box = self.part.entries[piece.name], piece.run.box
        inside = box != Box.whole(entry.shape)
        # A rank has one run of a box at most, of each state.
        name = f"{piece.name}:{piece.state}"
        if inside or piece.run.numel != box.numel or piece.addend is not None:
            name += f":{','.join(map(str, (*box.offsets, piece.run.start)))}"
        scales = None
        if piece.scales is not None:
            scales = f"{name}:scales"
            self.part.tensors[scales] = self.put(scales, piece.scales)
        entry.states.setdefault(piece.state, []).append(
            Slice(
                self.put(name, piece.values),
                name,
                piece.run.start,
                piece.run.stop,
                offsets=box.offsets if inside else None,
                shape=box.shape if inside else None,
                scales=scales,
                phase=piece.phase,
                addend=piece.addend,
            )
        )

    def finish(self) -> None:
        """Everything that was put is on the disk."""
        if self._writer is not None:
            self.part.files[self._writer.path.name] = self._writer.finish()
            self._writer = None

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Rendezvous:
    """How ranks that write behind training meet: by small files in the folder that is written, never by a collective.

    A rank whose disk is full cannot write that it is full. So its note has its room on the disk before anything else
    has, and failing is renaming it.
    """

    def __init__(self, partial: Path, rank: int) -> None:
        self.partial = partial
        self.rank = rank

    def open(self) -> None:
        """Take the room for this rank's note, while a failure of that can still be told by a collective."""
        with open(self._note(self.rank), "xb") as file:
            file.write(b" " * NOTE)
            file.flush()
            os.fsync(file.fileno())

    def report(self, text: str) -> None:
        """This rank has written its part; `text` is its record of it."""
        write_text(self._record(self.rank), text)

    def fail(self, message: str) -> None:
        """This rank has given up. What it has written is deleted, which makes room; then rank 0 hears of it."""
        # Rank 0 may have given up before, and the folder be gone. A note without its text still says who has failed.
        with contextlib.suppress(OSError):
            for path in self.partial.glob(f"rank-{self.rank:05}*"):
                path.unlink()
        with contextlib.suppress(OSError):
            self._fill(message)
        with contextlib.suppress(OSError):
            os.rename(self._note(self.rank), self._failure(self.rank))

    def _fill(self, message: str) -> None:
        fd = os.open(self._note(self.rank), os.O_WRONLY)
        try:
            os.pwrite(fd, message.encode()[:NOTE], 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def gather(self, ranks: int, timeout: float, take: Callable[[str], None]) -> None:
        """Hand every rank's record to `take`, in rank order. Raises as soon as any rank has failed, and names it;
        and names those that are not there when none has come for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        waited = list(range(ranks))
        while waited:
            self._raise_if_failed(waited)
            if self._record(waited[0]).exists():
                rank = waited.pop(0)
                take(self._record(rank).read_text(encoding="utf-8"))
                self._record(rank).unlink()
                self._note(rank).unlink(missing_ok=True)
                deadline = time.monotonic() + timeout
            elif time.monotonic() > deadline:
                late = [rank for rank in waited if not self._record(rank).exists()]
                who = f"{'rank' if len(late) == 1 else 'ranks'} {', '.join(map(str, late[:8]))}"
                verb = "has" if len(late) == 1 else "have"
                raise CheckpointError(
                    f"{who} {verb} not written {'its' if verb == 'has' else 'their'} part in {timeout:g} s; if the "
                    'disk is only slow, raise "wherry": {"timeout_s": ...}'
                )
            else:
                time.sleep(PAUSE)

    def _raise_if_failed(self, ranks: list[int]) -> None:
        there = set(os.listdir(self.partial))
        for rank in ranks:
            failure = self._failure(rank)
            if failure.name in there:
                text = failure.read_bytes().decode(errors="replace").strip()
                raise CheckpointError(f"rank {rank}: {text or 'it has failed, and could not write why'}")

    def _note(self, rank: int) -> Path:
        return self.partial / f"{rank}.note"

    def _failure(self, rank: int) -> Path:
        return self.partial / f"{rank}.failed"

    def _record(self, rank: int) -> Path:
        return self.partial / f"{rank}.part"
