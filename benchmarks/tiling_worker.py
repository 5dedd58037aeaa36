"""A rank that trains one linear layer in tiles, and says what was live meanwhile; it answers in JSON lines."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

import wherry
from benchmarks.worker import answer_requests, forget_peak, peak_bytes, resident_bytes

BATCH = 4


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) - y).square().mean()


def config_of(budget: int, folder: str) -> dict[str, Any]:
    """Nothing is kept in memory that may be on disk, and nothing is gathered before it is needed."""
    elements = budget // 4
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": elements,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": elements // 2,
            "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 1},
            "offload_optimizer": {"device": "nvme", "nvme_path": folder, "buffer_count": 1},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "wherry": {"tile_linear": True, "update_policy": "in_backward"},
    }


class Worker:
    def train(self, width: int, budget: int, steps: int, folder: str) -> dict[str, Any]:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        rank = int(os.environ["RANK"])
        with torch.device("meta"):
            model = Model(width)
        forget_peak()
        empty = resident_bytes()
        engine, *_ = wherry.initialize(model=model, config=config_of(budget, folder))
        generator = torch.Generator().manual_seed(rank)
        x, y = (torch.randn(BATCH, width, generator=generator) for _ in range(2))
        losses, seconds = [], []
        for _ in range(steps):
            begun = time.perf_counter()
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            seconds.append(time.perf_counter() - begun)
            losses.append(float(loss.detach()))
        engine.settle()
        found = {"live_bytes": 4 * engine._gatherer.peak_live, "peak_bytes": peak_bytes() - empty}
        found |= {"losses": losses, "seconds": seconds, "tiles": len(model.layer.tiles)}
        engine.close()
        return found


if __name__ == "__main__":
    answer_requests(Worker)
