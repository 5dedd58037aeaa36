"""Numbers through the alias: defaults, masters, loss scales, norms and sums are DeepSpeed's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compat.harness import BF16, SGD, engine_of, line, masters
from torch import nn

from wherry.compat.deepspeed.config import load, loss_scaler
from wherry.compat.deepspeed.engine import initialize
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update.loss_scale import LossScaleError


def step(engine: Any, size: float, backwards: int = 1) -> None:
    for _ in range(backwards):
        engine.backward(engine(torch.full((1, 4), size, dtype=engine.working_dtype)).sum())
    engine.step()


def weight(engine: Any) -> float:
    """Return the master of a layer whose weights are all alike."""
    (value,) = masters(engine)[0].unique().tolist()
    return value


FP16_BLOCK = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}


@pytest.mark.parametrize(
    ("stage", "block", "overflows", "expected"),
    [
        # A scale doubles a step later after the start and after an overflow.
        (2, {"hysteresis": 1}, ".....x....", [16, 16, 32, 32, 64, 32, 32, 32, 64, 64]),
        # Hysteresis is for stages with partitions.
        (1, {"hysteresis": 2}, "x.xx", [16, 16, 8, 4]),
        (1, {"hysteresis": 2, "consecutive_hysteresis": True}, "x.xx", [16, 16, 16, 8]),
        (0, {"hysteresis": 2}, "x.xx", [8, 8, 4, 2]),
        # At the minimum stages with partitions stop.
        (0, {"min_loss_scale": 8, "hysteresis": 1}, "xxx", [8, 8, 8]),
        (1, {"min_loss_scale": 8, "hysteresis": 1}, "x", [8]),
    ],
)
def test_loss_scales(stage: int, block: dict[str, Any], overflows: str, expected: list[float]) -> None:
    scaler = loss_scaler(load({"fp16": {**FP16_BLOCK, **block}, "zero_optimization": {"stage": stage}}))
    for mark, scale in zip(overflows, expected, strict=True):
        scaler.update(mark == "x")
        assert scaler.scale == scale
    if stage and "min_loss_scale" in block:
        with pytest.raises(LossScaleError):
            scaler.update(True)


@pytest.mark.parametrize(("params", "plain"), [({}, torch.optim.AdamW), ({"adam_w_mode": False}, torch.optim.Adam)])
def test_adam_decouples_its_decay_unless_it_is_said(params: dict[str, Any], plain: type[torch.optim.Optimizer]) -> None:
    model, other = line(), line()
    block = {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.5, **params}}
    engine = engine_of(model=model, optimizer=block, gradient_clipping=0.0)
    optimizer = plain(other.parameters(), lr=0.1, weight_decay=0.5)
    for size in (1.0, 0.1, 2.0):
        step(engine, size)
        other(torch.full((1, 4), size)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, other.weight)
    engine.destroy()


def test_gradients_may_be_summed_over_ranks() -> None:
    def train(comm: Comm) -> float:
        more = {"gradient_allreduce_op": "SUM", "gradient_clipping": 0.0}
        engine = engine_of(2, model=line(), optimizer=SGD, mesh=comm, **more)
        step(engine, 1.0 + comm.rank)
        moved = 1 - weight(engine)
        engine.close()
        return moved

    assert run_ranks(2, train) == [3.0, 3.0]


@pytest.mark.parametrize("stage", [0, 3])
def test_without_managed_accumulation_every_step_is_a_boundary(stage: int) -> None:
    by_hand = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 4, "gradient_clipping": 0.0}
    engine = engine_of(stage, model=line(), optimizer=SGD, **by_hand)
    expected = 1.0
    for number in (3, 1, 5):
        assert not engine.is_gradient_accumulation_boundary()
        step(engine, 1.0, backwards=number)
        expected -= number / 4
        assert weight(engine) == expected and engine.was_step_applied()
    assert (engine.global_steps, engine.global_samples) == (3, 2 * (3 + 1 + 5))
    with pytest.raises(AssertionError, match="every step\\(\\) is the boundary"):
        engine.set_gradient_accumulation_boundary(True)
    engine.destroy()
    overlap = {"stage": 1, "overlap_comm": True}
    with pytest.raises(AssertionError, match="overlap_comm only with ZeRO stage 2"):
        initialize(model=line(), config={"train_batch_size": 4, **by_hand, "zero_optimization": overlap})


@pytest.mark.parametrize(
    ("kind", "plain", "options", "policy"),
    [
        ("AdamW", torch.optim.AdamW, {"weight_decay": 0.1}, "at_step"),
        ("SGD", torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9}, "in_backward"),
    ],
)
def test_stage_0_in_16_bits_begins_with_an_update_on_zeros(
    kind: str, plain: type[torch.optim.Optimizer], options: dict[str, Any], policy: str
) -> None:
    expected = nn.Parameter(torch.ones(1, 4))
    oracle = plain([expected], lr=0.01, **options)
    optimizer = {"type": kind, "params": {"lr": 0.01, **options}}
    more = {"gradient_clipping": 0.0, "gradient_accumulation_steps": 2, "wherry": {"update_policy": policy}}
    engine = engine_of(model=line(), optimizer=optimizer, **BF16, **more)
    assert (engine.global_steps, engine.micro_steps) == (0, 0)
    for size in (0.0, 1.0, 0.25):
        expected.grad = torch.full((1, 4), size)
        oracle.step()
        if size:
            step(engine, size)
            step(engine, size)
    torch.testing.assert_close(masters(engine)[0], expected.detach(), rtol=0, atol=1e-7)
    assert (engine.global_steps, engine.micro_steps) == (2, 4)
    engine.destroy()


def test_the_update_on_zeros_leaves_frozen_weights_and_hooks_alone() -> None:
    model, called = nn.Linear(4, 1), []
    model.bias.requires_grad_(False)
    model.weight.register_hook(lambda grad: called.append(1))
    more = {"zero_allow_untested_optimizer": True, "wherry": {"accumulation": "layer_major"}}
    engine = engine_of(model=model, given=torch.optim.AdamW(model.parameters(), lr=0.1), **BF16, **more)
    assert called == [] and engine.global_steps == 0
    engine.destroy()


@pytest.mark.parametrize(("op", "half"), [("mean", {}), ("sum", BF16)])
def test_gradients_that_a_script_has_set_on_each_rank_are_taken_at_stage_0(op: str, half: dict[str, Any]) -> None:
    def train(comm: Comm) -> float:
        model = line()
        more = {"gradient_allreduce_op": op, "gradient_clipping": 0.0, **half}
        engine = engine_of(model=model, optimizer=SGD, mesh=comm, **more)
        for _ in range(2):
            model.weight.grad = torch.full_like(model.weight, 0.25)
            engine.step()
            assert model.weight.grad is None
        engine.step()  # without any, nothing is updated
        assert engine.global_steps == 2
        moved = 1 - weight(engine)
        model.weight.grad = torch.ones_like(model.weight) if comm.rank else None
        with pytest.raises(WherryError, match="set the same on each"):
            engine.step()
        engine.close()
        return moved

    assert run_ranks(2, train) == [0.5, 0.5]
