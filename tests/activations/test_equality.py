"""Every policy equals plain PyTorch, with dropout on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.activations.model import Model, by_hand, late_links
from tests.engine.harness import Run, TinyLM, assert_close, assert_equal, make_model, train_engine, train_plain
from torch import nn

from wherry.activations.auto import Policy, choose
from wherry.testing.late import ChaosLink

STEPS = 3

WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": "recompute"},
    "every second": {"policy": "recompute", "every": 2},
    "selective": {"policy": "recompute", "save_operations": ["matmul", "attention"]},
    "offload": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": 1},
    "recompute and offload": {"cpu_checkpointing": True, "offload_min_bytes": 1},
    "recompute and disk": {"nvme_path": "DISK", "offload_min_bytes": 1},
    "offload to disk": {"policy": "offload", "nvme_path": "DISK", "offload_min_bytes": 1},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 3},
    "auto, scarce": {"policy": "auto", "memory": "20000B"},
    "auto, nothing": {"policy": "auto", "memory": 0, "cpu_checkpointing": True, "offload_min_bytes": 1},
    "synchronized": {"policy": "recompute", "synchronize_checkpoint_boundary": True, "profile": True},
}
# Lives of tests/life.py have these.
IN_LIVES = ("recompute", "offload", "offload to disk")


def block_of(way: str, tmp_path: Path) -> dict[str, Any]:
    return {key: str(tmp_path) if value == "DISK" else value for key, value in WAYS[way].items()}


def recomputed(engine: Any) -> int:
    """Count calls of blocks beyond one for each micro-batch."""
    return sum(block.calls for block in engine.module.blocks) - STEPS * 2 * len(engine.module.blocks)


def train(model: nn.Module, stage: int, block: dict[str, Any]) -> Run:
    torch.manual_seed(7)
    config = {"activation_checkpointing": block}
    return train_engine(model, stage=stage, accumulation=2, steps=STEPS, config=config, finish=recomputed)


def plain_of(model: nn.Module) -> Run:
    torch.manual_seed(7)
    return train_plain(model, accumulation=2, steps=STEPS)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[ChaosLink]:
    return late_links(monkeypatch)


@pytest.fixture(scope="module")
def oracle() -> tuple[nn.Module, Run, Run]:
    """A model, plain PyTorch's run, and the engine's without any policy."""
    model = make_model(Model)
    return model, plain_of(model), train(model, 2, {})


@pytest.mark.parametrize("way", [way for way in WAYS if way not in IN_LIVES])
def test_a_policy_equals_plain_pytorch(
    way: str, oracle: tuple[nn.Module, Run, Run], late: list[ChaosLink], tmp_path: Path
) -> None:
    model, plain, untouched = oracle
    run = train(model, 2, block_of(way, tmp_path))
    assert_close(run, plain)
    # Between policies not one bit differs.
    assert_equal(run, untouched)
    assert run.extra + sum(link.bytes_down for link in late) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stage", "way"), [(0, "recompute"), (3, "recompute and offload")])
def test_checkpoints_in_the_models_code(stage: int, way: str, late: list[ChaosLink], tmp_path: Path) -> None:
    model = make_model(by_hand)
    run = train(model, stage, {**block_of(way, tmp_path), "policy": "none"})
    assert_close(run, plain_of(model))
    assert run.extra == STEPS * 2 * 4
    # Inside a unit that is recomputed already, a checkpoint of the model's own is an ordinary call.
    if way == "recompute":
        assert_equal(train(model, stage, block_of(way, tmp_path)), run)


def test_auto_recomputes_the_same_units_on_all_ranks(tmp_path: Path) -> None:
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

    def calls(engine: Any) -> list[list[int]]:
        return engine.comm.gather_objects([block.calls for block in engine.module.blocks])

    model, common = make_model(counted), {"stage": 3, "ranks": 2, "steps": STEPS}
    config = {"activation_checkpointing": block_of("auto, scarce", tmp_path)}
    run = train_engine(model, config=config, finish=calls, **common)  # type: ignore[arg-type]
    assert_equal(run, train_engine(model, **common))  # type: ignore[arg-type]
    assert run.extra[0] == run.extra[1]


@pytest.mark.parametrize(("memory", "kept"), [(200, 2), (110, 1), (109, 0), (0, 0)])
def test_auto_keeps_the_last_units_that_fit_beside_the_checkpoints(memory: int, kept: int) -> None:
    expected = [Policy.RECOMPUTE] * (2 - kept) + [Policy.KEEP] * kept
    assert choose([100, 100], [10, 10], memory) == expected
