"""Random cases of experts and branches that steps leave out: parameters without a gradient stay unchanged.

Every case trains one model by plain PyTorch and by the engine under every exact update policy, on a placement, ranks,
an optimizer, an accumulation and clipping drawn from the case's number; some resume from a checkpoint on others.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.engine.harness import assert_near, assert_same, make_model, masters_of, settings
from tests.tiers.rows import ROWS
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.update.optimizer import Lion

WIDTH, STEPS = 12, 4
EXPERTS, BLOCKS = 3, 3
TOLERANCE = 1e-6
UNUSED = ("never.weight", "never.bias")
# Damped, so that no rounding of a gradient near zero becomes a whole step.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-2, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-2, weight_decay=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=3e-3, lr_decay=0.1, eps=1e-2, initial_accumulator_value=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=2e-3, eps=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=2e-3, eps=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
}
# State on disk, and 8-bit and bf16 moments, are updated by the native kernels.
NATIVE = ("adam", "adamw", "adagrad", "sgd", "sgd momentum", "lion")


class Block(nn.Module):
    """A unit of which steps run parts: a layer that always runs, experts, and a branch."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH + number + i) for i in range(EXPERTS))
        self.back = nn.ParameterList(nn.Parameter(torch.randn(WIDTH + number + i, WIDTH) / 4) for i in range(EXPERTS))
        self.branch = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))

    def forward(self, x: torch.Tensor, experts: Sequence[int], branch: bool) -> torch.Tensor:
        x = x + torch.tanh(self.always(x))
        for i in experts:
            x = x + torch.tanh(self.experts[i](x)) @ self.back[i]
        return x + self.branch(x) if branch else x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(BLOCKS))
        self.never = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, paths: Sequence[tuple[Sequence[int], bool]]) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block, path in zip(self.blocks, paths, strict=True):
            x = block(x, *path)
        return self.head(x).float().square().mean()


