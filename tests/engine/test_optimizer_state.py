"""`optimizer.state_dict()` of an engine: saved and loaded by a script as torch's, with nothing lost."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.absent import OPTIMIZERS
from tests.engine.harness import make_model, settings, token_batch, train_engine, train_plain

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

LOW = {"bf16": {"enabled": True}}
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def make_engine(name: str, stage: int, comm: Any = None, more: dict[str, Any] | None = None) -> Any:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    return wherry.initialize(model=model, optimizer=optimizer, config=settings(stage, more=more), mesh=comm)[0]


def steps(engine: Any, first: int, last: int, rank: int = 0) -> None:
    for step in range(first, last):
        engine.backward(engine(*token_batch(step, 0, rank)))
        engine.step()


@pytest.mark.parametrize("more", [{}, LOW, HOST, LOW | HOST | {"wherry": {"update_policy": "in_backward"}}], ids=str)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("name", ["adamw", "nadam", "sgd momentum"])
def test_a_script_that_saves_and_loads_it_goes_on_to_the_bit(
    name: str, stage: int, ranks: int, more: dict[str, Any]
) -> None:
    def body(comm: Comm) -> None:
        engine = make_engine(name, stage, comm, more)
        steps(engine, 0, 3, comm.rank)
        file = io.BytesIO()
        saved = {"model": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict()}
        torch.save(saved, file)
        steps(engine, 3, 6, comm.rank)
        file.seek(0)
        again = make_engine(name, stage, comm, more)
        steps(again, 7, 9, comm.rank)  # what is there before is replaced
        loaded = torch.load(file, weights_only=True)
        again.module.load_state_dict(loaded["model"])
        again.optimizer.load_state_dict(loaded["optimizer"])
        steps(again, 3, 6, comm.rank)
        for key, _ in engine.module.named_parameters():
            assert torch.equal(engine.states.full(key, "master"), again.states.full(key, "master")), key
        engine.close()
        again.close()

    run_ranks(ranks, body)


@pytest.mark.parametrize("name", ["adamw", "adamw amsgrad", "rmsprop", "nadam"])
def test_it_is_what_torch_has_and_torch_takes_it(name: str) -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    theirs = OPTIMIZERS[name](plain.parameters())
    engine = make_engine(name, 0)
    for step in range(3):
        theirs.zero_grad()
        plain(*token_batch(step, 0, 0)).backward()
        theirs.step()
    steps(engine, 0, 3)
    ours, expected = engine.optimizer.state_dict(), theirs.state_dict()
    assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert ours["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for kind, value in state.items():
            torch.testing.assert_close(ours["state"][number][kind], value, rtol=0, atol=1e-5)
    OPTIMIZERS[name](plain.parameters()).load_state_dict(ours)


@pytest.mark.parametrize("name", ["adamw", "sgd momentum"])
def test_torchs_state_of_one_process_goes_on_in_an_engine(name: str) -> None:
    """That of SGD has momentum and counts no steps."""
    model = make_model()
    whole = train_plain(model, steps=6, optimizer=OPTIMIZERS[name])
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(*token_batch(step, 0, 0)).backward()
        optimizer.step()
    engine = make_engine(name, 3)
    engine.module.load_state_dict(model.state_dict())
    engine.optimizer.load_state_dict(optimizer.state_dict())
    steps(engine, 3, 6)
    for key, value in whole.weights.items():
        torch.testing.assert_close(engine.states.full(key, "master"), value, rtol=0, atol=1e-6)


def test_a_kind_that_is_not_kept_is_an_error_on_all_ranks_alike() -> None:
    """Also on those that have no part of the parameter: they would wait for it."""

    def body(comm: Comm) -> None:
        engine = make_engine("adamw", 3, comm)
        name, parameter = next((n, p) for n, p in engine.module.named_parameters() if n.endswith("norm.weight"))
        with pytest.raises(WherryError, match=r"keeps no 'exp_avgs' for it; it keeps exp_avg, exp_avg_sq, master"):
            engine.states.full(name, "exp_avgs")
        with pytest.raises(WherryError, match="keeps no 'exp_avgs' for it"):
            engine.states.set_full(name, "exp_avgs", torch.ones(parameter.shape))
        engine.close()

    run_ranks(2, body)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    alone = make_engine("adamw", 0)
    steps(alone, 0, 1)
    state = alone.optimizer.state_dict()

    def body(comm: Comm) -> None:
        engine = make_engine("adamw", 3, comm)
        steps(engine, 0, 2, comm.rank)
        before = engine.optimizer.state_dict()
        with pytest.raises(WherryError, match=r"rank 0: .*this rank has of it, got .*save_checkpoint\(folder\)"):
            engine.optimizer.load_state_dict(state)
        after = engine.optimizer.state_dict()
        for number, values in before["state"].items():
            assert all(torch.equal(after["state"][number][kind], value) for kind, value in values.items())

    run_ranks(2, body)


def test_state_on_disk_and_in_8_bits_is_refused_with_what_to_do(tmp_path: Path) -> None:
    disk = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with pytest.raises(WherryError, match=r"rests on disk.*save_checkpoint\(folder\)"):
        make_engine("adamw", 3, more=disk).optimizer.state_dict()
    small = HOST | {"wherry": {"state_dtype": "int8"}}
    with pytest.raises(WherryError, match=r"8-bit blocks.*save_checkpoint\(folder\)"):
        make_engine("adamw", 3, more=small).optimizer.state_dict()


@pytest.mark.parametrize("module_only", [False, True])
def test_counts_stay_a_checkpoints_without_its_states(tmp_path: Path, module_only: bool) -> None:
    train_engine(make_model(), stage=3, steps=4, finish=lambda engine: engine.save_checkpoint(tmp_path))
    engine = make_engine("adamw", 3)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_module_only=module_only)
    counts = engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps
    assert counts == ((0, 0, 0, 0) if module_only else (4, 8, 4, 0))
    # The optimizer has none of the checkpoint's: it begins anew.
    assert all(float(state["step"]) == 0 for state in engine.optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_of_the_optimizer_have_no_state(stage: int) -> None:
    model = make_model()
    model.norm.weight.requires_grad_(False)
    place = [name for name, _ in model.named_parameters()].index("norm.weight")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    engine = wherry.initialize(model=model, optimizer=optimizer, config=settings(stage))[0]
    steps(engine, 0, 2)
    saved = engine.optimizer.state_dict()
    assert set(saved["param_groups"][0]["params"]) - set(saved["state"]) == {place}
    engine.optimizer.load_state_dict(copy.deepcopy(saved))
    again = engine.optimizer.state_dict()["state"]
    assert all(torch.equal(again[n][kind], value) for n, part in saved["state"].items() for kind, value in part.items())
    engine.close()


def test_state_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("adamw", 0)
    steps(engine, 0, 1)
    engine.optimizer.load_state_dict({"state": {}, "param_groups": engine.optimizer.state_dict()["param_groups"]})
    assert "it holds no state: moments and step counts begin anew" in caplog.text
    assert all(float(state["step"]) == 0 for state in engine.optimizer.state_dict()["state"].values())


def test_state_of_another_optimizer_or_other_parameters_is_refused() -> None:
    engine, other = make_engine("adamw", 0), make_engine("sgd momentum", 0)
    steps(other, 0, 1)
    state = other.optimizer.state_dict()
    with pytest.raises(WherryError, match=r"expected exp_avg, exp_avg_sq, got momentum_buffer, step"):
        engine.optimizer.load_state_dict(state)
    with pytest.raises(WherryError, match=r"state for parameter 99, and the groups have \d+ parameters"):
        engine.optimizer.load_state_dict({"state": {99: {}}, "param_groups": state["param_groups"]})
    with pytest.raises(WherryError, match=r"0 parameter groups were given, expected 1"):
        engine.optimizer.load_state_dict({"state": {}})
    steps(engine, 0, 1)
    before = engine.optimizer.state_dict()
    for kind, told in (
        ("exp_avg", "expected exp_avg to be a tensor, got list"),
        ("step", "expected a number of steps"),
    ):
        state = copy.deepcopy(before)
        state["state"][1][kind] = ["x"]
        with pytest.raises(WherryError, match=told):
            engine.optimizer.load_state_dict(state)
        assert torch.equal(engine.optimizer.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
