"""States of optimizers that update whole parameters, of any shape, in checkpoints and by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import (
    MODEL,
    Gate,
    Shape,
    assert_same,
    async_engine,
    forged,
    load_into,
    on,
    save_from,
    state_of,
    train,
)
from tests.engine.harness import adamw, token_batch
from tests.engine.test_whole_optimizers import OPTIMIZERS as KNOWN
from tests.engine.test_whole_optimizers import VOUCHED, muon

from wherry.checkpoint import staging
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import find
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed.universal import convert
from wherry.errors import WherryError
from wherry.nn import TiledLinear
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


class VouchedAdamW(torch.optim.AdamW):
    """An optimizer that Wherry does not know to be element-wise."""


class History(torch.optim.Optimizer):
    """An optimizer whose only tensor state is a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), lasts=[], first=None)
            state["step"] += 1
            state["lasts"] = [p.grad.clone(), *state["lasts"][:1]]
            p.sub_(sum(state["lasts"]), alpha=1e-2 / float(state["step"]))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {**KNOWN, "muon": muon, "history": History}
adafactor = OPTIMIZERS["adafactor"]
HOST, NVME = {"device": "cpu"}, {"device": "nvme"}
SHAPES = {
    "1x0": Shape(1, 0),
    "2x0": Shape(2, 0),
    "2x3": Shape(2, 3),
    "4x1": Shape(4, 1),
    "groups": Shape(4, 3, more={"zero_optimization": {"mics_shard_size": 2}}),
    "host": Shape(2, 2, more={"zero_optimization": {"offload_optimizer": HOST}}),
    "disk": Shape(2, 3, more={"zero_optimization": {"offload_optimizer": NVME, "offload_param": NVME}}),
}


def shape_of(name: str, folder: Path, **more: Any) -> Shape:
    shape = SHAPES[name]
    zero = {
        key: {**value, "nvme_path": str(folder)} if value == NVME else value
        for key, value in shape.more.get("zero_optimization", {}).items()
    }
    return Shape(shape.ranks, shape.stage, more={**VOUCHED, **more, "zero_optimization": zero})