@dataclass(frozen=True)
class Case:
    number: int
    optimizer: str
    row: str
    ranks: int
    accumulation: int
    clip: float
    groups: bool
    precision: dict[str, Any]
    # Steps before a checkpoint, and the ranks and the placement that resume from it.
    resume: tuple[int, int, str] | None
    # Give the device memory of its own, and make copies, disk and collectives late.
    late: bool
    # At stage 3 on four ranks: groups of two, or secondary shards.
    nodes: str | None
    # Elements that stage 3 prefetches, and the classes of units, which may be nested.
    prefetch: int
    units: tuple[str, ...]

    @classmethod
    def draw(cls, number: int) -> Case:
        draw = random.Random(number)
        rows = {**{f"stage-{s}": (s, "none", "none") for s in range(4)}, **ROWS}
        optimizer = draw.choice(list(OPTIMIZERS))
        fitting = [row for row, (_, state, _) in rows.items() if optimizer in NATIVE or state != "nvme"]
        # Lion takes signs, which have no tolerance: two summands have one sum, whatever their order.
        small = optimizer == "lion"
        ranks = draw.choice([1, 1, 2] if small else [1, 1, 2, 3])
        accumulation = draw.choice([1, 2 // ranks] if small else [1, 1, 2])
        low = {"bf16": {"enabled": True}}
        lossy = low | {"wherry": {"state_dtype": draw.choice(["bf16", "int8"])}}
        row = draw.choice(fitting)
        kinds = [{}, {}, {}, low, lossy if optimizer in NATIVE and rows[row][1] != "none" else low]
        resume = None
        if draw.random() < 0.3:
            resume = draw.randrange(1, STEPS), draw.choice([1, 2] if small else [1, 2, 3]), draw.choice(fitting)
        precision = draw.choice(kinds)
        if resume is not None and "wherry" in precision and rows[resume[2]][1] == "none":
            resume = None  # lossy state needs the host
        nodes = None
        if row == "stage-3" and not small and draw.random() < 0.5:
            nodes, ranks, resume = draw.choice(["mics_shard_size", "zero_hpz_partition_size"]), 4, None
        units = draw.choice([("Block",), ("Block", "Sequential")])
        return cls(
            number, optimizer, row, ranks, accumulation, draw.choice([0.0, 0.0, 0.5]) if not small else 0.0,
            draw.random() < 0.5, precision, resume,
            draw.random() < 0.3, nodes, draw.choice([0, 600, 10**6]), units,
        )  # fmt: skip

    def batch(self, step: int, micro: int, rank: int) -> tuple[torch.Tensor, list[tuple[list[int], bool]]]:
        draw = random.Random(f"{self.number} {step} {micro} {rank}")
        paths = [([i for i in range(EXPERTS) if draw.random() < 0.3], draw.random() < 0.3) for _ in range(BLOCKS)]
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        return torch.randn(2, WIDTH, generator=generator), paths

    def parameters(self, model: nn.Module) -> Any:
        if not self.groups:
            return model.parameters()
        first = [p for name, p in model.named_parameters() if "experts" in name or "always.bias" in name]
        rest = [p for p in model.parameters() if not any(p is other for other in first)]
        return [{"params": first}, {"params": rest, "lr": 2e-3}]

    def policies(self) -> list[str]:
        return ["at_step", "before_use", *(["in_backward"] if not self.clip else [])]

    def config(self, row: str, ranks: int, policy: str, folder: Path, clip: float | None = None) -> dict[str, Any]:
        stage, state, weights = ROWS.get(row) or (int(row[-1]), "none", "none")
        zero: dict[str, Any] = {"stage3_prefetch_bucket_size": self.prefetch}
        zero |= {self.nodes: 2} if self.nodes else {}
        disk = {"cpu": {}, "nvme": {"nvme_path": str(folder)}}
        if state != "none":
            zero["offload_optimizer"] = {"device": state} | disk[state]
        if weights != "none":
            zero["offload_param"] = {"device": weights} | disk[weights]
        own = {"update_policy": policy, "unit_classes": list(self.units)}
        own |= {"delayed_update_warmup": 1} if policy == "delayed" else {}
        own |= self.precision.get("wherry", {})
        accumulation = self.ranks * self.accumulation // ranks
        return settings(
            stage, accumulation, self.clip if clip is None else clip,
            {**self.precision, "zero_optimization": zero, "wherry": own},
        )  # fmt: skip


def plain(case: Case, model: nn.Module, *, late: bool = False) -> dict[str, torch.Tensor]:
    """Train by plain PyTorch: the oracle. With `late`, gradients are of the weights of one update before."""
    model = copy.deepcopy(model)
    behind = copy.deepcopy(model)
    optimizer = OPTIMIZERS[case.optimizer](case.parameters(model))
    count = case.ranks * case.accumulation
    for step in range(STEPS):
        source = behind if late else model
        source.zero_grad()
        for rank, micro in itertools.product(range(case.ranks), range(case.accumulation)):
            (source(*case.batch(step, micro, rank)) / count).backward()
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            p.grad = q.grad
        if late:
            behind.load_state_dict(model.state_dict())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(case: Case, model: nn.Module, policy: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train through the engine and return the fp32 masters."""
    saved = folder / f"{policy}-saved"

    def part(row: str, ranks: int, first: int, last: int, resumed: bool) -> dict[str, torch.Tensor]:
        def body(comm: Comm) -> dict[str, torch.Tensor]:
            mine = copy.deepcopy(model)
            chaos = Chaos(4 * case.number + comm.rank) if case.late else None
            engine, *_ = wherry.initialize(
                model=mine,
                optimizer=OPTIMIZERS[case.optimizer](case.parameters(mine)),
                config=case.config(row, ranks, policy, folder),
                mesh=topology(comm, chaos, link=None if chaos is None else ChaosLink(chaos)),
            )
            if resumed:
                engine.load_checkpoint(saved)
            per_rank = case.ranks * case.accumulation // ranks
            for step in range(first, last):
                for index in range(comm.rank * per_rank, (comm.rank + 1) * per_rank):
                    rank, micro = divmod(index, case.accumulation)
                    engine.backward(engine(*case.batch(step, micro, rank)))
                    engine.step()
            if last < STEPS:
                engine.save_checkpoint(saved)
            masters = masters_of(engine)
            engine.close()
            return masters

        return run_ranks(ranks, body)[0]

    if case.resume is None:
        return part(case.row, case.ranks, 0, STEPS, False)
    at, ranks, row = case.resume
    part(case.row, case.ranks, 0, at, False)
    if (case.ranks * case.accumulation) % ranks:
        ranks = case.ranks
    return part(row, ranks, at, STEPS, True)


def check(number: int) -> None:
    """Train a case, and compare its masters with each other's and with the oracle's."""
    case = Case.draw(number)
    model = make_model(Branching, seed=number)
    with tempfile.TemporaryDirectory() as folder:
        first = trained(case, model, "at_step", Path(folder))
        for policy in case.policies()[1:]:
            assert_same(trained(case, model, policy, Path(folder)), first)
        if case.precision:
            return
        assert_near(first, plain(case, model), TOLERANCE)
        if case.resume is None and ROWS.get(case.row, (0, "none"))[1] != "none":
            assert_near(trained(case, model, "delayed", Path(folder)), plain(case, model, late=True), TOLERANCE)
    before = dict(model.named_parameters())
    assert_same({name: first[name] for name in UNUSED}, {name: before[name] for name in UNUSED})
