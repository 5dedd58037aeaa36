"""A tiled layer is saved as the layer that it is: what was saved with tiles loads without, and the other way round."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import MODEL, Shape, on, train

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
    wherry.tile(model, max_bytes=700)
    assert any("tiles.1" in name for name, _ in model.named_parameters())
    return model


def both_ways() -> torch.nn.Module:
    model: Any = copy.deepcopy(MODEL)
    for block in model.blocks:
        block.up = TiledLinear.from_linear(block.up, in_splits=3, out_splits=5)
        block.down = TiledLinear.from_linear(block.down, in_splits=2)
    return model


MODELS = {"whole": MODEL, "rows": in_rows(), "both": both_ways()}


def states(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by logical name."""
    with CheckpointReader(find(folder)) as source:
        entries = source.manifest.entries.items()
        return {f"{name}:{state}": source.tensor(name, state) for name, entry in entries for state in entry.states}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("source", MODELS)
def test_any_tiling_to_any(tmp_path: Path, source: str, more: dict[str, Any]) -> None:
    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path / "first")

    on(Shape(2, 3, more=more), body, model=MODELS[source])
    saved = states(tmp_path / "first")
    manifest = read_manifest(find(tmp_path / "first"))
    plain = dict(MODEL.named_parameters())
    assert list(manifest.entries) == list(plain)
    assert all(entry.shape == plain[name].shape for name, entry in manifest.entries.items())
    for target, shape in (
        ("whole", Shape(1, 0, more=more)),
        ("rows", Shape(3, 3, more=more)),
        ("both", Shape(2, 1, more=more)),
    ):
        again = tmp_path / target

        def load(engine: Any, comm: Comm, again: Path = again) -> None:
            engine.load_checkpoint(tmp_path / "first")
            engine.save_checkpoint(again)

        on(shape, load, model=MODELS[target])
        assert_same(states(again), saved)


def test_into_a_tiled_model_without_an_engine(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 1)
        engine.save_checkpoint(tmp_path)
        return engine.consolidated_state_dict()

    weights = on(Shape(2, 2), body)[0]
    model = load_state_dict_from_zero_checkpoint(copy.deepcopy(MODELS["both"]), tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_tiles_that_are_frozen_in_part_have_no_place(tmp_path: Path) -> None:
    model = copy.deepcopy(MODELS["rows"])
    model.blocks[0].up.tiles[0].weight.requires_grad_(False)

    def body(engine: Any, comm: Comm) -> None:
        engine.save_checkpoint(tmp_path)

    with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight: some of its tiles are frozen"):
        on(Shape(2, 3), body, model=model)
    assert not list(tmp_path.iterdir())
