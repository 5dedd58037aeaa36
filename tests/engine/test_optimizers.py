"""Optimizers, their state, parameter groups and schedules, against plain PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    VOCABULARY,
    WIDTH,
    TinyLM,
    adamw,
    assert_close,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    masters_of,
    on_ranks,
    settings,
    token_batch,
    train,
    train_engine,
    train_plain,
    weights_of,
)
from tests.engine.test_absent import OPTIMIZERS as DAMPED
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update.optimizer import Lion

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **DAMPED,
    "adam": partial(torch.optim.Adam, lr=3e-3, weight_decay=0.1),
    "adamw maximize": partial(torch.optim.AdamW, lr=1e-3, maximize=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "sgd nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=2e-3),
    "radam": partial(torch.optim.RAdam, lr=2e-3),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
}


@pytest.mark.parametrize(("name", "stage"), [(name, 3 * (number % 2)) for number, name in enumerate(OPTIMIZERS)])
def test_element_wise_optimizers(name: str, stage: int) -> None:
    # Sign-like updates turn a gradient that is zero but for rounding into a whole step.
    tolerance = 1e-3 if name in ("lion", "rprop", "adadelta", "adamax", "adam") else 2e-5
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "optimizer": OPTIMIZERS[name]}
    assert_close(train_engine(make_model(), stage=stage, **common), train_plain(make_model(), **common), tolerance)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 3), (3, 3)])
def test_groups_and_schedules_of_torch(stage: int, ranks: int) -> None:
    """Use a schedule that moves the rates and the momentum."""
    model = make_model()
    plain = copy.deepcopy(model)
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=[3e-3, 1e-3], total_steps=8)
    optimizer = torch.optim.AdamW(two_groups(plain))
    schedule = cycle(optimizer)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    train_plain(plain, ranks=ranks, steps=4, optimizer=lambda _: optimizer, in_place=True)

    def body(comm: Any) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        given = {"optimizer": torch.optim.AdamW(two_groups(mine)), "lr_scheduler": cycle}
        engine, returned, _, lr_schedule = wherry.initialize(model=mine, config=settings(stage), mesh=comm, **given)
        assert isinstance(returned, torch.optim.Optimizer)
        assert lr_schedule is engine.lr_scheduler
        train(engine, 4)
        assert engine.get_lr() == pytest.approx([group["lr"] for group in optimizer.param_groups])
        assert [betas[0] for betas in engine.get_mom()] == [group["betas"][0] for group in optimizer.param_groups]
        return weights_of(engine)

    assert_near(run_ranks(ranks, body)[0], {name: p.detach() for name, p in plain.named_parameters()})


NAMED: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "Adam": ({"lr": 3e-3, "weight_decay": 0.1}, adamw),
    "Adam without decoupling": ({"lr": 3e-3, "weight_decay": 0.1, "adam_w_mode": False}, OPTIMIZERS["adam"]),
    "Adagrad": ({"lr": 1e-3}, partial(torch.optim.Adagrad, lr=1e-3)),
    "Lion": ({"lr": 1e-3}, partial(Lion, lr=1e-3)),
    "SGD": ({"lr": 1e-3}, partial(torch.optim.SGD, lr=1e-3)),
    "AdamW with AMSGrad": (
        {"lr": 3e-3, "eps": 1e-2, "weight_decay": 0.01, "amsgrad": True},
        OPTIMIZERS["adamw amsgrad"],
    ),
    "RMSprop": ({"lr": 1e-3}, partial(torch.optim.RMSprop, lr=1e-3)),
}


@pytest.mark.parametrize("kind", NAMED)
def test_the_config_names_the_optimizer(kind: str) -> None:
    params, plain = NAMED[kind]
    config = {"optimizer": {"type": kind.split()[0], "params": params}}
    ours = train_engine(make_model(), stage=2, steps=3, optimizer=None, config=config)
    assert_close(ours, train_plain(make_model(), steps=3, optimizer=plain), 1e-4 if "without" in kind else 2e-5)


def test_a_schedule_that_needs_a_metric() -> None:
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    slow = partial(torch.optim.SGD, lr=0.1)
    engine = engine_of(make_model(), settings(2), optimizer=slow, lr_scheduler=plateau)
    rates = []
    for step, metric in enumerate((None, 1.0, 2.0)):
        engine.backward(engine(*token_batch(step, 0, 0)))
        engine.step(lr_kwargs=None if metric is None else {"metrics": metric})
        rates += engine.get_lr()
    assert rates == pytest.approx([0.1, 0.1, 0.05])


def test_loaded_hyperparameters_reach_the_groups_of_schedules() -> None:
    model = make_model()
    mine = adamw(model.parameters())
    engine, optimizer, *_ = wherry.initialize(model=model, optimizer=mine, config=settings(2))
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert engine.get_lr() == [0.25]
    assert mine.param_groups[0]["lr"] == 0.25


def test_refusals_say_why() -> None:
    model = TinyLM()
    engine, optimizer, _, _ = wherry.initialize(model=TinyLM())
    assert optimizer is None
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match='"optimizer"'):
        engine.step()
    with pytest.raises(WherryError, match="already has state"):
        stepped = adamw(model.parameters())
        model(*token_batch(0, 0, 0)).backward()
        stepped.step()
        wherry.initialize(model=model, optimizer=stepped)


def test_a_step_of_the_users_optimizer_is_refused_until_the_engine_is_closed() -> None:
    model = TinyLM()
    mine = adamw(model.parameters())
    engine, *_ = wherry.initialize(model=model, optimizer=mine)
    engine(*token_batch(0, 0, 0)).backward()
    mine.zero_grad()
    with pytest.raises(WherryError, match=r"AdamW\.step: .* call engine\.step\(\)"):
        mine.step()
    engine.step()
    assert engine.was_step_applied()
    engine.close()
    mine.step()


def optimizer_bytes(engine: Any) -> int:
    return next(row.bytes_actual for row in engine.memory() if row.state == "optimizer")


@pytest.mark.parametrize(
    ("stage", "dtype", "per_element", "tolerance"), [(0, "bf16", 4, 0.02), (3, "int8", 2 + 8 / 256, 0.05)]
)
def test_lossy_moments(stage: int, dtype: str, per_element: float, tolerance: float) -> None:
    """Compare their bytes with the formula, and their losses with those of exact moments."""
    common: dict[str, Any] = {"stage": stage, "ranks": 2, "steps": 8, "finish": optimizer_bytes}
    lossy = train_engine(make_model(), config={"wherry": {"state_dtype": dtype}}, **common)
    exact = train_engine(make_model(), **common)
    assert lossy.losses != exact.losses
    assert lossy.losses == pytest.approx(exact.losses, rel=tolerance)
    assert lossy.extra == pytest.approx(exact.extra * per_element / 8, rel=0.02)


# Save and load `optimizer.state_dict()`, and train on to the same bits.

LOW = {"bf16": {"enabled": True}}
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
IN_BACKWARD = LOW | HOST | {"wherry": {"update_policy": "in_backward"}}


def make_engine(name: str, stage: int, comm: Any = None, more: dict[str, Any] | None = None) -> Any:
    return engine_of(make_model(), settings(stage, more=more), comm, OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("name", "stage", "ranks", "more"),
    [("adamw", 0, 1, {}), ("adamw", 3, 2, IN_BACKWARD), ("nadam", 3, 2, {}), ("sgd momentum", 1, 2, LOW)],
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


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "rmsprop", "nadam"])
def test_it_is_torchs_and_either_loads_the_others(name: str) -> None:
    """Load the state of each optimizer into the other; SGD of torch keeps no count of steps."""
    plain = make_model()
    theirs = OPTIMIZERS[name](plain.parameters())
    whole = train_plain(plain, steps=4, optimizer=OPTIMIZERS[name])
    train_plain(plain, steps=2, optimizer=lambda _: theirs, in_place=True)
    engine, loading = make_engine(name, 0), make_engine(name, 3)
    train(engine, 2)
    ours, expected = engine.optimizer.state_dict(), theirs.state_dict()
    assert [g["params"] for g in ours["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert ours["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert ours["state"][number].keys() == state.keys() | {"step"}
        assert_near(ours["state"][number], state)
    OPTIMIZERS[name](plain.parameters()).load_state_dict(ours)
    loading.module.load_state_dict(plain.state_dict())
    loading.optimizer.load_state_dict(expected)
    train(loading, 4, 2)
    assert_near(masters_of(loading), whole.weights, 1e-6)


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
