"""A plan's device memory of a step against the peak of torch's allocator."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.warm import DEVICE, warm_up
from tests.tiers.rows import zero_block
from torch import nn

import wherry
from wherry.plan.machines import described, known
from wherry.train.model import GPT, GPTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="needs an accelerator: run `pytest tests/gpu` where there is one"),
]

# 110 million parameters, and 7 million on a device that a CPU computes for.
EMULATED = DEVICE is not None and DEVICE.type == "emulated"
LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, MICRO = (
    (8, 256, 4, 64, 1024, 2) if EMULATED else (8, 1024, 16, 512, 8192, 8)
)
BF16 = {"bf16": {"enabled": True}}
WARM, MEASURED = 2, 2


def offload(stage: int, optimizer: str, param: str, folder: Path, **more: Any) -> dict[str, Any]:
    zero = zero_block(stage, optimizer, param, folder)
    zero["offload_optimizer"] |= more
    return BF16 | {"zero_optimization": zero}


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "fp32": {},
        "bf16": BF16,
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
        "recomputed": BF16 | {"activation_checkpointing": {"policy": "recompute"}},
        "activations on the host": BF16
        | {"activation_checkpointing": {"policy": "offload", "cpu_checkpointing": True}},
        "sums in fp32": BF16 | {"gradient_accumulation_steps": 3, "data_types": {"grad_accum_dtype": "fp32"}},
        "together": BF16 | {"gradient_accumulation_steps": 2, "wherry": {"accumulation": "layer_major"}},
        "optimizer on the host": offload(2, "cpu", "none", folder),
        "half of it": offload(2, "cpu", "none", folder, ratio=0.5),
        "weights too": offload(3, "cpu", "cpu", folder),
        "updates after the norm": offload(3, "cpu", "cpu", folder) | {"gradient_clipping": 1.0},
        "on disk": offload(3, "nvme", "nvme", folder),
    }


def make(micro_batch: int = MICRO, sequence: int = SEQUENCE) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    config = GPTConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS, sequence=sequence, vocabulary=VOCABULARY)
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    return GPT(config), (ids, ids)


def highest(config: dict[str, Any]) -> int:
    """Measure the allocator's peak over some steps, above what it had before the engine."""
    gc.collect()
    warm_up()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    model, (ids, labels) = make()
    engine, *_ = wherry.initialize(
        model=model, config=config, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)
    )
    ids, labels = ids.to(DEVICE), labels.to(DEVICE)
    together = config.get("wherry", {}).get("accumulation") == "layer_major"
    for step in range(WARM + MEASURED):
        if step == WARM:
            engine.settle()
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        if together:
            engine.train_batch(iter([(ids, labels)] * engine.gradient_accumulation_steps()))
            continue
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(ids, labels))
            engine.step()
    engine.settle()
    torch.accelerator.synchronize()
    found = torch.accelerator.max_memory_allocated() - before
    engine.close()
    return found


NAMES = tuple(configs(Path()))
if EMULATED:  # a CPU takes long for each
    NAMES = ("bf16", "recomputed", "half of it", "updates after the norm", "on disk")


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_within_eight_percent_of_the_allocators_peak(name: str, tmp_path: Path) -> None:
    config = configs(tmp_path)[name] | {"train_micro_batch_size_per_gpu": MICRO}
    machine = described(known("a100"), gpus=1)
    told = wherry.estimate(make, config, machine, ranks=1, sequence=SEQUENCE)
    use = told.uses[0]
    assert use.place == "GPU"
    seen = highest(config)
    rows = {(row.category, row.tier): row.bytes for row in told.rows}
    assert seen == pytest.approx(use.needed, rel=0.08), rows
