"""A real engine on ranks that are threads, counted as a dry run counts its own."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.harness import VOCABULARY
from torch import nn
from torch.nn import functional as F
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
# Every flat by itself: which small ones share a collective depends on buffers that the comparisons count.
ALONE = {"reduce_bucket_size": 0, "allgather_bucket_size": 0}


def config(stage: int, accumulation: int = 1, precision: str = "bf16", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **ALONE},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **more,
    }


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(self.norm(x)))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Wide enough that alignment adds little; a dry run's time is that of its operations, so its blocks are few."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Layer(WIDTH) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x * self.scale.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def make(micro_batch: int = MICRO, sequence: int = LENGTH) -> tuple[nn.Module, Any]:
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    return Model(), (ids, ids)


def one_block(micro_batch: int = MICRO, sequence: int = LENGTH) -> tuple[nn.Module, Any]:
    return Model(blocks=1), make(micro_batch, sequence)[1]


def deep(micro_batch: int = MICRO, sequence: int = LENGTH) -> tuple[nn.Module, Any]:
    """The same with four blocks, where checkpoints of two blocks each are to differ from one of all."""
    return Model(blocks=4), make(micro_batch, sequence)[1]


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


Optimizer = Callable[[Any], torch.optim.Optimizer]


def observed(
    config: dict[str, Any],
    comm: Comm,
    model: nn.Module,
    args: Any,
    *,
    gpu: bool = False,
    optimizer: Optimizer = torch.optim.AdamW,
    tensor: bool = False,
) -> Counts:
    """Of a step on one rank. `tensor`: ranks share the model, not data."""
    with Recorder(elsewhere={HOST} if gpu else ()) as recorder:
        topology = Topology(
            SoloComm() if tensor else comm,
            torch.device("cpu"),
            comm.rank,
            comm.rank,
            comm.size,
            comm if tensor else SoloComm(),
            link=lambda pin: SeenLink(recorder, gpu),
        )
        engine, *_ = wherry.initialize(model=WithLoss(model), config=config, mesh=topology, optimizer=optimizer)
        step = Step(engine, (args, {}), configs.load(config), recorder, Counter())
        step.make()
        comm.barrier()  # until then another rank may hold what it reads of this one's
        step.begin_counting()
        step.make()
        counts = step.counts()
        engine.close()
    return counts


def measure(
    config: dict[str, Any],
    ranks: int,
    *,
    gpu: bool = False,
    optimizer: Optimizer = torch.optim.AdamW,
    tensor: bool = False,
    build: Callable[[], tuple[nn.Module, Any]] = make,
) -> list[Counts]:
    """By rank."""
    model, args = build()

    def body(comm: Comm) -> Counts:
        mine, seen = copy.deepcopy(model), unseen(comm)
        return observed(config, seen, mine, args, gpu=gpu, optimizer=optimizer, tensor=tensor)

    with sizes_shown():
        return run_ranks(ranks, body)


@contextmanager
def sizes_shown() -> Iterator[None]:
    """Memory of gathered weights is torch's own: a footprint sees the sizes of storages, and no pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "_system", lambda: None)
        yield
