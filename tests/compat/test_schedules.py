"""Schedules through the alias: DeepSpeed's rates, update by update, under the names that scripts import."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch
from torch import nn

from wherry.compat.deepspeed import engine as engines
from wherry.compat.deepspeed import names, schedules
from wherry.compat.deepspeed.engine import initialize
from wherry.compat.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from wherry.config.scheduler import Scheduler


@pytest.fixture(autouse=True)
def no_group_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks here are threads, or one; what starts torch.distributed is tested elsewhere."""
    monkeypatch.setattr(engines, "init_distributed", lambda **_: None)


def adam(groups: int = 1, lr: Any = 0.5) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr)


def rates(schedule: Any, updates: int) -> list[float]:
    """The rate of each update: it is set before the first, and moved on after each."""
    found = []
    for _ in range(updates):
        found.append(float(schedule.optimizer.param_groups[0]["lr"]))
        schedule.step()
    return found


def log(step: int, steps: int) -> float:
    return math.log(step + 1) / math.log(steps)


@pytest.mark.parametrize(("shape", "share"), [("log", log), ("linear", lambda step, steps: step / steps)])
def test_the_first_two_updates_of_a_warm_up_have_the_rate_of_step_0(shape: str, share: Any) -> None:
    schedule = WarmupLR(adam(), 0.1, 0.3, warmup_num_steps=4, warmup_type=shape)
    steps = [0, 0, 1, 2, 3]
    assert rates(schedule, 7) == pytest.approx([*(0.1 + 0.2 * share(step, 4) for step in steps), 0.3, 0.3])


def test_a_warm_up_that_decays() -> None:
    schedule = WarmupDecayLR(adam(), 6, 0.0, 0.3, warmup_num_steps=2, warmup_type="linear")
    assert rates(schedule, 9) == pytest.approx([0, 0, 0.15, 0.3, 0.225, 0.15, 0.075, 0, 0])
    assert WarmupDecayLR(adam(), 6).max_lrs == [0.001]  # where WarmupLR has the optimizer's own
    assert WarmupLR(adam()).max_lrs == [0.5]


def test_a_warm_up_and_a_cosine() -> None:
    schedule = WarmupCosineLR(adam(), 6, 0.2, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear")
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in (1, 2, 3, 4)]
    shares = [0, 0.2, 0.6, *cosine, 0.1]  # the first update has none: it comes before the first step
    assert rates(schedule, 8) == pytest.approx([0.5 * share for share in shares])


def test_a_range_test_grows_with_the_first_step() -> None:
    assert rates(LRRangeTest(adam(), 0.1, 2, 1.0), 4) == pytest.approx([0.1, 0.15, 0.2, 0.25])
    assert rates(LRRangeTest(adam(), 0.1, 2, 1.0, True), 5) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_one_cycle_with_momentum_against_it_and_a_decay() -> None:
    schedule = OneCycle(adam(), 0.1, 0.5, 0.5, 2, 4, decay_step_size=1, decay_mom_rate=0.5)
    assert schedule.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert rates(schedule, 8) == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5])
    assert schedule.get_mom() == [(pytest.approx(0.9 * 2), 0.99)] == [schedule.optimizer.param_groups[0]["betas"]]
    schedule.step(1)
    assert schedule.get_lr() == schedule.get_last_lr() == [pytest.approx(0.5)]
    assert schedule.get_mom() == [(pytest.approx(0.8), 0.99)]
    plain = OneCycle(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.5), 0.1, 0.5)
    assert plain.get_mom() is None


def test_the_stairs_of_one_cycle() -> None:
    schedule = OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert rates(schedule, 9) == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])
    assert rates(OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=2, cycle_second_step_size=0), 3)[:2] == [0.0, 0.5]


def test_one_rate_and_one_momentum_for_each_group() -> None:
    optimizer = adam(2)
    schedule = OneCycle(optimizer, [0.0, 0.1], [1.0, 1.1], cycle_min_mom=[0.8, 0.7], cycle_first_step_size=2)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.6])
    assert [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.85, 0.8])
    with pytest.raises(ValueError, match="expected 2 value for cycle_max_lr"):
        OneCycle(optimizer, 0.1, [0.1, 0.2, 0.3])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.6])
    with pytest.raises(ValueError, match="expected 2 value for min_lr"):
        WarmupLR(optimizer, [0.1])


