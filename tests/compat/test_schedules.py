"""Schedules through the alias: DeepSpeed's rates, update by update, under the names that scripts import."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.compat.harness import ADAM
from torch import nn

from wherry.compat.deepspeed import schedules
from wherry.compat.deepspeed.engine import initialize
from wherry.compat.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from wherry.config.scheduler import Scheduler


def adam(groups: int = 1, lr: Any = 0.5) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr)


def rates(schedule: Any, updates: int) -> list[float]:
    """Collect the rate of each update: it is set before the first, and moved on after each."""
    found = []
    for _ in range(updates):
        found.append(float(schedule.optimizer.param_groups[0]["lr"]))
        schedule.step()
    return found


def log(step: int, steps: int) -> float:
    return math.log(step + 1) / math.log(steps)


LINEAR = {"warmup_type": "linear"}
COSINE = [0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in (1, 2, 3, 4)]
STAIRS = {"cycle_first_step_size": 4, "cycle_first_stair_count": 2}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # The first two updates of a warm-up have the rate of step 0.
        (lambda: WarmupLR(adam(), 0.1, 0.3, 4), [*(0.1 + 0.2 * log(at, 4) for at in (0, 0, 1, 2, 3)), 0.3, 0.3]),
        (lambda: WarmupLR(adam(), 0.1, 0.3, 4, **LINEAR), [0.1, 0.1, 0.15, 0.2, 0.25, 0.3, 0.3]),
        (lambda: WarmupDecayLR(adam(), 6, 0.0, 0.3, 2, **LINEAR), [0, 0, 0.15, 0.3, 0.225, 0.15, 0.075, 0, 0]),
        # The first update has no warm-up: it comes before the first step.
        (lambda: WarmupCosineLR(adam(), 6, 0.2, 2, 0.1, **LINEAR),
         [0.5 * share for share in (0, 0.2, 0.6, *COSINE, 0.1)]),
        (lambda: LRRangeTest(adam(), 0.1, 2, 1.0), [0.1, 0.15, 0.2, 0.25]),
        (lambda: LRRangeTest(adam(), 0.1, 2, 1.0, True), [0.1, 0.1, 0.2, 0.2, 0.3]),
        (lambda: OneCycle(adam(), 0.0, 1.0, **STAIRS), [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]),
        (lambda: WarmupDecayLR(adam(), 6, 0.0, None, 2, **LINEAR), [0, 0, 0.25, 0.5]),
        # The default of DeepSpeed's warmup_max_lr.
        (lambda: WarmupDecayLR(adam(), 6, warmup_num_steps=2, **LINEAR), [0, 0, 0.0005, 0.001]),
    ],
)  # fmt: skip
def test_rates(schedule: Any, expected: list[float]) -> None:
    assert rates(schedule(), len(expected)) == pytest.approx(expected)


def test_one_cycle_with_momentum_against_it_and_a_decay() -> None:
    schedule = OneCycle(adam(), 0.1, 0.5, 0.5, 2, 4, decay_step_size=1, decay_mom_rate=0.5)
    assert schedule.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert rates(schedule, 8) == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5])
    assert schedule.get_mom() == [(pytest.approx(0.9 * 2), 0.99)] == [schedule.optimizer.param_groups[0]["betas"]]
    schedule.step(1)
    assert schedule.get_lr() == schedule.get_last_lr() == [pytest.approx(0.5)]
    assert schedule.get_mom() == [(pytest.approx(0.8), 0.99)]


def test_state_is_the_last_step_and_what_comes_next_follows_from_it() -> None:
    schedule, resumed = WarmupLR(adam(), 0.1, 0.3, 8), WarmupLR(adam(), 0.1, 0.3, 8)
    rates(schedule, 4)
    assert schedule.state_dict() == {"last_batch_iteration": 3}
    resumed.load_state_dict(schedule.state_dict())
    assert rates(resumed, 3)[1:] == rates(schedule, 3)[1:]
    resumed.load_state_dict({"last_epoch": 3, "_step_count": 4})  # of `import wherry`
    assert resumed.get_lr() == [pytest.approx(0.1 + 0.2 * log(3, 8))]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: WarmupLR(adam(), warmup_num_steps=2.5), ValueError, "warmup_num_steps: expected an integer"),
        (lambda: WarmupLR(adam(2), [0.1]), ValueError, "warmup_min_lr: .* got 1"),
        (lambda: WarmupLR(adam(), last_batch_iteration=3).get_last_lr(), AssertionError, "call step"),
    ],
)  # fmt: skip
def test_refusals(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_the_schedule_of_a_config_is_one_of_these_and_the_engine_moves_it() -> None:
    model = nn.Linear(2, 1)
    params = {"cycle_min_lr": [0.0, 0.1], "cycle_max_lr": [1.0, 1.1], "cycle_first_step_size": 2}
    config = {"train_batch_size": 1, "optimizer": ADAM, "scheduler": {"type": "OneCycle", "params": params}}
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    engine, *_, schedule = initialize(model=model, model_parameters=groups, config=config)
    assert type(schedule) is OneCycle
    for expected in ([0.5, 0.6], [1.0, 1.1]):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert engine.get_lr() == schedule.get_lr() == schedule.get_last_lr() == pytest.approx(expected)
        assert engine.get_mom() == schedule.get_mom()
    assert engine.get_mom() == [(pytest.approx(0.8), 0.99)] * 2
    engine.destroy()
    # No warm-up in a config is the shortest there is.
    block = Scheduler(type="WarmupDecayLR", params={"warmup_num_steps": 0, "total_num_steps": 9})
    assert schedules.build(block, adam()).warmup_num_steps == 2
