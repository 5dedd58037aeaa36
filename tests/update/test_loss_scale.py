"""The loss scale, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from wherry.config import load
from wherry.update.loss_scale import LossScaleError, LossScaler


def run(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` a good step."""
    scales = []
    for step in steps:
        scaler.update(overflow=step == "x")
        scales.append(scaler.scale)
    return scales


def dynamic(scale: float = 16.0, **options: Any) -> LossScaler:
    return LossScaler(scale, dynamic=True, **{"window": 3, "hysteresis": 1, **options})


@pytest.mark.parametrize(
    ("options", "steps", "scales"),
    [
        # It doubles after a window of good steps; an overflow halves it, and begins the window anew.
        ({}, ".......", [16, 16, 32, 32, 32, 64, 64]),
        ({}, "..x...x", [16, 16, 8, 8, 8, 16, 8]),
        # Hysteresis lets overflows pass, comes back when the scale doubles, and with good steps if it is consecutive.
        ({"hysteresis": 3}, "xxxx", [16, 16, 8, 4]),
        ({"hysteresis": 2}, "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
        ({"hysteresis": 2}, "x.x.x", [16, 16, 8, 8, 4]),
        ({"hysteresis": 2}, "..x...", [16, 16, 16, 16, 16, 32]),
        ({"hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
    ],
)
def test_the_scale_after_each_step(options: dict[str, Any], steps: str, scales: list[float]) -> None:
    assert run(dynamic(**options), steps) == scales


def test_it_stops_at_the_minimum_after_its_hysteresis() -> None:
    scaler = dynamic(3.0, min_scale=2.0)
    assert run(scaler, "x") == [2]
    with pytest.raises(LossScaleError, match="at its minimum, 2") as caught:
        scaler.update(overflow=True)
    for advice in ("learning rate", "gradient_clipping", "bf16", "min_loss_scale"):
        assert advice in str(caught.value)
    assert scaler.scale == 2
    assert run(scaler, "...") == [2, 2, 4]
    patient = dynamic(1.0, hysteresis=2)
    patient.update(overflow=True)
    with pytest.raises(LossScaleError):
        patient.update(overflow=True)


def test_a_fixed_scale_stays() -> None:
    scaler = LossScaler(128)
    assert run(scaler, "x.x" + "." * 5) == [128] * 8
    scaler.load_state_dict({"scale": 4.0, "patience": 1, "good_steps": 0})
    assert scaler.scale == 128


def test_a_run_continues_from_its_state() -> None:
    steps = "..x.x...x..xx....x"
    expected = run(dynamic(2.0**10, hysteresis=2), steps)
    for cut in range(len(steps)):
        first, second = dynamic(2.0**10, hysteresis=2), dynamic(2.0**10, hysteresis=2)
        before = run(first, steps[:cut])
        second.load_state_dict(first.state_dict())
        assert before + run(second, steps[cut:]) == expected


def test_from_the_config() -> None:
    def scaler(**block: Any) -> LossScaler:
        return LossScaler.from_config(load({"fp16": block}).fp16)

    assert scaler(enabled=False, loss_scale=8).scale == 1.0
    fixed = scaler(enabled=True, loss_scale=8)
    assert (fixed.scale, fixed.dynamic) == (8.0, False)
    block = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 8}
    assert run(scaler(enabled=True, **block), "..xx") == [16, 32, 16, 8]
    default = scaler(enabled=True)
    assert (default.scale, default.window, default.hysteresis, default.min_scale) == (2.0**16, 1000, 2, 1.0)


@pytest.mark.parametrize(
    "options", [{"scale": 0}, {"scale": 1, "min_scale": 2, "dynamic": True}, {"scale": 1, "window": 0}]
)
def test_settings_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        LossScaler(**options)
