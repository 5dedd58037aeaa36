"""`bf16_master_weights_and_grads` and its like: weights of 16 bits are what is updated, with DeepSpeed's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compat import harness
from tests.compat.harness import batch, loss_of, make_model, masters

import wherry
from wherry.compat.deepspeed import ops

LR, DECAY, CLIP = 0.01, 0.1, 0.01
BF16, FP16 = torch.bfloat16, torch.float16
ADAM = {"type": "Adam", "params": {"lr": LR, "weight_decay": DECAY}}


def block_of(dtype: torch.dtype, *, states: bool = False) -> dict[str, Any]:
    if dtype is FP16:
        return {"fp16": {"enabled": True, "initial_scale_power": 4, "fp16_master_weights_and_grads": True}}
    return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states}}


def engine_of(stage: int, offload: str, given: Any = None, **more: Any) -> Any:
    zero = {"offload_optimizer": {"device": offload}}
    return harness.engine_of(
        stage, zero=zero, given=given, optimizer=None if given else ADAM, gradient_clipping=CLIP, **more
    )


def train(engine: Any, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        engine.backward(loss_of(engine, seed))
        engine.step()


class ByHand:
    """AdamW of weights of 16 bits as DeepSpeed's kernels make it: in fp32, each result rounded to its own type."""

    def __init__(self, dtype: torch.dtype, moments: torch.dtype, scale: float) -> None:
        self.model, self.dtype, self.scale, self.steps = make_model().to(dtype), dtype, scale, 0
        self.weights = [*self.model.parameters()]
        self.mean = [torch.zeros_like(p, dtype=moments) for p in self.weights]
        self.square = [torch.zeros_like(p, dtype=moments) for p in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        grads = [p.grad for p in self.weights]
        norm = torch.stack([g.float().norm() for g in grads]).norm() / self.scale  # type: ignore[union-attr]
        factor = 1 / (self.scale * max(1.0, float((norm + 1e-6) / CLIP)))
        for p, grad, mean, square in zip(self.weights, grads, self.mean, self.square, strict=True):
            assert grad is not None
            g = (grad * factor).float()
            m = 0.9 * mean.float() + 0.1 * g
            v = 0.999 * square.float() + 0.001 * g * g
            denominator = v.sqrt() / (1 - 0.999**self.steps) ** 0.5 + 1e-8
            p.copy_(p.float() * (1 - LR * DECAY) - LR / (1 - 0.9**self.steps) * m / denominator)
            mean.copy_(m)
            square.copy_(v)
            p.grad = None

    def train(self, steps: int) -> None:
        for seed in range(steps):
            (self.model(batch(seed, self.dtype)).float().mean() * self.scale).backward()
            self.update()


@pytest.mark.parametrize(
    ("stage", "dtype", "offload", "states"),
    [(1, BF16, "none", True), (3, BF16, "cpu", False), (2, FP16, "cpu", False)],
)
def test_its_numbers(stage: int, dtype: torch.dtype, offload: str, states: bool):
    engine = engine_of(stage, offload, **block_of(dtype, states=states))
    moments = dtype if states else torch.float32
    train(engine, 8)
    ours = ByHand(dtype, moments, 16.0 if dtype is FP16 else 1.0)
    ours.train(8)
    for (name, _), weight, mean in zip(engine.module.named_parameters(), ours.weights, ours.mean, strict=True):
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(engine.states.full(name, "master"), weight.float(), rtol=ulp, atol=1e-6)
        torch.testing.assert_close(engine.states.full(name, "exp_avg"), mean.float(), rtol=ulp, atol=1e-6)
    state = next(iter(engine.optimizer.optimizer.state.values()))
    assert state["exp_avg"].dtype is moments and state["exp_avg_sq"].dtype is moments
    # Nothing is kept but the moments: 2 or 4 bytes each, and the weights are their own masters.
    kept = next(row.bytes_actual for row in engine.memory() if row.state == "optimizer")
    assert kept == sum(2 * p.numel() * moments.itemsize for p in make_model().parameters())
    engine.destroy()


def test_a_checkpoint_goes_on_and_loads_where_there_are_masters(tmp_path: Path):
    engine = engine_of(2, "none", **block_of(BF16, states=True))
    train(engine, 3)
    engine.save_checkpoint(str(tmp_path))
    saved = engine.states.full("0.weight", "exp_avg")
    train(engine, 3, first=3)
    expected = masters(engine)
    engine.destroy()
    again = engine_of(3, "cpu", **block_of(BF16, states=True))
    again.load_checkpoint(str(tmp_path))
    train(again, 3, first=3)
    assert all(map(torch.equal, masters(again), expected))
    again.destroy()
    other = engine_of(2, "none", bf16={"enabled": True})
    other.load_checkpoint(str(tmp_path))
    assert torch.equal(other.states.full("0.weight", "exp_avg"), saved)
    other.destroy()


def cpu_adam(full: bool) -> Any:
    return lambda parameters: ops.DeepSpeedCPUAdam(parameters, fp32_optimizer_states=full)


@pytest.mark.parametrize(
    ("stage", "offload", "given", "more", "kind", "message"),
    [
        (0, "none", None, block_of(BF16), AssertionError, "bf16_master_weights_and_grads is only supported with"),
        (2, "none", None, {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, AssertionError,
         "requires bf16.bf16_master_weights_and_grads"),
        (2, "none", None, block_of(FP16), AssertionError, "requires ZeRO Offload with DeepSpeedCPUAdam"),
        (1, "cpu", cpu_adam(True), block_of(BF16, states=True), AssertionError, "fp32_optimizer_states=False"),
        (1, "cpu", cpu_adam(False), block_of(FP16), wherry.WherryError, "with fp16 weights is not offered"),
    ],
)  # fmt: skip
def test_what_deepspeed_refuses(stage: int, offload: str, given: Any, more: Any, kind: Any, message: str):
    with pytest.raises(kind, match=message):
        engine_of(stage, offload, given, **more)
