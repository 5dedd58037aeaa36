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
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

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


# Of torch's optimizers and the library's own.
KINDS = (
    *("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum"),
    *("square_avg", "grad_avg", "acc_delta", "ax", "prev", "step_size"),
    *("row_var", "col_var", "variance", "lengths", "mean"),
)


def state_of(engine: Any, *, everywhere: bool = True) -> dict[str, torch.Tensor]:
    """All weights, masters and moments, whole, by `name:state`. On rank 0 alone, or everywhere: what is put together
    of all ranks' shards is the same on each."""
    states = engine.states
    slots = {slot.name: slot for unit in engine.units for flat in unit.flats for slot in flat.layout.slots}
    pieces: list[tuple[str, str, int, torch.Tensor]] = []
    known: dict[Any, tuple[str, ...]] = {}
    for flat in (flat for unit in engine.units for flat in unit.flats):
        for slot in flat.layout.slots:
            alike = flat.dtype, slot.group, len(slot.shape)
            kinds = known.get(alike, KINDS)
            parts = {}
            for kind in kinds:
                try:
                    part = states.local(slot.name, kind)
                except WherryError:  # it is frozen, or the optimizer keeps no such moment
                    continue
                if part.numel():
                    parts[kind] = part
            pieces += [(slot.name, kind, states.local_range(slot.name)[0], part) for kind, part in parts.items()]
            if parts.keys() - {"master"}:  # it has been updated
                known[alike] = tuple(parts)
    found: dict[str, torch.Tensor] = {}
    gathered = engine.comm.gather_objects(pieces)
    for theirs in gathered if everywhere or engine.comm.rank == 0 else ():
        for name, kind, start, part in theirs:
            if part.dim() > 1:  # it has a shape of its own, and one rank has it
                assert torch.equal(found.setdefault(f"{name}:{kind}", part), part), name
                continue
            whole = found.setdefault(f"{name}:{kind}", torch.full((slots[name].numel,), float("nan")))
            whole[start : start + part.numel()] = part
    with wherry.gathered(engine.module):
        found |= {f"{name}:working": p.detach().flatten().clone() for name, p in engine.module.named_parameters()}
    if engine.topology.tensor.size > 1:
        found = joined(engine.topology.tensor, slots, found)
    for name, buffer in engine.module.named_buffers():
        found[f"{name}:buffer"] = buffer.clone()
    return found


def joined(tensor: Comm, slots: dict[str, Any], parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of what each tensor-parallel rank has whole of its part."""
    found: dict[str, torch.Tensor] = {}
    places = {name: (slot.part, slot.shape) for name, slot in slots.items()}
    for theirs in tensor.gather_objects({key: (places[key.rpartition(":")[0]], part) for key, part in parts.items()}):
        for key, ((cut, shape), part) in theirs.items():
            if cut is None:
                # What is not cut is the same on all of them.
                assert torch.equal(found.setdefault(key, part.view(shape)), part.view(shape)), key
                continue
            whole = found.setdefault(key, torch.full(tuple(cut.global_shape), float("nan"), dtype=part.dtype))
            whole[tuple(slice(o, o + n) for o, n in zip(cut.offsets, shape, strict=True))] = part.view(shape)
    return {key: whole.flatten() for key, whole in found.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), (name, value, other[name])
        assert not value.is_floating_point() or not torch.isnan(value).any(), name


def save_from(
    shape: Shape, folder: Path, *, steps: int = 2, optimizer: Any = adamw, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Train and save; the states that were saved."""

    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        train(engine, comm, steps, accumulation=shape.accumulation)
        assert engine.save_checkpoint(folder, **arguments) is True
        return state_of(engine)

    return on(shape, body, optimizer=optimizer)[0]


def load_into(shape: Shape, folder: Path, *, optimizer: Any = adamw, **arguments: Any) -> dict[str, torch.Tensor]:
    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        path, _ = engine.load_checkpoint(folder, **arguments)
        assert path is not None
        return state_of(engine)

    return on(shape, body, optimizer=optimizer)[0]


def forged(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that was changed by somebody who knows its checksum."""
    value = json.loads(manifest.read_text())
    change(value)
    value["sha256"] = "0" * 64
    text = json.dumps(value)
    manifest.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))
