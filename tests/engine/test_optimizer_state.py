"""`optimizer.state_dict()` of an engine: a script saves and loads it as torch's, and training goes on to the bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    VOCABULARY,
    WIDTH,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    masters_of,
    on_ranks,
    settings,
    train,
    train_engine,
    train_plain,
)
from tests.engine.test_absent import OPTIMIZERS

from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

LOW = {"bf16": {"enabled": True}}
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
IN_BACKWARD = LOW | HOST | {"wherry": {"update_policy": "in_backward"}}


def make_engine(name: str, stage: int, comm: Any = None, more: dict[str, Any] | None = None) -> Any:
    return engine_of(make_model(), settings(stage, more=more), comm, OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("name", "stage", "ranks", "more"),
    [
        ("adamw", 0, 1, {}),
        ("adamw", 3, 2, IN_BACKWARD),
        ("nadam", 3, 2, {}),
        ("sgd momentum", 1, 2, LOW),
    ],
)
def test_a_script_that_saves_and_loads_it_trains_on_to_the_bit(
    name: str, stage: int, ranks: int, more: dict[str, Any]
) -> None:
    def body(comm: Comm) -> None:
        engine = make_engine(name, stage, comm, more)
        train(engine, 2)
        file = io.BytesIO()
        torch.save({"model": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict()}, file)
        train(engine, 4, 2)
        file.seek(0)
        again = make_engine(name, stage, comm, more)
        train(again, 8, 7)  # the load replaces this state
        loaded = torch.load(file, weights_only=True)
        again.module.load_state_dict(loaded["model"])
        again.optimizer.load_state_dict(loaded["optimizer"])
        train(again, 4, 2)
        assert_same(masters_of(engine), masters_of(again))
        engine.close()
        again.close()

    run_ranks(ranks, body)


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "nadam"])
def test_it_is_torchs_and_torch_loads_it(name: str) -> None:
    plain = make_model()
    theirs = OPTIMIZERS[name](plain.parameters())
    engine = make_engine(name, 0)
    train_plain(plain, steps=2, optimizer=lambda _: theirs, in_place=True)
    train(engine, 2)
    ours, expected = engine.optimizer.state_dict(), theirs.state_dict()
    assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert ours["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert ours["state"][number].keys() == state.keys()
        assert_near(ours["state"][number], state)
    OPTIMIZERS[name](plain.parameters()).load_state_dict(ours)


@pytest.mark.parametrize("name", ["adamw", "sgd momentum"])
def test_torchs_state_of_one_process_is_loaded_by_an_engine(name: str) -> None:
    """Load AdamW's, and SGD's, which has momentum and no count of steps."""
    model = make_model()
    whole = train_plain(model, steps=4, optimizer=OPTIMIZERS[name])
    optimizer = OPTIMIZERS[name](model.parameters())
    train_plain(model, steps=2, optimizer=lambda _: optimizer, in_place=True)
    engine = make_engine(name, 3)
    engine.module.load_state_dict(model.state_dict())
    engine.optimizer.load_state_dict(optimizer.state_dict())
    train(engine, 4, 2)
    assert_near(masters_of(engine), whole.weights, 1e-6)


def test_an_unknown_kind_of_state_is_an_error_on_all_ranks() -> None:
    """Raise also on ranks without a part of the parameter, which would wait for the others."""

    def use(engine: Any) -> None:
        with pytest.raises(WherryError, match=r"keeps no 'exp_avgs' for it; it keeps exp_avg, exp_avg_sq, master"):
            engine.states.full("norm.weight", "exp_avgs")
        with pytest.raises(WherryError, match="keeps no 'exp_avgs' for it"):
            engine.states.set_full("norm.weight", "exp_avgs", torch.ones(WIDTH))

    on_ranks(use)


@pytest.mark.parametrize("module_only", [False, True])
def test_a_load_without_states_keeps_the_counts(tmp_path: Path, module_only: bool) -> None:
    train_engine(make_model(), stage=3, steps=4, finish=lambda engine: engine.save_checkpoint(tmp_path))
    engine = make_engine("adamw", 3)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_module_only=module_only)
    counts = engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps
    assert counts == ((0, 0, 0, 0) if module_only else (4, 8, 4, 0))
    # The optimizer loads nothing of the checkpoint.
    assert all(float(state["step"]) == 0 for state in engine.optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_of_the_optimizer_have_a_number_and_no_state(stage: int) -> None:
    model = make_model()
    model.norm.weight.requires_grad_(False)
    frozen = [name for name, _ in model.named_parameters()].index("norm.weight")
    engine = engine_of(model, settings(stage), optimizer=OPTIMIZERS["adamw"])
    train(engine, 1)
    saved = engine.optimizer.state_dict()
    assert set(saved["param_groups"][0]["params"]) - set(saved["state"]) == {frozen}
    engine.optimizer.load_state_dict(copy.deepcopy(saved))
    engine.close()


def changed(kind: str, value: Any = ("x",)) -> Callable[[Any], Any]:
    """Replace a state of one parameter."""

    def change(state: Any) -> Any:
        state["state"][1][kind] = value
        return state

    return change


OF_SGD = {"momentum_buffer": torch.zeros(VOCABULARY, WIDTH), "step": 1}
# The change of a valid state, and the error of its load.
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda state: state | {"state": {0: OF_SGD}}, "expected exp_avg, exp_avg_sq, got momentum_buffer, step"),
    (lambda state: state | {"state": {99: {}}}, r"state for parameter 99, and the groups have \d+ parameters"),
    (lambda state: {"state": {}}, "0 parameter groups were given, expected 1"),
    (lambda state: {"param_groups": [{}, {}]}, "2 parameter groups were given, expected 1"),
    (changed("exp_avg"), "expected exp_avg to be a tensor, got tuple"),
    (changed("exp_avg", torch.zeros(3)), r"this rank has of it, got .*save_checkpoint\(folder\)"),
    (changed("step"), "expected a number of steps"),
]


def test_states_that_do_not_fit_are_refused_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("adamw", 0)
    train(engine, 1)
    before = engine.optimizer.state_dict()
    for change, message in REFUSED:
        with pytest.raises(WherryError, match=message):
            engine.optimizer.load_state_dict(change(copy.deepcopy(before)))
        assert torch.equal(engine.optimizer.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    engine.optimizer.load_state_dict({"state": {}, "param_groups": before["param_groups"]})
    assert "it holds no state: moments and step counts begin anew" in caplog.text
    assert all(float(state["step"]) == 0 for state in engine.optimizer.state_dict()["state"].values())


@pytest.mark.parametrize(
    ("zero", "own", "message"),
    [({"device": "nvme"}, {}, "rests on disk"), ({"device": "cpu"}, {"state_dtype": "int8"}, "8-bit blocks")],
)
def test_states_without_a_state_dict_say_what_to_do(
    zero: dict[str, Any], own: dict[str, Any], message: str, tmp_path: Path
) -> None:
    more = {"zero_optimization": {"offload_optimizer": zero | {"nvme_path": str(tmp_path)}}, "wherry": own}
    with pytest.raises(WherryError, match=rf"{message}.*save_checkpoint\(folder\)"):
        make_engine("adamw", 3, more=more).optimizer.state_dict()
