"""What one rank writes of a checkpoint: its files, and what it tells the first rank of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint.collect import Piece
from wherry.checkpoint.files import FileRecord, TensorWriter
from wherry.checkpoint.manifest import Entry, Slice
from wherry.checkpoint.slices import Box


@dataclass
class Part:
    """What one rank has written: its files, the slices in them, and its own values."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    # (parameter, state, slice)
    slices: list[tuple[str, str, Slice]] = field(default_factory=list)
    rank_values: dict[str, Any] = field(default_factory=dict)
    # On rank 0: what belongs to the run as a whole.
    engine: dict[str, Any] = field(default_factory=dict)
    # Parameter -> state -> value.
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    # Tensors of values -> their files.
    tensors: dict[str, str] = field(default_factory=dict)
    # On the first rank of a pipeline's stage: what the stage holds.
    entries: dict[str, Entry] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(
            {
                "files": {name: asdict(record) for name, record in self.files.items()},
                "slices": [[name, state, piece.to_json()] for name, state, piece in self.slices],
                "rank_values": self.rank_values,
                "engine": self.engine,
                "scalars": self.scalars,
                "tensors": self.tensors,
                "entries": {name: entry.to_json() for name, entry in self.entries.items()},
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Part:
        value = json.loads(text)
        return cls(
            {name: FileRecord(**record) for name, record in value["files"].items()},
            [(name, state, Slice.from_json(piece)) for name, state, piece in value["slices"]],
            value["rank_values"],
            value["engine"],
            value["scalars"],
            value["tensors"],
            {name: Entry.from_json(entry) for name, entry in value["entries"].items()},
        )


class RankFiles:
    """The files of one rank: one, and another when the first one's header is full."""

    def __init__(self, partial: Path, rank: int, room: int) -> None:
        self.partial = partial
        self.rank = rank
        self.room = room
        self.part = Part()
        self._writer: TensorWriter | None = None

    def put(self, name: str, tensor: torch.Tensor) -> str:
        """Write a tensor; returns the name of its file."""
        if self._writer is not None and not self._writer.fits(name):
            self._finish()
        if self._writer is None:
            number = len(self.part.files)
            path = self.partial / f"rank-{self.rank:05}{f'-{number}' if number else ''}.safetensors"
            self._writer = TensorWriter(path, max(self.room, len(name) + 1024))
        self._writer.add(name, tensor)
        return self._writer.path.name

    def put_piece(self, piece: Piece, whole: tuple[int, ...]) -> None:
        box = piece.run.box
        inside = box != Box.whole(whole)
        # A rank has one run of a box at most, of each state.
        name = f"{piece.name}:{piece.state}"
        if inside or piece.run.numel != box.numel or piece.addend is not None:
            name += f":{','.join(map(str, (*box.offsets, piece.run.start)))}"
        scales = None
        if piece.scales is not None:
            scales = f"{name}:scales"
            self.part.tensors[scales] = self.put(scales, piece.scales)
        file = self.put(name, piece.values)
        self.part.slices.append(
            (
                piece.name,
                piece.state,
                Slice(
                    file,
                    name,
                    piece.run.start,
                    piece.run.stop,
                    offsets=box.offsets if inside else None,
                    shape=box.shape if inside else None,
                    scales=scales,
                    phase=piece.phase,
                    addend=piece.addend,
                ),
            )
        )

    def _finish(self) -> None:
        assert self._writer is not None
        self.part.files[self._writer.path.name] = self._writer.finish()
        self._writer = None

    def finish(self) -> Part:
        if self._writer is not None:
            self._finish()
        return self.part

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
