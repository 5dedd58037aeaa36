"""A program: build a model that does not fit the limit of the process, and print the memory that it took."""

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
from wherry.tickets import DONE, Ticket

WIDTH, LAYERS, RANKS = 3000, 10, 8


class Alone(Comm):
    """One rank of several whose peers hold the same shards."""

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
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def main() -> None:
    torch.set_num_threads(1)
    with wherry.Init({"zero_optimization": {"stage": 3}}, mesh=Alone(0, RANKS)):
        nn.Linear(8, 8)  # imports at first use are not counted
    largest = 4 * (WIDTH * WIDTH + WIDTH)
    shards = LAYERS * largest // RANKS
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    owed = shards + largest
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + 2 * owed, resource.RLIM_INFINITY))
    try:
        build()
        plain = "fits"
    except RuntimeError as error:
        plain = str(error)
    Path("/proc/self/clear_refs").write_text("5")
    with wherry.Init({"zero_optimization": {"stage": 3}}, mesh=Alone(0, RANKS)):
        model = build()
    took = status("VmHWM") - before
    # Parameters on the allocator's heap, freed between small objects that stay.
    Path("/proc/self/clear_refs").write_text("5")
    before, largest = status("VmRSS"), 4 * (1024 * 1024 + 1024)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with wherry.Init({"zero_optimization": {"stage": 3}}, mesh=Alone(0, 2)):
        many = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(40)))
        many.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    small = {"small took": status("VmHWM") - before, "small owed": len(many) * largest // 2 + largest}
    json.dump({"plain": plain, "took": took, "owed": owed, "built": len(model), **small, **from_meta()}, sys.stdout)


def from_meta() -> dict[str, int]:
    """Measure the parameters of a model from the meta device before a backward writes gradients."""

    def engine_of(width: int, layers: int) -> wherry.Engine:
        with wherry.Init(meta=True):
            blocks = [nn.Sequential(*(nn.Linear(width, width) for _ in range(6))) for _ in range(layers)]
            model = nn.Sequential(*blocks)
        return wherry.initialize(model=model, config={"zero_optimization": {"stage": 3}})[0]

    small = engine_of(8, 2)
    before = status("VmRSS")
    large = engine_of(768, 12)
    rest = status("VmRSS") - before
    weights = sum(parameter.nbytes for parameter in large.module.parameters())
    for engine in (small, large):
        engine.close()
    return {"meta rest": rest, "meta owed": weights}
