"""Optimizers, parameter groups and schedules, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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
from tests.engine.test_absent import OPTIMIZERS as DAMPED
from torch import nn

import wherry
from wherry.errors import WherryError
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
    "RMSprop": ({"lr": 1e-3}, partial(torch.optim.RMSprop, lr=1e-3)),
}


@pytest.mark.parametrize("kind", NAMED)
def test_the_config_names_the_optimizer(kind: str) -> None:
    params, plain = NAMED[kind]
    config = {"optimizer": {"type": kind.split()[0], "params": params}}
    ours = train_engine(make_model(), stage=2, steps=3, optimizer=None, config=config)
    assert_close(ours, train_plain(make_model(), steps=3, optimizer=plain), 1e-4 if "without" in kind else 2e-5)


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


def test_refusals_say_why() -> None:
    model = TinyLM()
    with pytest.raises(WherryError, match=r"LBFGS cannot be sharded: it needs the whole gradient"):
        wherry.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
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
