"""Adam as the device's own rule makes it, without masters and without corrected moments, against the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherry

LR = 0.01
HALF = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def update_by_hand(model: nn.Module, moments: list[torch.Tensor], step: int, *, corrected: bool) -> None:
    first, second = (1 - 0.9**step, 1 - 0.999**step) if corrected else (1.0, 1.0)
    for p, mean, square in zip(model.parameters(), moments[::2], moments[1::2], strict=True):
        assert p.grad is not None
        grad = p.grad.float()
        m, v = 0.9 * mean.float() + 0.1 * grad, 0.999 * square.float() + 0.001 * grad * grad
        p.copy_(p.float() - LR / first * m / (v.sqrt() / second**0.5 + 1e-8))
        mean.copy_(m)
        square.copy_(v)
        p.grad = None


@pytest.mark.parametrize(
    ("half", "tier", "stage"), [(True, "none", 3), (True, "cpu", 0), (False, "none", 0), (False, "cpu", 3)]
)
def test_its_numbers_and_a_checkpoint_goes_on(half: bool, tier: str, stage: int, tmp_path: Path):
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "bias_correction": half}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": tier}},
        **(HALF if half else {}),
    }
    dtype = torch.bfloat16 if half else torch.float32

    def run(engine: Any, first: int, last: int) -> list[torch.Tensor]:
        for seed in range(first, last):
            engine.backward(engine(batch(seed, dtype).to(engine.device)).float().mean())
            engine.step()
        engine.settle()
        return [engine.states.full(name, "master").cpu() for name, _ in engine.module.named_parameters()]

    engine = wherry.initialize(model=make_model(), config=config)[0]
    run(engine, 0, 3)
    engine.save_checkpoint(str(tmp_path))
    found = run(engine, 3, 5)
    engine.close()
    engine = wherry.initialize(model=make_model(), config=config)[0]
    engine.load_checkpoint(str(tmp_path))
    assert all(map(torch.equal, run(engine, 3, 5), found))
    engine.close()
    model = make_model().to(dtype)
    moments = [torch.zeros_like(p) for p in model.parameters() for _ in range(2)]
    for seed in range(5):
        model(batch(seed, dtype)).float().mean().backward()
        update_by_hand(model, moments, seed + 1, corrected=half)
    ulp = torch.finfo(dtype).eps
    for ours, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.detach().float(), rtol=2 * ulp, atol=1e-3 if half else 1e-6)
