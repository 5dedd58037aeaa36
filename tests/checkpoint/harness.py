"""Engines of any shape over one small model, and their states by logical name."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, engine_of, make_model, settings, token_batch

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing import run_grid, run_ranks

BF16 = {"bf16": {"enabled": True}}
MODEL = make_model(lambda: TinyLM(blocks=2))


@dataclass(frozen=True)
class Shape:
    """Layout of an engine. A run that loads may differ in all of it from the one that saved."""

    ranks: int = 1
    stage: int = 0
    accumulation: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    # Ranks that cut the model, which then has a method `cut`.
    tensor: int = 1

    def __str__(self) -> str:
        extra = "-".join(f"{key}={value}" for key, value in self.more.items())
        return f"{self.ranks}x{self.tensor}x{self.stage}{extra}"


Body = Callable[[Any, Comm], Any]


def on(shape: Shape, body: Body, *, model: torch.nn.Module | None = None, optimizer: Any = adamw) -> list[Any]:
    """Run `body(engine, comm)` on every rank of an engine of this shape; `comm` is the data-parallel group."""
    source = model if model is not None else MODEL

    def rank(mesh: Comm | Topology) -> Any:
        mine: Any = copy.deepcopy(source)
        if isinstance(mesh, Topology):
            mine.cut(mesh.tensor)
        config = settings(shape.stage, shape.accumulation, more=copy.deepcopy(shape.more))
        engine = engine_of(mine, config, mesh, optimizer)
        try:
            return body(engine, mesh.data if isinstance(mesh, Topology) else mesh)
        finally:
            engine.close()

    if shape.tensor > 1:
        return run_grid(rank, data=shape.ranks, tensor=shape.tensor)
    return run_ranks(shape.ranks, rank)


def train(engine: Any, comm: Comm, steps: int, *, first: int = 0, accumulation: int = 1) -> list[float]:
    """Train on fixed batches; returns each step's loss, summed over the ranks."""
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
    """Join all ranks' shards of weights, masters and moments, by `name:state`; on rank 0 alone unless `everywhere`."""
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
                except WherryError:  # the parameter is frozen, or the optimizer keeps no such moment
                    continue
                if part.numel():
                    parts[kind] = part
            pieces += [(slot.name, kind, states.local_range(slot.name)[0], part) for kind, part in parts.items()]
            if parts.keys() - {"master"}:  # the optimizer has made its moments
                known[alike] = tuple(parts)
    found: dict[str, torch.Tensor] = {}
    gathered = engine.comm.gather_objects(pieces)
    for theirs in gathered if everywhere or engine.comm.rank == 0 else ():
        for name, kind, start, part in theirs:
            if part.dim() > 1:  # a state with a shape of its own, which one rank holds whole
                assert torch.equal(found.setdefault(f"{name}:{kind}", part), part), name
                continue
            whole = found.setdefault(f"{name}:{kind}", torch.full((slots[name].numel,), float("nan")))
            mine = whole[start : start + part.numel()]
            assert mine.isnan().all() or torch.equal(mine, part), f"{name}:{kind} differs between replicas"
            mine.copy_(part)
    with wherry.gathered(engine.module):
        found |= {f"{name}:working": p.detach().flatten().clone() for name, p in engine.module.named_parameters()}
    if engine.topology.tensor.size > 1:
        found = joined(engine.topology.tensor, slots, found)
    for name, buffer in engine.module.named_buffers():
        found[f"{name}:buffer"] = buffer.clone()
    return found


def joined(tensor: Comm, slots: dict[str, Any], parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the parts of all tensor-parallel ranks."""
    found: dict[str, torch.Tensor] = {}
    places = {name: (slot.part, slot.shape) for name, slot in slots.items()}
    for theirs in tensor.gather_objects({key: (places[key.rpartition(":")[0]], part) for key, part in parts.items()}):
        for key, ((cut, shape), part) in theirs.items():
            if cut is None:
                # A parameter that is not cut is the same on all of them.
                assert torch.equal(found.setdefault(key, part.view(shape)), part.view(shape)), key
                continue
            whole = found.setdefault(key, torch.full(tuple(cut.global_shape), float("nan"), dtype=part.dtype))
            whole[tuple(slice(o, o + n) for o, n in zip(cut.offsets, shape, strict=True))] = part.view(shape)
    return {key: whole.flatten() for key, whole in found.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), (name, value, other[name])  # a NaN equals none


def save_from(
    shape: Shape, folder: Path, *, steps: int = 2, model: Any = None, optimizer: Any = adamw, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Train and save; returns the states that were saved."""

    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        train(engine, comm, steps, accumulation=shape.accumulation)
        assert engine.save_checkpoint(folder, **arguments) is True
        return state_of(engine, everywhere=False)

    return on(shape, body, model=model, optimizer=optimizer)[0]


def load_into(
    shape: Shape, folder: Path, *, model: Any = None, optimizer: Any = adamw, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Load into a new engine; returns its states."""

    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        path, _ = engine.load_checkpoint(folder, **arguments)
        assert path is not None
        return state_of(engine, everywhere=False)

    return on(shape, body, model=model, optimizer=optimizer)[0]


def before_disk_calls(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` before each call of Python's that changes a disk."""

    def preceded(call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*arguments: Any, **more: Any) -> Any:
            act()
            return call(*arguments, **more)

        return both

    for name in ("mkdir", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir"):
        patch.setattr(os, name, preceded(getattr(os, name)))
