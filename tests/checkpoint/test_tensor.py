"""Tensor-parallel ranks save what they have cut as slices of whole tensors: it loads on any number of either kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import assert_same, state_of, train
from tests.engine.harness import adamw, make_model, settings
from tests.parallel.handmade import Model

import wherry
from wherry.checkpoint.errors import CheckpointError
from wherry.parallel.topology import Topology
from wherry.testing import run_grid

MODEL = make_model(Model)
# Data and tensor ranks, and the stage.
Grid = tuple[int, int, int]
GRIDS: list[Grid] = [(1, 1, 0), (2, 1, 3), (1, 2, 2), (2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3), (1, 4, 3)]
BF16 = {"bf16": {"enabled": True}}


def on(grid: Grid, body: Any, more: Any = None) -> list[Any]:
    """Run `body(engine, place)` on every rank of a grid; the model is cut where there are tensor ranks."""
    data, tensor, stage = grid

    def rank(place: Topology) -> Any:
        mine: Any = copy.deepcopy(MODEL)
        if tensor > 1:
            mine.cut(place.tensor)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), mesh=place, config=settings(stage, 1, more=more)
        )
        try:
            return body(engine, place)
        finally:
            engine.close()

    return run_grid(rank, data=data, tensor=tensor)


def trained(grid: Grid, folder: Path, more: Any = None) -> dict[str, torch.Tensor]:
    def body(engine: Any, place: Topology) -> dict[str, torch.Tensor]:
        train(engine, place.data, 2)
        engine.save_checkpoint(folder)
        return state_of(engine)

    return on(grid, body, more)[0]


def loaded(grid: Grid, folder: Path, again: Path | None = None, more: Any = None) -> dict[str, torch.Tensor]:
    """The states after a load; saved anew into `again`."""

    def body(engine: Any, place: Topology) -> dict[str, torch.Tensor]:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None and engine.global_steps == 2
        if again is not None:
            engine.save_checkpoint(again)
        return state_of(engine)

    found = on(grid, body, more)
    for other in found[1:]:
        assert_same(found[0], other)
    return found[0]


@pytest.mark.parametrize(
    ("source", "more"), [*((grid, None) for grid in GRIDS), ((2, 2, 3), BF16), ((1, 1, 0), BF16)], ids=str
)
def test_every_grid_loads_every_other(tmp_path: Path, source: Grid, more: Any) -> None:
    states = trained(source, tmp_path, more)
    assert states["blocks.1.up.weight:master"].shape == (64 * 16,)
    for target in GRIDS:
        assert_same(states, loaded(target, tmp_path, more=more))


@pytest.mark.parametrize("stage", [0, 3])
def test_there_and_back_goes_on_as_if_nothing_had_been(tmp_path: Path, stage: int) -> None:
    """Four steps of 2 x 2 are two, a load on one rank, a save there, a load on 2 x 2, and two more."""
    grid = (2, 2, stage)

    def whole(engine: Any, place: Topology) -> Any:
        return train(engine, place.data, 4), state_of(engine)

    def go_on(engine: Any, place: Topology) -> Any:
        engine.load_checkpoint(tmp_path / "back")
        return train(engine, place.data, 2, first=2), state_of(engine)

    states = trained(grid, tmp_path / "there")
    assert_same(states, loaded((1, 1, 0), tmp_path / "there", tmp_path / "back"))
    expected, found = on(grid, whole)[0], on(grid, go_on)[0]
    assert found[0] == expected[0][2:]
    assert_same(found[1], expected[1])


def test_a_cut_along_an_unknown_dim_has_no_place(tmp_path: Path) -> None:
    def rank(place: Topology) -> None:
        mine: Any = copy.deepcopy(MODEL)
        mine.cut(place.tensor, dim_is_known=False)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), mesh=place, config=settings(2))
        engine.save_checkpoint(tmp_path)

    with pytest.raises(CheckpointError, match=r"up\.weight: it is marked as cut.*set its attribute `partition_dim`"):
        run_grid(rank, data=1, tensor=2)
    assert not list(tmp_path.iterdir())
