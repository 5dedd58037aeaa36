"""Optimizers, parameter groups and schedules, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    TinyLM,
    adamw,
    assert_close,
    assert_near,
    make_model,
    settings,
    token_batch,
    train,
    train_engine,
    train_plain,
    weights_of,
)
from tests.models import rotate
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.testing import run_ranks
from wherry.update.optimizer import Lion
from wherry.update.rules import TorchRule, UpdateSegment

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=2e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=2e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=2e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


@pytest.mark.parametrize(("name", "stage"), rotate(OPTIMIZERS, [0, 3]))
def test_element_wise_optimizers(name: str, stage: int) -> None:
    # Sign-like updates turn a gradient that is zero but for rounding into a whole step.
    tolerance = 1e-3 if name in ("lion", "rprop", "adadelta", "adamax", "adam", "adamw amsgrad") else 2e-5
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "optimizer": OPTIMIZERS[name]}
    assert_close(train_engine(make_model(), stage=stage, **common), train_plain(make_model(), **common), tolerance)


@pytest.mark.parametrize(("name", "fused"), [("adam", True), ("sgd", True), ("adagrad", None), ("lion", None)])
def test_rules_with_a_kernel_in_every_torch_are_fused_on_a_gpu(name: str, fused: bool | None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mine = OPTIMIZERS[name]([nn.Parameter(torch.ones(4))])
    with FakeTensorMode():
        rule = TorchRule(mine, type(mine))
        inner = rule._bind([UpdateSegment(grad=None, working=torch.empty(4, device="cuda"))])
    assert inner.param_groups[0].get("fused") is fused


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 3), (3, 3)])
def test_groups_and_schedules_of_torch(stage: int, ranks: int) -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(two_groups(plain), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    train_plain(plain, ranks=ranks, steps=4, optimizer=lambda _: optimizer, in_place=True)

    def body(comm: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
        mine = copy.deepcopy(model)
        engine, returned, _, lr_schedule = wherry.initialize(
            model=mine,
            optimizer=torch.optim.AdamW(two_groups(mine), lr=3e-3),
            lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5),
            config=settings(stage),
            mesh=comm,
        )
        assert isinstance(returned, torch.optim.Optimizer)
        assert lr_schedule is engine.lr_scheduler
        train(engine, 4)
        return weights_of(engine), engine.get_lr()

    weights, rates = run_ranks(ranks, body)[0]
    assert rates == pytest.approx([3e-3 / 4, 1e-3 / 4])
    assert_near(weights, {name: p.detach() for name, p in plain.named_parameters()})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("built_on", ["the returned optimizer", "the user's optimizer"])
def test_a_schedule_built_by_hand_moves_the_rate(built_on: str) -> None:
    model = make_model()
    mine = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.LambdaLR(mine, lambda step: 1 / (1 + step)) if "user" in built_on else None
    engine, optimizer, _, _ = wherry.initialize(model=model, optimizer=mine, config=settings(2))
    schedule = before or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        engine.backward(engine(*token_batch(step, 0, 0)))
        optimizer.step() if built_on == "the returned optimizer" else engine.step()
        schedule.step()
    assert engine.get_lr() == pytest.approx([1 / 4])
    engine.close()


NAMED = {"Adagrad": torch.optim.Adagrad, "Lion": Lion, "SGD": torch.optim.SGD, "RMSprop": torch.optim.RMSprop}


@pytest.mark.parametrize("kind", NAMED)
def test_the_config_names_the_optimizer(kind: str) -> None:
    config = {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}
    plain = train_plain(make_model(), steps=3, optimizer=lambda p: NAMED[kind](p, lr=1e-3))
    assert_close(train_engine(make_model(), stage=2, steps=3, optimizer=None, config=config), plain, 2e-5)


def test_adam_in_a_config_is_adamw_by_default() -> None:
    def config(more: dict[str, Any]) -> dict[str, Any]:
        return {"optimizer": {"type": "Adam", "params": {"lr": 3e-3, "weight_decay": 0.1, **more}}}

    model = make_model()
    ours = train_engine(model, stage=1, steps=5, optimizer=None, config=config({}))
    assert_close(ours, train_plain(model, steps=5, optimizer=adamw))
    ours = train_engine(model, stage=1, steps=5, optimizer=None, config=config({"adam_w_mode": False}))
    assert_close(ours, train_plain(model, steps=5, optimizer=OPTIMIZERS["adam"]), 1e-4)


def test_parameters_of_no_optimizer_stay() -> None:
    model = make_model()
    chosen = [p for n, p in model.named_parameters() if "blocks.1" in n]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine, *_ = wherry.initialize(model=model, optimizer=torch.optim.SGD(chosen, lr=0.1), config=settings(3))
    train(engine, 1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("blocks.1" not in name), name


def test_a_schedule_that_needs_a_metric() -> None:
    model = make_model()
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0),
        config=settings(2),
    )
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
    with pytest.raises(WherryError, match="2 parameter groups were given, expected 1"):
        optimizer.load_state_dict({"param_groups": [{}, {}]})


def test_refusals_say_why() -> None:
    model = TinyLM()
    with pytest.raises(WherryError, match=r"LBFGS cannot be sharded: it needs the whole gradient"):
        wherry.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(WherryError, match="not the model's"):
        wherry.initialize(model=model, optimizer=adamw(copy.deepcopy(model).parameters()))
    with pytest.raises(WherryError, match="already has state"):
        stepped = adamw(model.parameters())
        model(*token_batch(0, 0, 0)).backward()
        stepped.step()
        wherry.initialize(model=model, optimizer=stepped)
    with pytest.raises(WherryError, match=r"optimizer\.params: RMSprop does not take these"):
        wherry.initialize(model=model, config={"optimizer": {"type": "RMSprop", "params": {"learning": 1}}})


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


def test_step_without_an_optimizer_is_refused() -> None:
    engine, optimizer, _, _ = wherry.initialize(model=TinyLM())
    assert optimizer is None
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match='"optimizer"'):
        engine.step()
