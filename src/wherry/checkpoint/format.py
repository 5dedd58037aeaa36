"""The format: the manifest, which says what a checkpoint holds and where; the files that a rank writes; values as JSON.

Nothing is pickled.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ConfigDict, Field, GetPydanticSchema, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from wherry import __version__
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import DTYPES, Count, FileRecord, TensorWriter, unique_keys
from wherry.checkpoint.reshard import Box, Run
from wherry.errors import one_line
from wherry.native.segment import BLOCK
from wherry.parallel.partition import is_dtensor

NAME = "manifest.json"
FORMAT = "wherry checkpoint"
VERSION = 1
WEIGHT = "weight"
# States that earlier versions wrote, and nobody reads: sums of an open accumulation window, and working weights that a
# delayed update had yet to change.
UNREAD = {"gradient", "behind"}
_NO_DIGEST = "0" * 64

Shape = Annotated[tuple[Count, ...], Field(max_length=64)]


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of one state of one parameter, and the tensor of a file that holds them.

    `offsets` and `shape` say which box of the parameter is counted; without them it is the whole. `own`: the state has
    not an element for each of these, which are all of the box, but is a tensor of this shape. `scales`: the tensor
    holds 8-bit codes, this one the scales of their blocks, and `phase` is the first code's place in its block.
    `addend`: of a buffer that differs between ranks, whose it is.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    file: str
    tensor: str
    start: Count
    stop: Count
    offsets: Shape | None = None
    shape: Shape | None = None
    own: Shape | None = None
    scales: str | None = None
    phase: Annotated[Count, Field(lt=BLOCK)] = 0
    addend: Count | None = None

    def run(self, whole: tuple[int, ...]) -> Run:
        box = Box.whole(whole) if self.offsets is None or self.shape is None else Box(self.offsets, self.shape)
        return Run(box, self.start, self.stop)

    @property
    def numel(self) -> int:
        """Of the tensor."""
        return self.stop - self.start if self.own is None else math.prod(self.own)

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if value is not None}
        if not self.phase:
            del values["phase"]
        return values


@dataclass
class Entry:
    """One parameter or buffer: its logical shape, the dtype it is computed with, and the other names it goes by."""

    shape: Shape
    dtype: str
    kind: Annotated[str, Field(pattern="^(parameter|frozen|buffer)$")] = "parameter"
    aliases: tuple[str, ...] = ()
    # State name -> where its slices are.
    states: dict[str, list[Slice]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def moments(self) -> list[str]:
        """The optimizer's states that there are of it."""
        return sorted(self.states.keys() - {WEIGHT} - UNREAD)

    def own_shape(self, state: str, box: Box) -> tuple[int, ...] | None:
        """The shape that a state has of a box of the parameter, where that is not the box's."""
        own = (piece for piece in self.states.get(state, ()) if piece.own is not None)
        return next((piece.own for piece in own if piece.run(self.shape).box == box), None)

    def has_own(self, state: str) -> bool:
        return any(piece.own is not None for piece in self.states.get(state, ()))

    def to_json(self) -> dict[str, Any]:
        states = {name: [piece.to_json() for piece in slices] for name, slices in self.states.items()}
        values = vars(self) | {"states": states}
        if not self.aliases:
            del values["aliases"]
        return values


# What `engine` holds for certain, beside what `encode` makes of anything.


class GroupValues(TypedDict):
    options: dict[str, Any]
    parameters: list[str]


class OptimizerValues(TypedDict, total=False):
    type: str
    steps: Count
    parameter_steps: dict[str, Count]
    groups: list[GroupValues]
    # By parameter; by the number of the group in checkpoints that count steps for all parameters together.
    scalars: dict[str, dict[str, float]]