@pytest.mark.parametrize(
    "make", [WarmupLR, lambda o: WarmupCosineLR(o, 9), lambda o: OneCycle(o, 0.1, 0.2), LRRangeTest]
)
def test_a_rate_that_is_a_tensor_is_set_in_place(make: Any) -> None:
    optimizer, plain = adam(lr=torch.tensor(0.5)), make(adam())
    held = optimizer.param_groups[0]["lr"]
    schedule = make(optimizer)
    for _ in range(3):
        schedule.step()
        plain.step()
        assert optimizer.param_groups[0]["lr"] is held
        assert float(held) == pytest.approx(float(plain.get_last_lr()[0]), rel=1e-6)


def test_state_is_the_last_step_and_what_comes_next_follows_from_it() -> None:
    schedule, resumed = WarmupLR(adam(), 0.1, 0.3, 8), WarmupLR(adam(), 0.1, 0.3, 8)
    rates(schedule, 4)
    assert schedule.state_dict() == {"last_batch_iteration": 3}
    resumed.load_state_dict(schedule.state_dict())
    assert rates(resumed, 3)[1:] == rates(schedule, 3)[1:]
    resumed.load_state_dict({"last_epoch": 3, "_step_count": 4})  # of `import wherry`
    assert resumed.get_lr() == [pytest.approx(0.1 + 0.2 * log(3, 8))]
    with pytest.raises(AssertionError, match="call step"):
        WarmupLR(adam(), last_batch_iteration=3).get_last_lr()


@pytest.mark.parametrize("steps", [0, -1, 2.5, "auto"])
def test_steps_are_positive_integers(steps: Any) -> None:
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer"):
        WarmupLR(adam(), warmup_num_steps=steps)
    with pytest.raises(ValueError, match="lr_range_test_step_size must be a positive integer"):
        LRRangeTest(adam(), lr_range_test_step_size=steps)
    with pytest.raises(TypeError, match="not a subclass"):
        WarmupLR(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_no_warm_up_in_a_config_is_the_shortest_there_is(kind: str) -> None:
    block = Scheduler(
        type=kind, params={"warmup_num_steps": 0, **({} if kind == "WarmupLR" else {"total_num_steps": 9})}
    )
    assert schedules.build(block, adam()).warmup_num_steps == 2  # type: ignore[attr-defined]


def test_the_schedule_of_a_config_is_one_of_these_and_the_engine_moves_it() -> None:
    model = nn.Linear(2, 1)
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.3, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    engine, optimizer, _, schedule = initialize(model=model, config=config)
    assert type(schedule) is WarmupLR
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert schedule.get_lr() == engine.get_lr() == schedule.get_last_lr()
    assert seen == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.25])
    engine.destroy()


def test_momentum_of_the_engine_and_lists_in_the_config() -> None:
    model = nn.Linear(2, 1)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": [0.0, 0.1], "cycle_max_lr": [1.0, 1.1], "cycle_first_step_size": 2},
        },
    }
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    engine, *_, schedule = initialize(model=model, model_parameters=groups, config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.get_mom() == schedule.get_mom() == [(pytest.approx(0.85), 0.99)] * 2
    assert engine.get_lr() == pytest.approx([0.5, 0.6])
    engine.destroy()


def test_names_and_flags() -> None:
    assert names.ITSELF["runtime.lr_schedules"] == schedules.__name__
    assert names.of_module("")["add_tuning_arguments"] == (schedules.__name__, "add_tuning_arguments")
    assert (schedules.WARMUP_MIN_LR, schedules.DECAY_LR_RATE) == ("warmup_min_lr", "decay_lr_rate")
    parser = schedules.add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--lr_schedule", "OneCycle", "--cycle_max_lr", "0.7"])
    assert (args.lr_schedule, args.cycle_max_lr, args.warmup_type) == ("OneCycle", 0.7, "log")
    assert (args.lr_range_test_step_size, args.lr_range_test_staircase, args.cycle_momentum) == (1000, False, False)