@pytest.mark.parametrize(
    ("optimizer", "source", "target"),
    [
        ("adafactor", "1x0", "disk"),
        ("adafactor", "disk", "4x1"),
        ("adafactor", "2x3", "2x0"),
        ("muon", "disk", "1x0"),
        ("muon", "4x1", "host"),
        ("muon", "groups", "disk"),
        ("rows", "host", "groups"),  # torch's own step cannot keep its state on disk
        ("rows", "2x0", "2x3"),
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
    ("optimizer", "shape"),
    [("adafactor", "2x3"), ("muon", "host"), ("muon", "2x3"), ("lamb", "2x0"), ("rows", "host"), ("history", "2x3")],
)
def test_training_goes_on_to_the_bit(tmp_path: Path, optimizer: str, shape: str) -> None:
    """Resume from a checkpoint and from `optimizer.state_dict()` alike."""
    make, low = OPTIMIZERS[optimizer], {"bf16": {"enabled": True}, "wherry": {"master": "whole"}}

    def begin(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path)
        mine = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))
        train(engine, comm, 1, first=2)
        return mine, state_of(engine, everywhere=False)

    def resume(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        train(engine, comm, 1, first=2)
        return state_of(engine, everywhere=False)

    def resume_from_state_dicts(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 1, first=5)
        weights, part = parts[comm.rank]
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(part)
        train(engine, comm, 1, first=2)
        return state_of(engine, everywhere=False)

    where = shape_of(shape, tmp_path, **low)
    begun = on(where, begin, optimizer=make)
    parts = [mine for mine, _ in begun]
    assert_same(on(where, resume, optimizer=make)[0], begun[0][1])
    assert_same(on(where, resume_from_state_dicts, optimizer=make)[0], begun[0][1])


def test_element_states_load_into_layouts_that_cut_parameters_and_that_do_not(tmp_path: Path) -> None:
    def vouched(parameters: Any) -> torch.optim.Optimizer:
        return VouchedAdamW(parameters, lr=3e-3, weight_decay=0.1)

    for one, other, shape in ((adamw, vouched, Shape(2, 2, more=VOUCHED)), (vouched, adamw, Shape(3, 3, more=VOUCHED))):
        folder = tmp_path / one.__name__
        states = save_from(Shape(4, 3, more=VOUCHED), folder, optimizer=one)
        assert_same(load_into(shape, folder, optimizer=other), states)


def test_shapes_in_the_manifest(tmp_path: Path) -> None:
    """A state with a shape of its own is one whole slice; replicas divide the slices; other optimizers have none."""
    save_from(Shape(4, 0), tmp_path, optimizer=adafactor)
    manifest = read_manifest(find(tmp_path))
    for name, entry in manifest.parameters():
        if len(entry.shape) == 1:
            assert entry.moments == ["variance"]
            continue
        assert entry.moments == ["col_var", "row_var"]
        [row], [column] = entry.states["row_var"], entry.states["col_var"]
        assert (row.own, column.own) == ((entry.shape[0], 1), (1, entry.shape[1])), name
    assert len({piece.file for _, _, piece in manifest.slices() if piece.own}) > 1
    with CheckpointReader(find(tmp_path)) as reader:
        assert reader.tensor("blocks.1.up.weight", "row_var").shape == (32, 1)
    save_from(Shape(1, 3), tmp_path / "plain")
    assert '"own"' not in (find(tmp_path / "plain") / "manifest.json").read_text()


def test_another_optimizers_states_are_refused(tmp_path: Path) -> None:
    for name in ("adafactor", "muon"):
        save_from(Shape(2, 3), tmp_path / name, steps=1, optimizer=OPTIMIZERS[name])

    def error_of(folder: str, optimizer: Any) -> str:
        def body(engine: Any, comm: Comm) -> str:
            train(engine, comm, 1)
            before = state_of(engine)
            with pytest.raises(CheckpointError) as error:
                engine.load_checkpoint(tmp_path / folder)
            assert_same(state_of(engine), before)
            engine.load_checkpoint(tmp_path / folder, load_optimizer_states=False)
            return str(error.value)

        return str(on(Shape(2, 1), body, optimizer=optimizer)[0])

    hint = "; load_optimizer_states=False loads the weights alone"
    assert (
        "its optimizer is Adafactor with col_var of shape (1, 16), row_var of shape (29, 1), the engine's is Muon with "
        f"exp_avg, exp_avg_sq{hint}"
    ) in error_of("adafactor", muon)
    assert "its optimizer is Muon with exp_avg, exp_avg_sq, the engine's is Adafactor with" in error_of(
        "muon", adafactor
    )


LIES: list[tuple[str, dict[str, Any], str]] = [
    ("row_var", {"own": [8, 4]}, r"row_var of shape \(8, 4\), the engine's .*row_var of shape \(32, 1\)"),
    ("row_var", {"own": [33, 1]}, r"has 32 elements, expected 33"),
    ("row_var", {"own": []}, r"row_var: it cannot have a shape of its own, \[\]"),
    ("row_var", {"own": [-1]}, "own"),
    ("row_var", {"own": None}, "32 elements, expected 512"),
    ("row_var", {"own": [32], "stop": 32}, r"it cannot have a shape of its own, \[32\]"),
    ("row_var", {"own": [32], "addend": 0}, "it cannot have a shape of its own"),
    ("weight", {"own": [512]}, r"weight: it cannot have a shape of its own, \[512\]"),
]


def test_a_manifest_with_a_false_shape_changes_nothing(tmp_path: Path) -> None:
    save_from(Shape(2, 3), tmp_path, steps=1, optimizer=adafactor)
    manifest = find(tmp_path) / "manifest.json"
    good = manifest.read_text()

    def body(engine: Any, comm: Comm) -> None:
        before = state_of(engine)
        for state, changed, error in LIES:

            def change(value: dict[str, Any], state: str = state, changed: dict[str, Any] = changed) -> None:
                value["entries"]["blocks.0.up.weight"]["states"][state][0].update(changed)

            manifest.write_text(good)
            forged(manifest, change)
            with pytest.raises(CheckpointError, match=error):
                engine.load_checkpoint(tmp_path)
        assert_same(state_of(engine), before)

    on(Shape(1, 2), body, optimizer=adafactor)


def tiled(out: int) -> torch.nn.Module:
    model: Any = copy.deepcopy(MODEL)
    for block in model.blocks:
        block.up = TiledLinear.from_linear(block.up, in_splits=2, out_splits=out)
    return model


@pytest.mark.parametrize("optimizer", ["adafactor", "rows"])
def test_tiles_are_parameters_of_their_own(tmp_path: Path, optimizer: str) -> None:
    """Each tile has its states, and no other tiling loads them."""
    make, model = OPTIMIZERS[optimizer], tiled(3)
    states = save_from(Shape(2, 3, more=VOUCHED), tmp_path, model=model, optimizer=make)
    assert_same(load_into(Shape(3, 1, more=VOUCHED), tmp_path, model=model, optimizer=make), states)
    for other in (MODEL, tiled(2)):
        with pytest.raises(CheckpointError, match=r"up\.weight: .* of other parts of it: it was tiled otherwise"):
            load_into(Shape(1, 3, more=VOUCHED), tmp_path, model=other, optimizer=make)


@pytest.mark.parametrize("optimizer", ["adafactor", "rows"])
def test_they_are_copied_behind_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """The states saved are those at the call; and the copies take no more memory than was asked for."""
    gate, make, wanted = Gate(monkeypatch), OPTIMIZERS[optimizer], {}

    def shortage(needs: list[Any]) -> None:
        wanted.update(enumerate(nbytes for nbytes, _ in needs))

    monkeypatch.setattr(staging, "_shortage", shortage)

    def body(comm: Comm) -> Any:
        engine, link = async_engine(comm, 0, VOUCHED, optimizer=make)
        train(engine, comm, 2)
        states, before = state_of(engine), link.bytes_down
        engine.save_checkpoint(tmp_path)
        assert 0 < link.bytes_down - before <= wanted[comm.rank]
        gate.open.set()
        train(engine, comm, 1, first=2)
        engine.wait_for_checkpoint()
        engine.close()
        return states

    states = run_ranks(2, body)[0]
    assert_same(load_into(Shape(1, 0, more=VOUCHED), tmp_path, optimizer=make), states)


@pytest.mark.parametrize("shape", ["1x0", "2x3", "host"])
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
        with pytest.raises(WherryError, match=r"expected master of shape \(32, 16\), got \(512,\)"):
            states.set_full(name, "master", torch.ones(512))
        if stop > start:
            with pytest.raises(WherryError, match=r"expected row_var of shape \(32, 1\), got \(32,\)"):
                states.set_local(name, "row_var", row.view(-1))
        with pytest.raises(WherryError, match="keeps no 'exp_avg' for it; it keeps col_var, master, row_var"):
            states.full(name, "exp_avg")
        assert states.full("blocks.0.up.bias", "variance").shape == (32,)

    on(shape_of(shape, tmp_path), body, optimizer=adafactor)


def test_a_state_dict_is_torchs_and_another_shape_in_one_is_refused() -> None:
    plain = copy.deepcopy(MODEL)
    theirs = adafactor(plain.parameters())
    plain(*token_batch(0, 0, 0)).backward()
    theirs.step()

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1)
        ours = engine.optimizer.state_dict()
        for number, state in theirs.state_dict()["state"].items():
            assert ours["state"][number].keys() == state.keys()
            for kind, value in state.items():
                torch.testing.assert_close(ours["state"][number][kind], value, rtol=0, atol=1e-5)
        number = next(n for n, state in ours["state"].items() if "row_var" in state)
        row = ours["state"][number]["row_var"]
        ours["state"][number]["row_var"] = row.view(1, -1)
        error = rf"expected row_var of shape \({row.numel()}, 1\), got \(1, {row.numel()}\)"
        with pytest.raises(WherryError, match=error):
            engine.optimizer.load_state_dict(ours)

    on(Shape(1, 0), body, optimizer=adafactor)


