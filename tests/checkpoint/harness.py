"""Engines of any shape over one tiny model, and what there is to compare of them, by logical name."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.engine.harness import adamw, make_model, settings, token_batch

import wherry
from wherry.checkpoint.session import within
from wherry.native import Blocks8, dequantize
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks

MODEL = make_model()


@dataclass(frozen=True)
class Shape:
    """How an engine is laid out. Everything here may differ between the run that saves and the one that loads."""

    ranks: int = 1
    stage: int = 0
    accumulation: int = 1
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        extra = "-".join(f"{key}={value}" for key, value in self.more.items())
        return f"{self.ranks}x{self.stage}{extra}"


Body = Callable[[Any, Comm], Any]


def on(shape: Shape, body: Body, *, model: torch.nn.Module | None = None, optimizer: Any = adamw) -> list[Any]:
    """Run `body(engine, comm)` on every rank of an engine of this shape."""
    source = model if model is not None else MODEL

    def rank(comm: Comm) -> Any:
        mine = copy.deepcopy(source)
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=optimizer(mine.parameters()) if optimizer is not None else None,
            mesh=comm,
            config=settings(shape.stage, shape.accumulation, more=copy.deepcopy(shape.more)),
        )
        try:
            return body(engine, comm)
        finally:
            engine.close()

    return run_ranks(shape.ranks, rank)


def train(engine: Any, comm: Comm, steps: int, *, first: int = 0, accumulation: int = 1) -> list[float]:
    """Steps on fixed batches; every rank's losses, averaged."""
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        for micro in range(accumulation):
            loss = engine(*token_batch(step, micro, comm.rank))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        losses.append(sum(comm.gather_objects(total)))
    return losses


def state_of(engine: Any, *, everywhere: bool = True) -> dict[str, torch.Tensor]:
    """All weights, masters and moments, whole, by `name:state`; 8-bit ones as values. On rank 0 alone, or everywhere:
    what is put together of all ranks' shards is the same on each."""
    engine.settle()
    session = engine._session()
    found: dict[str, torch.Tensor] = {}
    for flat in session.flats:
        pieces: list[tuple[str, str, int, tuple[int, ...], int, torch.Tensor]] = []
        if flat in session.states:
            with session.states[flat].opened() as segments:
                for span, values in zip(session.spans(flat), segments, strict=True):
                    for name, value in values.items():
                        if isinstance(value, Blocks8):
                            plain = torch.empty(value.numel())
                            dequantize(value, plain)
                            value = plain
                        if value.dim():
                            for slot in flat.layout.slots:
                                place = within(flat, slot, span.start, span.stop)
                                if slot.group == span.group and place is not None:
                                    a, b, at = place
                                    part = value[at - span.start : at - span.start + b - a].clone()
                                    pieces.append((slot.name, name, slot.numel, slot.shape, a, part))
        with flat.opened() as shard:
            for slot in flat.layout.slots:
                place = flat.layout.overlap(slot, flat.rank)
                if place is not None:
                    a, b, at = place
                    pieces.append((slot.name, "working", slot.numel, slot.shape, a, shard[at : at + b - a].clone()))
        gathered = session.data.gather_objects(pieces)
        for theirs in gathered if everywhere or session.comm.rank == 0 else ():
            for name, state, numel, shape, start, part in theirs:
                whole = found.setdefault(f"{name}:{state}", torch.full((numel,), float("nan"), dtype=part.dtype))
                whole[start : start + part.numel()] = part
                assert whole.numel() == numel, shape
    if session.tensor.size > 1:
        found = joined(session, found)
    for name, buffer in engine.module.named_buffers():
        found[f"{name}:buffer"] = buffer.clone()
    return found


def joined(session: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of what each tensor-parallel rank has whole of its part."""
    logical = [session.logical(slot) for flat in session.flats for slot in flat.layout.slots]
    boxes = {found.name: (found.box, found.shape) for found in logical}
    found: dict[str, torch.Tensor] = {}
    for theirs in session.tensor.gather_objects(
        {key: (boxes[key.rpartition(":")[0]], part) for key, part in parts.items()}
    ):
        for key, ((box, shape), part) in theirs.items():
            whole = found.setdefault(key, torch.full(shape, float("nan"), dtype=part.dtype))
            place = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))]
            # What is not cut is the same on all of them.
            assert box.shape != shape or place.isnan().all() or torch.equal(place, part.view(box.shape)), key
            place.copy_(part.view(box.shape))
    return {key: whole.flatten() for key, whole in found.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), (name, value, other[name])
        assert not value.is_floating_point() or not torch.isnan(value).any(), name


def save_from(shape: Shape, folder: Path, *, steps: int = 2, **arguments: Any) -> dict[str, torch.Tensor]:
    """Train and save; the states that were saved."""

    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        train(engine, comm, steps, accumulation=shape.accumulation)
        assert engine.save_checkpoint(folder, **arguments) is True
        return state_of(engine)

    return on(shape, body)[0]


def load_into(shape: Shape, folder: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        path, _ = engine.load_checkpoint(folder, **arguments)
        assert path is not None
        return state_of(engine)

    return on(shape, body)[0]


def forged(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that was changed by somebody who knows its checksum."""
    value = json.loads(manifest.read_text())
    change(value)
    value["sha256"] = "0" * 64
    text = json.dumps(value)
    manifest.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))
