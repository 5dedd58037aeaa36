"""Every policy equals plain PyTorch, with dropout on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.activations.model import Model, by_hand, late_links
from tests.engine.harness import (
    Run,
    TinyLM,
    adamw,
    assert_close,
    assert_equal,
    make_model,
    settings,
    token_batch,
    train_engine,
)
from torch import nn

import wherry
from wherry.activations.auto import Policy, choose
from wherry.testing.late import ChaosLink

STEPS = 3

WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": "recompute"},
    "every second": {"policy": "recompute", "every": 2},
    "selective": {"policy": "recompute", "save_operations": ["matmul", "attention"]},
    "offload": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": 1},
    "large ones": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": 600},
    "recompute and offload": {"cpu_checkpointing": True, "offload_min_bytes": 1},
    "recompute and disk": {"nvme_path": "DISK", "offload_min_bytes": 1},
    "offload to disk": {"policy": "offload", "nvme_path": "DISK", "offload_min_bytes": 1},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 3},
    "auto, scarce": {"policy": "auto", "memory": "20000B"},
    "auto, nothing": {"policy": "auto", "memory": 0, "cpu_checkpointing": True, "offload_min_bytes": 1},
    "synchronized": {"policy": "recompute", "synchronize_checkpoint_boundary": True, "profile": True},
}


def block_of(way: str, tmp_path: Path) -> dict[str, Any]:
    return {key: str(tmp_path) if value == "DISK" else value for key, value in WAYS[way].items()}


def train(model: torch.nn.Module, stage: int | None, block: dict[str, Any], accumulation: int = 2) -> Run:
    """Train one rank from one seed; `stage` None is plain PyTorch."""
    run = Run()
    mine = copy.deepcopy(model)
    torch.manual_seed(7)
    optimizer = adamw(mine.parameters())
    engine: Any = None
    if stage is not None:
        config = settings(stage, accumulation, more={"activation_checkpointing": block})
        engine, *_ = wherry.initialize(model=mine, optimizer=optimizer, config=config)
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            if engine is not None:
                loss = engine(*token_batch(step, micro, 0))
                engine.backward(loss)
                engine.step()
            else:
                loss = mine(*token_batch(step, micro, 0))
                (loss / accumulation).backward()
            total += float(loss.detach()) / accumulation
        run.losses.append(total)
        if engine is not None:
            norm = engine.get_global_grad_norm()
        else:
            norm = float(torch.stack([p.grad.double().square().sum() for p in mine.parameters()]).sum().sqrt())
            optimizer.step()
            optimizer.zero_grad()
        run.norms.append(norm)
    run.weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
    if engine is not None:
        engine.close()
    run.extra = sum(block.calls for block in mine.blocks) - STEPS * accumulation * len(mine.blocks)  # recomputed
    return run


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[ChaosLink]:
    return late_links(monkeypatch)


@pytest.fixture(scope="module")
def oracle() -> tuple[torch.nn.Module, Run, Run]:
    """A model, plain PyTorch's run, and the engine's without any policy."""
    model = make_model(Model)
    return model, train(model, None, {}), train(model, 2, {})


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_equals_plain_pytorch(
    way: str, oracle: tuple[torch.nn.Module, Run, Run], late: list[ChaosLink], tmp_path: Path
) -> None:
    model, plain, untouched = oracle
    run = train(model, 2, block_of(way, tmp_path))
    assert_close(run, plain)
    # Between policies not one bit differs.
    assert_equal(run, untouched)
    assert run.extra + sum(link.bytes_down for link in late) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (0, "recompute"),
        (0, "recompute and disk"),
        (3, "selective"),
        (3, "recompute and offload"),
    ],
)
def test_checkpoints_in_the_models_code(stage: int, way: str, late: list[ChaosLink], tmp_path: Path) -> None:
    model = make_model(by_hand)
    plain = train(model, None, {})
    run = train(model, stage, {**block_of(way, tmp_path), "policy": "none"})
    assert_close(run, plain)
    assert run.extra == STEPS * 2 * 4
    # Inside a unit that is recomputed already, a checkpoint of the model's own is an ordinary call.
    if way == "recompute":
        assert_equal(train(model, stage, block_of(way, tmp_path)), run)


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (1, "recompute"),
        (2, "offload"),
        (3, "recompute and offload"),
        (3, "offload to disk"),
    ],
)
def test_policies_beside_every_stage(stage: int, way: str, late: list[ChaosLink], tmp_path: Path) -> None:
    """Train on two ranks, without dropout, as ranks that are threads share the generator."""
    more = {"activation_checkpointing": block_of(way, tmp_path)}
    model = make_model(TinyLM)
    run = train_engine(model, stage=stage, ranks=2, accumulation=2, steps=STEPS, config=more)
    assert_equal(run, train_engine(model, stage=stage, ranks=2, accumulation=2, steps=STEPS))


@pytest.mark.parametrize("way", ["auto, scarce", "auto, nothing"])
def test_auto_on_two_ranks(way: str, late: list[ChaosLink], tmp_path: Path) -> None:
    class Counted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x)

    def counted() -> TinyLM:
        model = TinyLM()
        model.blocks = nn.ModuleList(map(Counted, model.blocks))
        return model

    model = make_model(counted)
    run = train_engine(
        model,
        stage=3,
        ranks=2,
        steps=STEPS,
        config={"activation_checkpointing": block_of(way, tmp_path)},
        finish=lambda engine: engine.comm.gather_objects([block.calls for block in engine.module.blocks]),
    )
    assert_equal(run, train_engine(model, stage=3, ranks=2, steps=STEPS))
    assert run.extra[0] == run.extra[1]


@pytest.mark.parametrize(
    ("memory", "kept"),
    [(200, 2), (110, 1), (109, 0), (0, 0)],
)
def test_auto_keeps_the_last_units_that_fit_beside_the_checkpoints(memory: int, kept: int) -> None:
    expected = [Policy.RECOMPUTE] * (2 - kept) + [Policy.KEEP] * kept
    assert choose([100, 100], [10, 10], memory) == expected
