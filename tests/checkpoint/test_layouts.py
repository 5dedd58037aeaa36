"""A checkpoint loads into any other layout, bit for bit: of ranks, stages, tiers, units, ties and tiles."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import BF16, MODEL, Shape, assert_same, load_into, on, save_from
from tests.covering import Case, name_of, pairs
from tests.engine.harness import VOCABULARY, WIDTH, TinyLM, adamw, make_model, settings
from tests.parallel.handmade import Model
from tests.tiers.rows import zero_block
from torch import nn

import wherry
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import find
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed.export import load_state_dict_from_zero_checkpoint
from wherry.nn import TiledLinear
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing import run_grid

TIERS = ("none", "cpu", "nvme")
CASES = pairs(ranks=(1, 3), to_ranks=(2, 3), stage=(1, 3), to_stage=(0, 3), tier=TIERS, to_tier=TIERS)


def placed(ranks: int, stage: int, tier: str, folder: Path) -> Shape:
    """Lay out an engine with all states on a tier, and with whole masters, as split ones round otherwise."""
    zero = zero_block(stage, tier, tier if stage == 3 else "none", folder)
    more: dict[str, Any] = {"zero_optimization": zero, "wherry": {"master": "whole"}, "bf16": {"enabled": True}}
    return Shape(ranks, stage, more=more)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ranks_stages_and_tiers(case: Case, tmp_path: Path) -> None:
    states = save_from(placed(case["ranks"], case["stage"], case["tier"], tmp_path), tmp_path / "saved")
    target = placed(case["to_ranks"], case["to_stage"], case["to_tier"], tmp_path)
    assert_same(states, load_into(target, tmp_path / "saved"))


def test_units_of_other_modules_cut_the_flats_elsewhere(tmp_path: Path) -> None:
    states = save_from(Shape(3, 2, more={"wherry": {"unit_classes": ["TinyLM"]}}), tmp_path)
    linear = {"wherry": {"unit_classes": ["Linear", "LayerNorm"]}}
    for other in (Shape(2, 3, more=linear), Shape(3, 2)):
        assert_same(states, load_into(other, tmp_path))


# Tensor-parallel ranks save what they cut as slices of whole tensors.

CUT: Any = make_model(lambda: Model(blocks=1))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Shape(2, 3, tensor=2), Shape(1, 0)),
        (Shape(1, 0, more=BF16), Shape(2, 2, tensor=2, more=BF16)),
        (Shape(1, 2, tensor=4), Shape(2, 0, tensor=2)),
        (Shape(2, 3), Shape(1, 1, tensor=4)),
    ],
    ids=str,
)
def test_tensor_parallel_ranks(tmp_path: Path, source: Shape, target: Shape) -> None:
    states = save_from(source, tmp_path, model=CUT)
    assert states["blocks.0.up.weight:master"].shape == (64 * 16,)
    assert_same(states, load_into(target, tmp_path, model=CUT))


def test_a_cut_along_an_unknown_dim_is_refused(tmp_path: Path) -> None:
    def rank(place: Topology) -> None:
        mine = copy.deepcopy(CUT)
        mine.cut(place.tensor, dim_is_known=False)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), mesh=place, config=settings(2))
        engine.save_checkpoint(tmp_path)

    with pytest.raises(CheckpointError, match=r"up\.weight: it is marked as cut.*set its attribute `partition_dim`"):
        run_grid(rank, data=1, tensor=2)
    assert not list(tmp_path.iterdir())


# Weights that are tied in the run that saves, or in the run that loads, or in both by other names.


class Untied(TinyLM):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class HeadFirst(TinyLM):
    """Load a tied weight under the name of the head, the first module that holds it."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        modules = dict(self.named_children())
        for name in modules:
            delattr(self, name)
        for name in ("head", "blocks", "norm", "embed"):
            self.add_module(name, modules[name])


UNTIED, HEAD_FIRST = make_model(Untied), make_model(HeadFirst)


def test_a_tied_weight_loads_into_two_and_into_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save_from(Shape(2, 2), tmp_path, steps=1)
    loaded = load_into(Shape(3, 3), tmp_path, model=HEAD_FIRST)
    assert_same({name.replace("head.", "embed."): value for name, value in loaded.items()}, states)
    assert "tied" not in caplog.text
    for name, value in load_into(Shape(3, 3), tmp_path, model=UNTIED).items():
        assert torch.equal(value, states[name.replace("head.weight", "embed.weight")]), name
    warning = "embed.weight and head.weight were one tensor there and are not tied here: each begins with its values"
    assert len([text for text in caplog.messages if warning in text]) == 1


def test_two_weights_do_not_load_into_a_tied_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save_from(Shape(2, 2), tmp_path, steps=1, model=UNTIED)
    message = "it has head.weight (which is embed.weight here), which the model has not"
    with pytest.raises(CheckpointError) as error:
        load_into(Shape(2, 3), tmp_path, model=MODEL)
    assert f"{message}; load_module_strict=False" in str(error.value)
    for name, value in load_into(Shape(3, 3), tmp_path, model=MODEL, load_module_strict=False).items():
        assert torch.equal(value, states[name]), name
    assert message in caplog.text


# A tiled layer is saved as the whole layer, so that it loads with other tiles and without.


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
    first, again = tmp_path / "first", tmp_path / "again"
    save_from(Shape(2, 3, more=shape.more), first, steps=1, model=MODELS[source])
    saved = states(first)
    plain = dict(MODEL.named_parameters())
    entries = read_manifest(find(first)).entries
    assert {name: entry.shape for name, entry in entries.items()} == {name: p.shape for name, p in plain.items()}

    def pass_on(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(first)
        engine.save_checkpoint(again)

    on(shape, pass_on, model=MODELS[target])
    assert_same(states(again), saved)
    model = load_state_dict_from_zero_checkpoint(copy.deepcopy(MODELS[target]), first)
    whole = load_state_dict_from_zero_checkpoint(copy.deepcopy(MODEL), first)
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_tiles_that_are_frozen_in_part_are_refused(tmp_path: Path) -> None:
    model: Any = copy.deepcopy(MODELS["rows"])
    model.blocks[0].up.tiles[0].weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight: some of its tiles are frozen"):
        save_from(Shape(2, 3), tmp_path, steps=0, model=model)
    assert not list(tmp_path.iterdir())
