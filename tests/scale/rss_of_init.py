"""Run by test_init: builds a model that does not fit the process's limit, and prints what it took."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import torch
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.tiers.tickets import DONE, Ticket

WIDTH, LAYERS, RANKS = 3000, 10, 8


class Alone(Comm):
    """One rank of several whose peers hold what this one holds."""

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        assert op == "max"
        return DONE

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        return DONE

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        for part in whole.chunk(self.size):
            part.copy_(shard)
        return DONE


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def main() -> None:
    torch.set_num_threads(1)
    with wherry.Init({"zero_optimization": {"stage": 3}}, mesh=Alone(0, RANKS)):
        nn.Linear(8, 8)  # what is loaded at first use is not of the model
    largest = 4 * (WIDTH * WIDTH + WIDTH)
    shards = LAYERS * largest // RANKS
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    limit = status("VmData") + 2 * (shards + largest)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        build()
        plain = "fits"
    except RuntimeError as error:
        plain = str(error)
    Path("/proc/self/clear_refs").write_text("5")
    with wherry.Init({"zero_optimization": {"stage": 3}}, mesh=Alone(0, RANKS)):
        model = build()
    json.dump(
        {"plain": plain, "took": status("VmHWM") - before, "owed": shards + largest, "built": len(model)}, sys.stdout
    )


if __name__ == "__main__":
    main()
