"""The delayed update is the published schedule, and nothing else differs from plain training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.engine.harness import Run, adamw, make_model, token_batch
from tests.tiers.test_placements import ROWS, offload, train


def simulate(ranks: int, steps: int, first_late: int, clip: float) -> Run:
    """Plain PyTorch: from step `first_late` on, a step is updated with the gradients of the one before it."""
    model = make_model()
    opt = adamw(model.parameters())
    run = Run()
    kept: list[torch.Tensor] | None = None
    for step in range(steps):
        opt.zero_grad()
        total = 0.0
        for rank in range(ranks):
            loss = model(*token_batch(step, 0, rank)) / ranks
            loss.backward()
            total += float(loss.detach())
        run.losses.append(total)
        run.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step + 1 < first_late:
            opt.step()
            continue
        mine = [p.grad.clone() for p in model.parameters()]
        if kept is not None:
            for parameter, grad in zip(model.parameters(), kept, strict=True):
                parameter.grad = grad
            opt.step()
        kept = mine
    # Whoever looks at the weights sees the last update made.
    assert kept is not None
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        parameter.grad = grad
    opt.step()
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", ["offload-1", "offload-2", "offload-3-parameters", "disk-2", "infinity"])
def test_the_published_schedule(row: str, ranks: int, clip: float, seed: int | None, tmp_path: Path) -> None:
    config = offload(row, tmp_path, "delayed")
    config["wherry"]["delayed_update_warmup"] = 3
    run = train(config, stage=ROWS[row][0], ranks=ranks, clip=clip, seed=seed, steps=7)
    expected = simulate(ranks, 7, 3, clip)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=1e-5)


def test_chaos_does_not_change_a_bit(tmp_path: Path) -> None:
    config = offload("offload-2", tmp_path, "delayed", "bf16")
    config["wherry"]["delayed_update_warmup"] = 2
    runs = [train(copy.deepcopy(config), stage=2, ranks=2, seed=seed, steps=6) for seed in (None, 1, 2, 3)]
    assert all(run.losses == runs[0].losses for run in runs)
    for run in runs:
        assert all(torch.equal(weight, runs[0].weights[name]) for name, weight in run.weights.items())
