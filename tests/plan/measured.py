"""A real engine on ranks that are threads, counted as a dry run counts its own."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import wherry
from wherry import config as configs
from wherry.observe.footprint import Footprint
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import Topology
from wherry.plan.counts import HOST, Counts
from wherry.plan.dry_run import Step, WithLoss
from wherry.plan.imagined import held
from wherry.plan.operations import Recorder
from wherry.testing import ThreadComm, run_ranks
from wherry.tickets import Ticket
from wherry.tiers import elastic
from wherry.tiers.buffers import HostPool
from wherry.tiers.streams import Link

WIDTH, LENGTH, MICRO = 64, 24, 2
# Every flat by itself: small ones would share a collective, whose buffer is larger than what a stage saves.
ALONE = {"reduce_bucket_size": 0, "allgather_bucket_size": 0}


def config(stage: int, accumulation: int = 1, precision: str = "bf16", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **ALONE},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **more,
    }


def placed(stage: int, optimizer: str, parameters: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Write the config of states that rest elsewhere, from a row of tests/tiers/rows.py."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, **ALONE}
    for name, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        zero[name] = {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})
    if parameters == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0
    return config(stage, zero_optimization=zero, **more)


class Model(TinyLM):
    """Wide enough that alignment adds little; a dry run's time is that of its operations, so its blocks are few."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(blocks, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))


def make(micro_batch: int = MICRO, sequence: int = LENGTH) -> tuple[nn.Module, Any]:
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    return Model(), (ids, ids)


def one_block(micro_batch: int = MICRO, sequence: int = LENGTH) -> tuple[nn.Module, Any]:
    return Model(blocks=1), make(micro_batch, sequence)[1]


class Unseen(ThreadComm):
    """A rank whose collectives make no tensor that counts.

    The others are given copies: they may hold them a moment longer than this rank does.
    """

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        with _disable_current_modes():
            mine = tensor.clone()
            super()._all_reduce(mine, op).wait()
            tensor.copy_(mine)
            return held(tensor)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        with _disable_current_modes():
            return held(shard, whole, ticket=super()._reduce_scatter(shard, whole.clone()))

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        with _disable_current_modes():
            return held(whole, shard, ticket=super()._all_gather(whole, shard.clone()))

    def _group(self, axis: str, members: list[int]) -> Comm:
        return unseen(super()._group(axis, members))


def unseen(comm: Comm) -> Comm:
    comm.__class__ = Unseen
    return comm


class SeenPool(HostPool):
    """Host buffers that the footprint knows for what they are."""

    def __init__(self, footprint: Footprint) -> None:
        super().__init__()
        self._footprint = footprint

    def _allocate(self, size: int) -> torch.Tensor:
        buffer = super()._allocate(size)
        self._footprint.label(HOST, [buffer])
        return buffer


class SeenLink(Link):
    """A way between host and device, which has memory of its own if `gpu`, as far as the engine can see."""

    def __init__(self, footprint: Footprint, gpu: bool) -> None:
        self.device = torch.device("cpu")
        self.host = SeenPool(footprint)
        self.shared = not gpu


def measure(
    config: dict[str, Any],
    ranks: int,
    *,
    gpu: bool = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    build: Callable[[], tuple[nn.Module, Any]] = make,
) -> list[Counts]:
    """Count a step of a real engine on each rank."""
    model, args = build()

    def body(comm: Comm) -> Counts:
        mine, seen = copy.deepcopy(model), unseen(comm)
        with Recorder(elsewhere={HOST} if gpu else ()) as recorder:
            topology = Topology(
                *(seen, torch.device("cpu"), comm.rank, comm.rank, comm.size, SoloComm()),
                link=lambda pin: SeenLink(recorder, gpu),
            )
            engine, *_ = wherry.initialize(model=WithLoss(mine), config=config, mesh=topology, optimizer=optimizer)
            step = Step(engine, (args, {}), configs.load(config), recorder, Counter())
            step.make()
            comm.barrier()  # until then another rank may hold what it reads of this one's
            step.begin_counting()
            step.make()
            counts = step.counts()
            engine.close()
        return counts

    with pytest.MonkeyPatch.context() as patch:
        # Memory of gathered weights is torch's own: a footprint sees the sizes of storages, and no pages.
        patch.setattr(elastic, "_system", lambda: None)
        return run_ranks(ranks, body)
