"""States of optimizers that update whole parameters, of any shape, in checkpoints and by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import MODEL, Shape, assert_same, load_into, on, save_from, state_of, train
from tests.engine.test_whole_optimizers import OPTIMIZERS as KNOWN
from tests.engine.test_whole_optimizers import VOUCHED, muon
from tests.tiers.rows import zero_block

from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import find
from wherry.errors import WherryError
from wherry.nn import TiledLinear
from wherry.parallel.comm import Comm

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {**KNOWN, "muon": muon}
adafactor = OPTIMIZERS["adafactor"]
# Ranks, stage, and where states and parameters rest.
SHAPES = {
    "2x0": (2, 0, "none", "none"),
    "2x3": (2, 3, "none", "none"),
    "4x1": (4, 1, "none", "none"),
    "groups": (4, 3, "none", "none"),
    "host": (2, 2, "cpu", "none"),
    "disk": (2, 3, "nvme", "nvme"),
}


def shape_of(name: str, folder: Path, **more: Any) -> Shape:
    ranks, stage, *tiers = SHAPES[name]
    zero = zero_block(stage, *tiers, folder) | ({"mics_shard_size": 2} if name == "groups" else {})
    return Shape(ranks, stage, more={**VOUCHED, **more, "zero_optimization": zero})


@pytest.mark.parametrize(
    ("optimizer", "source", "target"),
    [
        ("adafactor", "disk", "4x1"),
        ("adafactor", "2x3", "2x0"),
        ("muon", "4x1", "host"),
        ("muon", "groups", "disk"),
        ("rows", "host", "groups"),  # torch's own step cannot keep its state on disk
    ],
)
def test_any_layout_to_any(tmp_path: Path, optimizer: str, source: str, target: str) -> None:
    """Load into an engine that has trained otherwise."""
    make = OPTIMIZERS[optimizer]
    states = save_from(shape_of(source, tmp_path), tmp_path / "saved", optimizer=make)

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1, first=7)
        engine.load_checkpoint(tmp_path / "saved")
        found = state_of(engine, everywhere=False)
        if comm.rank == 0:
            assert_same(states, found)

    on(shape_of(target, tmp_path), body, optimizer=make)


@pytest.mark.parametrize(
    ("optimizer", "shape"), [("adafactor", "2x3"), ("muon", "host"), ("lamb", "2x0"), ("rows", "host")]
)
def test_training_goes_on_to_the_bit(tmp_path: Path, optimizer: str, shape: str) -> None:
    """Resume from a checkpoint and from `optimizer.state_dict()` alike."""
    low = {"bf16": {"enabled": True}, "wherry": {"master": "whole"}}

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path)
        weights, states = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))
        train(engine, comm, 1, first=2)
        expected = state_of(engine)
        train(engine, comm, 1, first=5)
        engine.load_checkpoint(tmp_path)
        train(engine, comm, 1, first=2)
        assert_same(state_of(engine), expected)
        train(engine, comm, 1, first=5)
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(states)
        train(engine, comm, 1, first=2)
        assert_same(state_of(engine), expected)

    on(shape_of(shape, tmp_path, **low), body, optimizer=OPTIMIZERS[optimizer])


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A state with a shape of its own is one whole slice, which another optimizer refuses; replicas divide them."""
    save_from(Shape(4, 0), tmp_path, steps=1, optimizer=adafactor)
    slices = list(read_manifest(find(tmp_path)).slices())
    assert len({piece.file for _, _, piece in slices if piece.own}) > 1
    error = (
        r"its optimizer is Adafactor with col_var of shape \(1, 16\), row_var of shape \(29, 1\), the engine's is Muon "
        "with exp_avg, exp_avg_sq; load_optimizer_states=False loads the weights alone"
    )
    with pytest.raises(CheckpointError, match=error):
        load_into(Shape(2, 1), tmp_path, optimizer=muon)


def tiled(out: int) -> torch.nn.Module:
    model: Any = copy.deepcopy(MODEL)
    for block in model.blocks:
        block.up = TiledLinear.from_linear(block.up, in_splits=2, out_splits=out)
    return model


def test_tiles_are_parameters_of_their_own(tmp_path: Path) -> None:
    """Each tile has its states, and no other tiling loads them."""
    model = tiled(3)
    states = save_from(Shape(2, 3), tmp_path, model=model, optimizer=adafactor)
    assert_same(load_into(Shape(3, 1), tmp_path, model=model, optimizer=adafactor), states)
    for other in (MODEL, tiled(2)):
        with pytest.raises(CheckpointError, match=r"up\.weight: .* of other parts of it: it was tiled otherwise"):
            load_into(Shape(1, 3), tmp_path, model=other, optimizer=adafactor)


@pytest.mark.parametrize("shape", ["2x3", "host"])
def test_states_by_name(tmp_path: Path, shape: str) -> None:
    """`full` gives each state whole, in its shape, on every rank; `local` on the rank that owns the parameter."""

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1)
        states, name = engine.states, "blocks.0.up.weight"
        row = states.full(name, "row_var")
        assert row.shape == (32, 1) and bool(row.any())
        local, (start, stop) = states.local(name, "row_var"), states.local_range(name)
        assert torch.equal(local, row) if stop > start else local.numel() == 0
        assert stop - start in (0, 512)
        states.set_full(name, "row_var", row + 1)
        assert torch.equal(states.full(name, "row_var"), row + 1)
        states.set_local(name, "row_var", local * 2)
        assert torch.equal(states.full(name, "row_var"), row * 2)
        states.set_full(name, "master", torch.ones(32, 16))
        assert torch.equal(states.full(name, "master"), torch.ones(32, 16))
        with pytest.raises(WherryError, match=r"expected row_var of shape \(32, 1\), got \(1, 32\)"):
            states.set_full(name, "row_var", row.view(1, 32))
        if stop > start:
            with pytest.raises(WherryError, match=r"expected row_var of shape \(32, 1\), got \(32,\)"):
                states.set_local(name, "row_var", row.view(-1))
        with pytest.raises(WherryError, match="keeps no 'exp_avg' for it; it keeps col_var, master, row_var"):
            states.full(name, "exp_avg")
        assert states.full("blocks.0.up.bias", "variance").shape == (32,)

    on(shape_of(shape, tmp_path), body, optimizer=adafactor)


def test_rows_as_long_as_their_matrix(tmp_path: Path) -> None:
    """A state of a matrix of one column has as many elements as the matrix."""
    model: Any = copy.deepcopy(MODEL)
    model.blocks[0].up, model.blocks[0].down = torch.nn.Linear(16, 1), torch.nn.Linear(1, 16)
    shape = Shape(2, 3, more=VOUCHED)
    states = save_from(shape, tmp_path, model=model, optimizer=OPTIMIZERS["rows"])
    assert_same(load_into(shape, tmp_path, model=model, optimizer=OPTIMIZERS["rows"]), states)
