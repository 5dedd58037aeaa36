"""Models of many equal blocks: runs of a few of them come to what a run of all comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.measured import config
from torch import nn

from wherry import config as configs
from wherry.plan import dry_run
from wherry.plan.dry_run import count, count_by_blocks, outline
from wherry.plan.parts import Outline, ends, longest_run
from wherry.sources import find

WIDTH = 1024
# The least that is counted by fewer blocks, and of an engine that looks one block ahead.
LAYERS, LAYERS_AHEAD = 15, 19
AHEAD = {"stage3_prefetch_bucket_size": 10**6, "stage3_param_persistence_threshold": 0}


class Block(nn.Sequential):
    """With few operations: each takes a dry run a millisecond."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.GELU())


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return (x @ self.embed.weight.T).float().mean()


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **AHEAD, **more}}


DISK = {"device": "nvme", "nvme_path": ".", "buffer_count": 1}
CHECKPOINTS = {"policy": "recompute", "cpu_checkpointing": True}
# Layers, a config, and whether the device has memory of its own.
CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "data parallel": (LAYERS, zero(0) | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, False),
    "ZeRO-2": (LAYERS, zero(2), True),
    "recomputed": (LAYERS_AHEAD, zero(3) | {"activation_checkpointing": {"policy": "recompute"}}, False),
    "on disk": (LAYERS_AHEAD, zero(3, offload_optimizer=DISK, offload_param=DISK | {"max_in_cpu": 0}), True),
    # Activations of a block are more than what is brought back ahead.
    "activations on the host": (
        LAYERS_AHEAD,
        zero(2) | {"activation_checkpointing": CHECKPOINTS, "train_micro_batch_size_per_gpu": 2**15},
        True,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "data parallel" else pytest.mark.long) for name in CASES]
)
def test_few_blocks_tell_of_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layers, more, gpu = CASES[name]
    source = find(lambda micro_batch=2: (Deep(layers), torch.zeros(micro_batch, 32, dtype=torch.int64)))
    given = configs.load(config(0) | more)
    ran: list[Any] = []
    monkeypatch.setattr(dry_run, "count", lambda *given, **how: ran.append(how.get("blocks")) or count(*given, **how))
    few = count_by_blocks(source, given, outline(source), ranks=4, gpu=gpu)
    whole = count(source, given, ranks=4, gpu=gpu)
    assert max(ran) < layers
    assert few.parameters == whole.parameters
    for named in ("calls", "bytes", "moved", "states"):
        assert getattr(few, named) == pytest.approx(getattr(whole, named), rel=0.001, abs=512), named
    lines = few.lines(gpu=gpu), whole.lines(gpu=gpu)
    peaks = [sum(line.at_peak for line in found if line.tier == "device") for found in lines]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    for told, seen in zip(*lines, strict=True):
        assert (told.category, told.tier) == (seen.category, seen.tier)
        # Of two moments that are as high one is told of, and what they consist of may differ.
        if (told.category, told.tier) != ("buffers", "device"):
            assert told.highest == pytest.approx(seen.highest, rel=0.02, abs=4096), (told.category, told.tier)
    assert sum(few.operations.values()) == pytest.approx(sum(whole.operations.values()))


class Counted(nn.Sequential):
    """Its forward asks for a block by its number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(15):
            x = self[number](x)
        return x.sum()


def test_a_forward_that_counts_its_blocks_is_run_whole() -> None:
    source = find(lambda: (Counted(*(nn.Linear(64, 64) for _ in range(15))), torch.zeros(2, 64)))
    assert count_by_blocks(source, configs.load({}), outline(source), ranks=1).parameters == 15 * (64 * 64 + 64)


def test_only_equal_blocks_that_follow_each_other_are_a_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, 8) if i == 3 else nn.Linear(4, 4) for i in range(9)))
    run = longest_run(model)
    assert run is not None and (run.start, run.length) == (5, 5)
    run.keep(2)
    assert len(model) == 7 and [name for name, _ in model.named_children()] == [str(i) for i in range(7)]
    assert longest_run(nn.Linear(2, 2)) is None


def test_budgets_for_the_whole_model_are_not_met_by_a_few_of_its_blocks() -> None:
    of, offload = Outline(10**7, 10**7, 10**6, 9, 1000 * 1001, width=1000), {"device": "cpu", "ratio": 0.5}
    few = ends(configs.load({}), of, 1000)
    assert ends(configs.load({"zero_optimization": {"offload_optimizer": offload}}), of, 1000) is None
    away = configs.load({"activation_checkpointing": {"cpu_checkpointing": True}})
    assert ends(away, of, 1000) is None and ends(away, of, 20_000) == 1 + few  # 4 MB of a block, and 80
    looks = configs.load({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5_000_000}})
    assert ends(looks, of, 1000) == 5 + few
