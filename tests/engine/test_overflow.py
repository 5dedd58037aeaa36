"""Steps that all ranks skip as one rank's gradients overflow: the loss scale, and schedules that do not advance."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.harness import settings
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update.loss_scale import LossScaleError

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
    given: str = "",
) -> Seen:
    """Train two ranks, of which the second's gradients overflow where the pattern has an x; check that both agree."""
    model = Line()

    def body(comm: Comm) -> tuple[Seen, float | None]:
        mine = copy.deepcopy(model)
        own = torch.optim.SGD(mine.parameters(), lr=RATE)
        built = schedule(own) if schedule is not None and given == "instance" else None
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


def test_a_static_scale_stays_and_skips() -> None:
    seen = run("x.x.", {"fp16": {"enabled": True, "loss_scale": 256}}, stage=3)
    assert seen.scales == [256] * 4 and seen.overflows == "x.x." and not seen.raised


# Learning rates.

PATIENT = {"enabled": True, "initial_scale_power": 8, "hysteresis": 100}
PATTERN = "x..x.....x."


def updates_before(pattern: str) -> list[int]:
    """Count the updates before each step, and after the last."""
    return [pattern[:step].count(".") for step in range(len(pattern) + 1)]


@pytest.mark.filterwarnings("error:Detected call of")
def test_schedules_of_the_config_count_updates() -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_type": "linear", "warmup_num_steps": 4}
    config = {"scheduler": {"type": "WarmupLR", "params": params}, "fp16": PATIENT}
    rates = [0.1 + 0.4 * min(1.0, n / 4) for n in updates_before(PATTERN)]
    assert run(PATTERN, config, stage=1).rates == pytest.approx(rates)


def sequential(optimizer: Any) -> Any:
    parts = [torch_schedules.LinearLR(optimizer, 0.25, total_iters=3), torch_schedules.ExponentialLR(optimizer, 0.5)]
    return torch_schedules.SequentialLR(optimizer, parts, [3])


TORCHS: dict[str, Callable[[Any], Any]] = {
    "assigned": lambda optimizer: torch_schedules.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "by hand": partial(torch_schedules.OneCycleLR, max_lr=RATE, total_steps=12, cycle_momentum=False),
    "instance": sequential,
}


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize(("given", "stage"), [("assigned", 0), ("by hand", 2), ("instance", 3)])
def test_torchs_schedules_count_updates(given: str, stage: int) -> None:
    make = TORCHS[given]
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = make(plain)
    expected = [plain.param_groups[0]["lr"]]
    for _ in range(PATTERN.count(".")):
        plain.step()
        schedule.step()
        expected.append(plain.param_groups[0]["lr"])
    seen = run(PATTERN, {"fp16": PATIENT}, stage=stage, schedule=make, given=given)
    assert seen.rates == pytest.approx([expected[n] for n in updates_before(PATTERN)])
