"""Checkpoints of tensor-parallel ranks, which save what they cut as slices of whole tensors, load on any mesh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.harness import BF16, Shape, assert_same, load_into, on, save_from, state_of, train
from tests.engine.harness import adamw, make_model, settings
from tests.parallel.handmade import Model

import wherry
from wherry.checkpoint.errors import CheckpointError
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing import run_grid


def one_block() -> Model:
    return Model(blocks=1)


MODEL: Any = make_model(one_block)


def grid(data: int, tensor: int, stage: int, more: Any = None) -> Shape:
    return Shape(data, stage, more=more or {}, tensor=tensor)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (grid(2, 2, 3), grid(1, 1, 0)),
        (grid(1, 1, 0, BF16), grid(2, 2, 2, BF16)),
        (grid(1, 4, 2), grid(2, 2, 0)),
        (grid(2, 1, 3), grid(1, 4, 1)),
    ],
    ids=str,
)
def test_any_mesh_to_any(tmp_path: Path, source: Shape, target: Shape) -> None:
    states = save_from(source, tmp_path, model=MODEL)
    assert states["blocks.0.up.weight:master"].shape == (64 * 16,)
    assert_same(states, load_into(target, tmp_path, model=MODEL))


def test_training_through_another_mesh_is_exact(tmp_path: Path) -> None:
    """Three steps of 2 x 2 equal two, a load and a save on one rank, a load on 2 x 2, and one more."""

    def begin(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path / "there")
        return train(engine, comm, 1, first=2), state_of(engine, everywhere=False)

    def pass_on(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(tmp_path / "there")
        engine.save_checkpoint(tmp_path / "back")

    def resume(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path / "back")
        assert engine.global_steps == 2
        return train(engine, comm, 1, first=2), state_of(engine, everywhere=False)

    losses, states = on(grid(2, 2, 3), begin, model=MODEL)[0]
    on(grid(1, 1, 0), pass_on, model=MODEL)
    resumed = on(grid(2, 2, 3), resume, model=MODEL)[0]
    assert resumed[0] == losses
    assert_same(resumed[1], states)


def test_a_cut_along_an_unknown_dim_is_refused(tmp_path: Path) -> None:
    def rank(place: Topology) -> None:
        mine = copy.deepcopy(MODEL)
        mine.cut(place.tensor, dim_is_known=False)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), mesh=place, config=settings(2))
        engine.save_checkpoint(tmp_path)

    with pytest.raises(CheckpointError, match=r"up\.weight: it is marked as cut.*set its attribute `partition_dim`"):
        run_grid(rank, data=1, tensor=2)
    assert not list(tmp_path.iterdir())
