"""A tensor-parallel rank: engines on a model whose blocks are shared out, by policy; it answers in JSON lines."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import activations, systems
from benchmarks.worker import answer_requests
from wherry.train.model import GPTConfig
from wherry.train.parallel import cut_blocks


class Worker:
    def __init__(self) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        ranks = int(os.environ["WORLD_SIZE"])
        self.mesh = init_device_mesh(systems.device_type(), (1, ranks), mesh_dim_names=("dp", "tp"))
        self.trainees: dict[str, activations.Trainee] = {}

    def build(self, name: str, config: dict[str, Any], batch: int, block: dict[str, Any]) -> bool:
        self.trainees[name] = activations.Trainee(
            GPTConfig(**config), batch, block, self.mesh, cut=lambda model: cut_blocks(model, self.mesh)
        )
        return True

    def step(self, name: str) -> float:
        return self.trainees[name].step()

    def peak(self, name: str) -> int:
        return self.trainees[name].peak()


if __name__ == "__main__":
    answer_requests(Worker)