def test_states_in_a_universal_checkpoint(tmp_path: Path) -> None:
    save_from(Shape(2, 1), tmp_path / "ours", optimizer=adafactor)
    convert(find(tmp_path / "ours"), tmp_path / "theirs" / "universal")
    folder = tmp_path / "theirs" / "universal" / "zero"
    files = {path.stem: path for path in (folder / "blocks.0.up.weight").iterdir()}
    assert files.keys() == {"fp32", "row_var", "col_var", "step"}
    with CheckpointReader(find(tmp_path / "ours")) as reader:
        row = torch.load(files["row_var"])["param"]
        assert torch.equal(row, reader.tensor("blocks.0.up.weight", "row_var")) and row.shape == (32, 1)
    assert {path.stem for path in (folder / "blocks.0.up.bias").iterdir()} == {"fp32", "variance", "step"}


@pytest.mark.long
def test_rows_and_columns_as_long_as_their_matrix(tmp_path: Path) -> None:
    """A factor of a matrix of one row or column has as many elements as the matrix, and one dim less."""
    from transformers.optimization import Adafactor

    def theirs(parameters: Any) -> torch.optim.Optimizer:
        return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=False)

    model: Any = copy.deepcopy(MODEL)
    model.blocks[0].up, model.blocks[0].down = torch.nn.Linear(16, 1), torch.nn.Linear(1, 16)
    shape = Shape(2, 3, more=VOUCHED)
    states = save_from(shape, tmp_path, model=model, optimizer=theirs)
    assert_same(load_into(shape, tmp_path, model=model, optimizer=theirs), states)