class EngineValues(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    global_steps: Count
    micro_steps: Count
    skipped_steps: Count
    samples: Count
    frozen_excluded: bool
    optimizer: OptimizerValues
    model_config: str
    generation_config: str


@dataclass
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors.

    `entries` are parameters (kinds `parameter` and `frozen`) and buffers. `engine` is what belongs to the run as a
    whole, `ranks` what belongs to each rank of the run that wrote it; both hold values as `values.encode` makes them.
    """

    tag: str
    created: str
    versions: dict[str, str]
    world_size: Annotated[Count, Field(ge=1)]
    entries: dict[str, Entry]
    config: dict[str, Any] = field(default_factory=dict)
    placement: list[Annotated[list[str], Field(min_length=3, max_length=3)]] = field(default_factory=list)
    engine: Annotated[dict[str, Any], GetPydanticSchema(lambda _, of: of(EngineValues))] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    # Tensors of values, and the scales of 8-bit states, by name -> their files.
    tensors: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    @classmethod
    def of_now(cls, tag: str, world_size: int, entries: dict[str, Entry], **more: Any) -> Manifest:
        """Of a checkpoint that is about to be written."""
        made = {"wherry": __version__, "torch": torch.__version__}
        return cls(tag, datetime.now(UTC).isoformat(), made, world_size, entries, **more)

    @property
    def step(self) -> int:
        found: int = self.engine.get("global_steps", 0)
        return found

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def parameters(self) -> Iterator[tuple[str, Entry]]:
        return ((name, entry) for name, entry in self.entries.items() if entry.kind in ("parameter", "frozen"))

    def buffers(self) -> Iterator[tuple[str, Entry]]:
        return ((name, entry) for name, entry in self.entries.items() if entry.kind == "buffer")

    def slices(self) -> Iterator[tuple[Entry, str, Slice]]:
        """All that anybody reads, with what they are of."""
        for entry in self.entries.values():
            for state in entry.states.keys() - UNREAD:
                for piece in entry.states[state]:
                    yield entry, state, piece

    def state_names(self) -> list[str]:
        """The optimizer's states that are inside."""
        return sorted({state for _, entry in self.parameters() for state in entry.moments})

    def merge(self, part: Manifest) -> None:
        """Take over what another rank has written."""
        self.files.update(part.files)
        self.tensors.update(part.tensors)
        self.ranks += part.ranks
        for name, entry in part.entries.items():
            mine = self.entries.setdefault(name, replace(entry, states={}))
            for state, slices in entry.states.items():
                mine.states.setdefault(state, []).extend(slices)
        for name, scalars in part.engine.get("optimizer", {}).get("scalars", {}).items():
            self.engine["optimizer"]["scalars"].setdefault(name, {}).update(scalars)

    def to_text(self) -> str:
        value = {"format": FORMAT, "version": VERSION, "sha256": _NO_DIGEST} | vars(self)
        value["files"] = {name: vars(record) for name, record in self.files.items()}
        value["entries"] = {name: entry.to_json() for name, entry in self.entries.items()}
        # One line for each key at the top: short to look at, and no longer than it need be.
        lines = ",\n".join(f"{json.dumps(key)}: {_compact(item)}" for key, item in value.items())
        text = f"{{\n{lines}\n}}\n"
        return text.replace(_NO_DIGEST, hashlib.sha256(text.encode()).hexdigest(), 1)

    @classmethod
    def from_text(cls, text: str, where: Path) -> Manifest:
        """Raises `CheckpointError` for a manifest that is damaged, or that another version has to read.

        What it says is of the right types; whether it fits together, and fits its files, is not looked at.
        """
        damaged = f"{where} is damaged"
        try:
            value = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{damaged}: {error}") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise CheckpointError(f"{where} is not the manifest of a Wherry checkpoint")
        if value.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has version {value.get('version')} of the format, and this Wherry reads version {VERSION}; "
                "use the Wherry that wrote it, or a newer one"
            )
        digest = str(value.get("sha256"))
        if hashlib.sha256(text.replace(digest, _NO_DIGEST, 1).encode(errors="replace")).hexdigest() != digest:
            raise CheckpointError(f"{damaged}: its checksum does not match")
        try:
            return _reading().validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            told = f"{place}: {first['msg']}, got {str(first['input'])[:80]!r}"
            raise CheckpointError(f"{damaged}: {one_line(told, 500)}") from error


@functools.cache
def _reading() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# What a rank writes.


