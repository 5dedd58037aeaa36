"""Steps that all ranks skip as one rank's gradients overflow: the loss scale, and schedules that do not advance."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_close, make_model, settings, train_engine, train_plain
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update.loss_scale import LossScaleError
from wherry.update.schedules import OneCycle

RATE = 0.5


class Line(nn.Module):
    """A model whose gradient is its input, ones: every SGD update subtracts the learning rate from each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@dataclass
class Seen:
    """Observations of one rank, step by step."""

    # As the pattern: x for a skipped step.
    steps: str = ""
    overflows: str = ""
    scales: list[float] = field(default_factory=list)
    # Learning rates before each step, and after the last.
    rates: list[float] = field(default_factory=list)
    # Steps that raised, as the scale was at its minimum.
    raised: list[int] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)


def run(
    pattern: str,
    config: dict[str, Any],
    *,
    stage: int,
    accumulation: int = 1,
    schedule: Callable[[Any], Any] | None = None,
    given: str = "callable",
) -> Seen:
    """Train two ranks, of which the second's gradients overflow where the pattern has an x; check that both agree."""
    model = Line()

    def body(comm: Comm) -> tuple[Seen, float | None]:
        mine = copy.deepcopy(model)
        own = torch.optim.SGD(mine.parameters(), lr=RATE)
        built: Any = None
        if schedule is not None and given == "callable":
            built = schedule
        elif schedule is not None and given == "instance":
            built = schedule(own)
        engine, optimizer, _, _ = wherry.initialize(
            model=mine, optimizer=own, lr_scheduler=built, config=settings(stage, accumulation, more=config), mesh=comm
        )
        by_hand = schedule(optimizer) if schedule is not None and given == "by hand" else None
        if schedule is not None and given == "assigned":
            engine.lr_scheduler = schedule(optimizer)
        seen = Seen(rates=engine.get_lr())
        for step, letter in enumerate(pattern):
            for micro in range(accumulation):
                loss = engine(torch.ones(300))
                if letter == "x" and comm.rank == 1 and micro == 0:
                    loss = loss * 2.0**24
                engine.backward(loss)
                try:
                    engine.step()
                except LossScaleError:
                    seen.raised.append(step)
            seen.steps += "." if engine.was_step_applied() else "x"
            seen.overflows += "x" if optimizer.overflow else "."
            if by_hand is not None and not optimizer.overflow:
                by_hand.step()
            seen.scales.append(engine.loss_scale)
            seen.rates += engine.get_lr()
        seen.counts = (engine.global_steps, engine.skipped_steps)
        masters = engine.consolidated_state_dict(torch.float32)
        engine.close()
        return seen, None if masters is None else float(masters["weight"].double().mean())

    (first, weight), *others = run_ranks(2, body)
    assert all(seen == first for seen, _ in others)
    assert first.steps == pattern and first.counts == (len(pattern), pattern.count("x"))
    # The reported rates are those of the updates.
    made = [rate for letter, rate in zip(pattern, first.rates, strict=False) if letter == "."]
    assert weight == pytest.approx(-sum(made), rel=1e-5)
    return first


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_the_scale_follows_the_overflows_of_any_rank(stage: int, accumulation: int) -> None:
    """Halve the scale at the second overflow, double it after three good steps, and raise at the minimum."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 64}
    seen = run("xx...xxxx.", {"fp16": fp16}, stage=stage, accumulation=accumulation)
    assert seen.scales == [256, 128, 128, 128, 256, 256, 128, 64, 64, 64]
    assert seen.raised == [8]
    # A step that raises reports nothing else.
    assert seen.overflows[:8] + seen.overflows[9:] == "xx...xxx."


@pytest.mark.parametrize("stage", [0, 3])
def test_a_static_scale_stays_and_skips(stage: int) -> None:
    seen = run("x.x.", {"fp16": {"enabled": True, "loss_scale": 256}}, stage=stage)
    assert seen.scales == [256] * 4 and seen.overflows == "x.x." and not seen.raised


# Learning rates.

PATIENT = {"enabled": True, "initial_scale_power": 8, "hysteresis": 100}
PATTERN = "x..x.....x."


def updates_before(pattern: str) -> list[int]:
    """Count the updates before each step, and after the last."""
    return [pattern[:step].count(".") for step in range(len(pattern) + 1)]


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("stage", [0, 3])
def test_schedules_of_the_config_count_updates(stage: int) -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_type": "linear", "warmup_num_steps": 4}
    config = {"scheduler": {"type": "WarmupLR", "params": params}, "fp16": PATIENT}
    rates = [0.1 + 0.4 * min(1.0, n / 4) for n in updates_before(PATTERN)]
    assert run(PATTERN, config, stage=stage).rates == pytest.approx(rates)


TORCHS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "StepLR": ("callable", lambda optimizer: torch_schedules.StepLR(optimizer, 2, gamma=0.5)),
    "CosineAnnealingLR": ("instance", lambda optimizer: torch_schedules.CosineAnnealingLR(optimizer, 6)),
    "OneCycleLR": (
        "by hand",
        lambda optimizer: torch_schedules.OneCycleLR(optimizer, RATE, total_steps=12, cycle_momentum=False),
    ),
    "LambdaLR": ("assigned", lambda optimizer: torch_schedules.LambdaLR(optimizer, lambda n: 1 / (1 + n))),
    "SequentialLR": (
        "instance",
        lambda optimizer: torch_schedules.SequentialLR(
            optimizer,
            [
                torch_schedules.LinearLR(optimizer, 0.25, total_iters=3),
                torch_schedules.ExponentialLR(optimizer, 0.5),
            ],
            [3],
        ),
    ),
}


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_schedules_count_updates(name: str) -> None:
    given, make = TORCHS[name]
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = make(plain)
    expected = [plain.param_groups[0]["lr"]]
    for _ in range(PATTERN.count(".")):
        plain.step()
        schedule.step()
        expected.append(plain.param_groups[0]["lr"])
    seen = run(PATTERN, {"fp16": PATIENT}, stage=list(TORCHS).index(name) % 4, schedule=make, given=given)
    assert seen.rates == pytest.approx([expected[n] for n in updates_before(PATTERN)])


def test_a_cycle_moves_the_momentum_as_well() -> None:
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2, "decay_step_size": 1}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "OneCycle", "params": {**params, "cycle_min_mom": 0.5, "decay_mom_rate": 0.01}},
    }

    def cycling(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        schedule = OneCycle(optimizer, **params, cycle_min_mom=0.5, decay_mom_rate=0.01)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    def betas(engine: Any) -> Any:
        return engine.get_mom()[0][0], engine.get_lr()[0]

    ours = train_engine(make_model(), stage=2, ranks=2, steps=6, optimizer=None, config=config, finish=betas)
    assert_close(ours, train_plain(make_model(), ranks=2, steps=6, optimizer=cycling), 2e-5)
    assert ours.extra == (pytest.approx(0.9 * 1.02), pytest.approx(1e-3))
