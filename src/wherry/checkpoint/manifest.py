"""The manifest: what a checkpoint holds, by logical name, and where. One JSON file, which checks itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import FileRecord
from wherry.checkpoint.slices import Box, Run

NAME = "manifest.json"
FORMAT = "wherry checkpoint"
VERSION = 1
WEIGHT = "weight"
GRADIENT = "gradient"
# Working weights one update older than the master: some checkpoints have them, and the master is what is loaded.
BEHIND = "behind"
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of one state of one parameter, and the tensor of a file that holds them.

    `offsets` and `shape` say which box of the parameter is counted; without them it is the whole. `scales`: the tensor
    holds 8-bit codes, this one the scales of their blocks, and `phase` is the first code's place in its block.
    `addend`: the number of the rank whose part of a sum this is.
    """

    file: str
    tensor: str
    start: int
    stop: int
    offsets: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    scales: str | None = None
    phase: int = 0
    addend: int | None = None

    def run(self, whole: tuple[int, ...]) -> Run:
        box = Box.whole(whole) if self.offsets is None or self.shape is None else Box(self.offsets, self.shape)
        return Run(box, self.start, self.stop)

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if value is not None}
        if not self.phase:
            del values["phase"]
        return values

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Slice:
        boxes: dict[str, Any] = {key: tuple(value[key]) for key in ("offsets", "shape") if key in value}
        return cls(**(value | boxes))


@dataclass
class Entry:
    """One parameter or buffer: its logical shape, the dtype it is computed with, and the other names it goes by."""

    shape: tuple[int, ...]
    dtype: str
    kind: str = "parameter"
    aliases: tuple[str, ...] = ()
    # State name -> where its slices are.
    states: dict[str, list[Slice]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "kind": self.kind,
            **({"aliases": list(self.aliases)} if self.aliases else {}),
            "states": {name: [piece.to_json() for piece in slices] for name, slices in self.states.items()},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        return cls(
            tuple(value["shape"]),
            value["dtype"],
            value["kind"],
            tuple(value.get("aliases", ())),
            {name: [Slice.from_json(piece) for piece in slices] for name, slices in value["states"].items()},
        )


@dataclass
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors.

    `entries` are parameters (kinds `parameter` and `frozen`) and buffers. `engine` is what belongs to the run as a
    whole, `ranks` what belongs to each rank of the run that wrote it; both hold values as `values.encode` makes them.
    """

    tag: str
    created: str
    versions: dict[str, str]
    world_size: int
    entries: dict[str, Entry]
    engine: dict[str, Any]
    ranks: list[dict[str, Any]]
    config: dict[str, Any]
    files: dict[str, FileRecord]
    placement: list[list[str]] = field(default_factory=list)
    # Tensors of values, and the scales of 8-bit states, by name -> their files.
    tensors: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.engine.get("global_steps", 0))

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def parameters(self) -> Iterator[tuple[str, Entry]]:
        return ((name, entry) for name, entry in self.entries.items() if entry.kind in ("parameter", "frozen"))

    def buffers(self) -> Iterator[tuple[str, Entry]]:
        return ((name, entry) for name, entry in self.entries.items() if entry.kind == "buffer")

    def state_names(self) -> list[str]:
        """The optimizer's states that are inside."""
        names = {state for _, entry in self.parameters() for state in entry.states}
        return sorted(names - {WEIGHT, GRADIENT, BEHIND})

    def check_complete(self) -> None:
        """Every element of every state is in a slice: what the ranks wrote fits together."""
        for name, entry in self.entries.items():
            for state, slices in entry.states.items():
                for addend in {piece.addend for piece in slices}:
                    held = sum(piece.stop - piece.start for piece in slices if piece.addend == addend)
                    if held != entry.numel:
                        raise CheckpointError(
                            f"{name}, {state}: the ranks wrote {held:,} elements, expected {entry.numel:,}; do all "
                            "of them hold the same model?"
                        )
            if WEIGHT not in entry.states and entry.numel:
                raise CheckpointError(f"{name}: no rank wrote it")

    def to_text(self) -> str:
        value = {
            "format": FORMAT,
            "version": VERSION,
            "sha256": _NO_DIGEST,
            "tag": self.tag,
            "created": self.created,
            "versions": self.versions,
            "world_size": self.world_size,
            "placement": self.placement,
            "engine": self.engine,
            "config": self.config,
            "ranks": self.ranks,
            "tensors": self.tensors,
            "files": {name: asdict(record) for name, record in self.files.items()},
            "entries": {name: entry.to_json() for name, entry in self.entries.items()},
        }
        # One line for each key at the top: short to look at, and no longer than it need be.
        lines = ",\n".join(f"{json.dumps(key)}: {_compact(item)}" for key, item in value.items())
        text = f"{{\n{lines}\n}}\n"
        return text.replace(_NO_DIGEST, hashlib.sha256(text.encode()).hexdigest(), 1)

    @classmethod
    def from_text(cls, text: str, where: Path) -> Manifest:
        """Raises `CheckpointError` for a manifest that is damaged, or that another version has to read."""
        damaged = f"{where} is damaged"
        try:
            value = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{damaged}: {error}") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise CheckpointError(f"{where} is not the manifest of a Wherry checkpoint")
        if value.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has version {value.get('version')} of the format, and this Wherry reads version {VERSION}; "
                "use the Wherry that wrote it, or a newer one"
            )
        digest = str(value.get("sha256"))
        if hashlib.sha256(text.replace(digest, _NO_DIGEST, 1).encode()).hexdigest() != digest:
            raise CheckpointError(f"{damaged}: its checksum does not match")
        outside = [name for name in (*value["files"], *value["tensors"].values()) if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{damaged}: {outside[0]!r} is no file of its own folder")
        return cls(
            tag=value["tag"],
            created=value["created"],
            versions=value["versions"],
            world_size=value["world_size"],
            placement=value["placement"],
            engine=value["engine"],
            config=value["config"],
            ranks=value["ranks"],
            tensors=value["tensors"],
            files={name: FileRecord(**record) for name, record in value["files"].items()},
            entries={name: Entry.from_json(entry) for name, entry in value["entries"].items()},
        )


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read_manifest(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder") from None
        raise CheckpointError(f"{folder} holds no {NAME}: it is no Wherry checkpoint, or not a whole one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return Manifest.from_text(text, path)
