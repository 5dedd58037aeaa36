"""A tiled layer is saved as the whole layer, so that it loads with other tiles and without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import BF16, MODEL, Shape, assert_same, on, train

import wherry
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import find
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed.export import load_state_dict_from_zero_checkpoint
from wherry.nn import TiledLinear
from wherry.parallel.comm import Comm


def in_rows() -> torch.nn.Module:
    model = copy.deepcopy(MODEL)
    wherry.tile(model, max_bytes=1100)
    assert any("tiles.1" in name for name, _ in model.named_parameters())
    return model


def in_rows_and_columns() -> torch.nn.Module:
    model: Any = copy.deepcopy(MODEL)
    for block in model.blocks:
        block.up = TiledLinear.from_linear(block.up, in_splits=3, out_splits=2)
        block.down = TiledLinear.from_linear(block.down, in_splits=2)
    return model


MODELS = {"whole": MODEL, "rows": in_rows(), "both": in_rows_and_columns()}


def states(folder: Path) -> dict[str, torch.Tensor]:
    """Read all states of a checkpoint, by logical name."""
    with CheckpointReader(find(folder)) as source:
        entries = source.manifest.entries.items()
        return {f"{name}:{state}": source.tensor(name, state) for name, entry in entries for state in entry.states}


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        ("whole", "rows", Shape(3, 3)),
        ("rows", "both", Shape(2, 1, more=BF16)),
        ("both", "rows", Shape(2, 3, more=BF16)),
        ("both", "whole", Shape(1, 0)),
    ],
    ids=str,
)
def test_any_tiling_to_any(tmp_path: Path, source: str, target: str, shape: Shape) -> None:
    def begin(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1)
        engine.save_checkpoint(tmp_path / "first")

    on(Shape(2, 3, more=shape.more), begin, model=MODELS[source])
    saved = states(tmp_path / "first")
    manifest = read_manifest(find(tmp_path / "first"))
    plain = dict(MODEL.named_parameters())
    assert list(manifest.entries) == list(plain)
    assert all(entry.shape == plain[name].shape for name, entry in manifest.entries.items())

    def pass_on(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(tmp_path / "first")
        engine.save_checkpoint(tmp_path / "again")

    on(shape, pass_on, model=MODELS[target])
    assert_same(states(tmp_path / "again"), saved)


def test_into_a_tiled_model_without_an_engine(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 1)
        engine.save_checkpoint(tmp_path)
        return engine.consolidated_state_dict()

    weights = on(Shape(1, 2), body)[0]
    model = load_state_dict_from_zero_checkpoint(copy.deepcopy(MODELS["both"]), tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_tiles_that_are_frozen_in_part_are_refused(tmp_path: Path) -> None:
    model = copy.deepcopy(MODELS["rows"])
    model.blocks[0].up.tiles[0].weight.requires_grad_(False)

    def body(engine: Any, comm: Comm) -> None:
        engine.save_checkpoint(tmp_path)

    with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight: some of its tiles are frozen"):
        on(Shape(2, 3), body, model=model)
    assert not list(tmp_path.iterdir())
