"""A checkpoint loads into any other layout, bit for bit: of ranks, stages, tiers, units, ties and tiles.

The states of optimizers that update whole parameters are of any shape, in checkpoints and by name.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import BF16, MODEL, Shape, assert_same, load_into, on, save_from, state_of, train
from tests.covering import Case, name_of, pairs
from tests.engine.harness import VOCABULARY, WIDTH, TinyLM, adamw, engine_of, make_model, settings
from tests.engine.test_whole_optimizers import OPTIMIZERS, VOUCHED, muon
from tests.parallel.handmade import Model
from tests.tiers.rows import zero_block
from torch import nn

import wherry
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import find
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed.export import load_state_dict_from_zero_checkpoint
from wherry.errors import WherryError
from wherry.nn import TiledLinear
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing import run_grid

TIERS = ("none", "cpu", "nvme")
CASES = pairs(ranks=(1, 3), to_ranks=(2, 3), stage=(1, 3), to_stage=(0, 3), tier=TIERS, to_tier=TIERS)


def placed(ranks: int, stage: int, states: str, parameters: str = "none", **more: Any) -> Shape:
    """Lay out an engine with states and parameters on tiers, of which a disk is the current folder."""
    return Shape(ranks, stage, more={**more, "zero_optimization": zero_block(stage, states, parameters, Path("."))})


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ranks_stages_and_tiers(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def of(ranks: int, stage: int, tier: str) -> Shape:
        # Split masters round otherwise.
        return placed(ranks, stage, tier, tier if stage == 3 else "none", wherry={"master": "whole"}, **BF16)

    states = save_from(of(case["ranks"], case["stage"], case["tier"]), tmp_path / "saved")
    target = of(case["to_ranks"], case["to_stage"], case["to_tier"])
    assert_same(states, load_into(target, tmp_path / "saved"))


CUT: Any = make_model(lambda: Model(blocks=1))
OF_MODEL, OF_LAYERS = ({"wherry": {"unit_classes": names}} for names in (["TinyLM"], ["Linear", "LayerNorm"]))
HOST, DISK = placed(2, 2, "cpu", **VOUCHED), placed(2, 3, "nvme", "nvme", **VOUCHED)
GROUPS = Shape(4, 3, more={**VOUCHED, "zero_optimization": {"mics_shard_size": 2}})
adafactor, rows = OPTIMIZERS["adafactor"], OPTIMIZERS["rows"]


def tiled(out: int) -> torch.nn.Module:
    model: Any = copy.deepcopy(MODEL)
    for block in model.blocks:
        block.up = TiledLinear.from_linear(block.up, in_splits=2, out_splits=out)
    return model


def narrow() -> torch.nn.Module:
    """A matrix of one column, a state of which has as many elements as the matrix."""
    model: Any = copy.deepcopy(MODEL)
    model.blocks[0].up, model.blocks[0].down = nn.Linear(16, 1), nn.Linear(1, 16)
    return model


# Engines that save and load, their model and optimizer.
MOVES: dict[str, tuple[Shape, Shape, nn.Module, Any]] = {
    "other units cut the flats elsewhere": (Shape(3, 2, more=OF_MODEL), Shape(2, 3, more=OF_LAYERS), MODEL, adamw),
    "units of all": (Shape(3, 2, more=OF_MODEL), Shape(3, 2), MODEL, adamw),
    # Tensor-parallel ranks save what they cut as slices of whole tensors.
    "cut by 2 to whole": (Shape(2, 3, tensor=2), Shape(1, 0), CUT, adamw),
    "whole to cut by 2": (Shape(1, 0, more=BF16), Shape(2, 2, tensor=2, more=BF16), CUT, adamw),
    "cut by 4 to 2": (Shape(1, 2, tensor=4), Shape(2, 0, tensor=2), CUT, adamw),
    "whole to cut by 4": (Shape(2, 3), Shape(1, 1, tensor=4), CUT, adamw),
    # Whole parameters are updated, each on one rank.
    "disk to device": (DISK, Shape(4, 1, more=VOUCHED), MODEL, adafactor),
    "shards to whole": (Shape(2, 3, more=VOUCHED), Shape(2, 0, more=VOUCHED), MODEL, adafactor),
    "device to host": (Shape(4, 1, more=VOUCHED), HOST, MODEL, muon),
    "groups to disk": (GROUPS, DISK, MODEL, muon),
    "host to groups": (HOST, GROUPS, MODEL, rows),  # torch's own step cannot keep its state on disk
    "tiles with a state each": (Shape(2, 3), Shape(3, 1), tiled(3), adafactor),
    "rows as long as their matrix": (Shape(2, 3, more=VOUCHED), Shape(2, 3, more=VOUCHED), narrow(), rows),
}


@pytest.mark.parametrize("name", MOVES)
def test_any_layout_to_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Load into an engine that has trained otherwise."""
    monkeypatch.chdir(tmp_path)
    source, target, model, optimizer = MOVES[name]
    states = save_from(source, tmp_path / "saved", model=model, optimizer=optimizer)
    assert all(states[f"{each}:master"].numel() == weight.numel() for each, weight in model.named_parameters())

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1, first=7)
        engine.load_checkpoint(tmp_path / "saved")
        loaded = state_of(engine, everywhere=False)
        if comm.rank == 0:
            assert_same(states, loaded)

    on(target, body, model=model, optimizer=optimizer)


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


def test_states_of_tiles_load_into_no_other_tiling(tmp_path: Path) -> None:
    save_from(Shape(2, 3), tmp_path, model=tiled(3), optimizer=adafactor)
    for other in (MODEL, tiled(2)):
        with pytest.raises(CheckpointError, match=r"up\.weight: .* of other parts of it: it was tiled otherwise"):
            load_into(Shape(1, 3), tmp_path, model=other, optimizer=adafactor)


def test_a_cut_along_an_unknown_dim_is_refused(tmp_path: Path) -> None:
    def rank(place: Topology) -> None:
        mine = copy.deepcopy(CUT)
        mine.cut(place.tensor, dim_is_known=False)
        engine_of(mine, settings(2), place).save_checkpoint(tmp_path)

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


@pytest.mark.parametrize("shape", [Shape(2, 3, more=VOUCHED), HOST], ids=["device", "host"])
def test_states_by_name(shape: Shape) -> None:
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

    on(shape, body, optimizer=adafactor)