@dataclass(frozen=True)
class Piece:
    """Elements of one state of one parameter: a run of them, and their values in one dim.

    `own`: the state has not an element for each of the run, which is all of its box; the values are in this shape.
    """

    name: str
    state: str
    run: Run
    values: torch.Tensor
    # Of 8-bit states: the scales of the blocks that the values lie in, and the first value's place in its block.
    scales: torch.Tensor | None = None
    phase: int = 0
    # Of a buffer that differs between ranks: whose it is.
    addend: int | None = None
    own: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scalar:
    """A state of one parameter with one value for all elements, such as a product of momenta."""

    name: str
    state: str
    value: float


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
                own=piece.own,
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

    def drop(self) -> None:
        """Stop, and make room on the disk again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for path in self.partial.glob(f"rank-{self.rank:05}*"):
            path.unlink(missing_ok=True)


# Values of a user's, a scheduler's or a generator's state.

# Marks an object that stands for what JSON has not.
KIND = "$"
PutTensor = Callable[[torch.Tensor], Any]
GetTensor = Callable[[Any], torch.Tensor]


def encode(value: Any, where: str, put: PutTensor) -> Any:
    """`value` as JSON holds it. Tensors go to `put`, which returns a reference; `where` names the value in errors."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where, put)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {KIND: "float", "value": repr(float(value))}
    if isinstance(value, bytes | bytearray):
        return {KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES or value.layout is not torch.strided or value.is_meta or is_dtensor(value):
            kind = "DTensor" if is_dtensor(value) else f"{value.layout} of {value.dtype} on {value.device}"
            raise CheckpointError(f"{where}: a tensor that is {kind} cannot be saved; make it a plain one")
        return {KIND: "tensor", "value": put(value)}
    if isinstance(value, np.ndarray):
        return _encode_array(value, where, put)
    if isinstance(value, torch.Size | tuple):
        return {KIND: "tuple", "value": _encode_items(value, where, put)}
    if isinstance(value, list):
        return _encode_items(value, where, put)
    if isinstance(value, set | frozenset):
        return {KIND: "set", "value": _encode_items(sorted(value, key=repr), where, put)}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, put)
    raise CheckpointError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; a checkpoint holds None, "
        "booleans, numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, sets and dicts of these. Save "
        "what the object is made of, for example its state_dict() or vars() of it"
    )


def _encode_items(items: Any, where: str, put: PutTensor) -> list[Any]:
    return [encode(item, f"{where}[{number}]", put) for number, item in enumerate(items)]


def _encode_array(value: np.ndarray, where: str, put: PutTensor) -> Any:
    if value.dtype.hasobject:
        raise CheckpointError(f"{where}: a numpy array of objects cannot be saved; give it a dtype of numbers")
    flat = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0).byte()
    return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": put(flat)}


def _encode_mapping(value: Mapping[Any, Any], where: str, put: PutTensor) -> Any:
    plain = type(value) is not Counter and all(isinstance(key, str) for key in value) and KIND not in value
    if plain:
        return {key: encode(item, f"{where}[{key!r}]", put) for key, item in value.items()}
    pairs = [
        [encode(key, f"{where} (a key)", put), encode(item, f"{where}[{key!r}]", put)] for key, item in value.items()
    ]
    return {KIND: "counter" if type(value) is Counter else "dict", "value": pairs}


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of this name, and nothing else of torch's."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of this torch; the checkpoint is damaged, or of a newer version")
    return found


def decode(value: Any, get: GetTensor) -> Any:
    """What `encode` was given. `get` finds the tensor of a reference."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: decode(item, get) for key, item in value.items()}
    inner = value["value"]
    if kind == "tensor":
        return get(inner)
    if kind == "array":
        return np.frombuffer(get(inner).numpy().tobytes(), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind == "dtype":
        return dtype_named(inner)
    if kind == "tuple":
        return tuple(decode(item, get) for item in inner)
    if kind == "set":
        return {decode(item, get) for item in inner}
    if kind in ("dict", "counter"):
        pairs = {decode(key, get): decode(item, get) for key, item in inner}
        return Counter(pairs) if kind == "counter" else pairs
    raise CheckpointError(f"a value of kind {kind!r} is not known; the checkpoint was written by a newer version")
