"""Parameters without a gradient stay unchanged, as in plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    assert_near,
    make_model,
    train_engine,
    train_plain,
)
from tests.models import D
from tests.tiers.rows import ROWS, zero_block
from torch import nn

from wherry.testing.late import Chaos, topology
from wherry.update.optimizer import Lion

STEPS = 3
# Damped, so that no rounding of a gradient near zero becomes a whole step.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=3e-3, eps=1e-2, weight_decay=0.1),
    "adamw amsgrad": partial(torch.optim.AdamW, lr=3e-3, eps=1e-2, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=3e-3, lr_decay=0.1, eps=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.02, weight_decay=0.1),
    "sgd momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "lion": partial(Lion, lr=1e-3, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-2, momentum=0.5, centered=True, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=2e-3, eps=1e-2),
    "asgd": partial(torch.optim.ASGD, lr=1e-2, t0=2),
}


class Block(nn.Module):
    """A unit of which steps run parts: a layer that always runs, experts, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(D, D)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(D)) for _ in range(3))
        self.branch = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D))

    def forward(self, x: torch.Tensor, experts: Sequence[int], branch: bool) -> torch.Tensor:
        x = x + torch.tanh(self.always(x))
        for number in experts:
            x = x + torch.tanh(self.experts[number](x)) * self.gains[number]
        return x + self.branch(x) if branch else x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.never = nn.Linear(D, 3)
        self.head = nn.Linear(D, 4)

    def forward(self, x: torch.Tensor, paths: Sequence[tuple[Sequence[int], bool]]) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block, path in zip(self.blocks, paths, strict=True):
            x = block(x, *path)
        return self.head(x).float().square().mean()


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, list[tuple[list[int], bool]]]:
    draw = random.Random(f"{step} {micro} {rank}")
    paths = [([n for n in range(3) if draw.random() < 0.3], draw.random() < 0.3) for _ in range(3)]
    return torch.randn(2, D, generator=torch.Generator().manual_seed(draw.randrange(2**31))), paths


# Optimizer; stage or row of placement; update policy; ranks; micro-batches; clipping; further keys of the zero block.
CASES: list[tuple[str, str, str, int, int, float, dict[str, Any]]] = [
    ("adamw", "stage-0", "in_backward", 2, 1, 0.0, {}),
    ("adamw", "disk-3", "in_backward", 2, 1, 0.0, {}),
    ("adamw", "offload-3-parameters", "before_use", 3, 1, 0.5, {"stage3_prefetch_bucket_size": 600}),
    ("adamw", "stage-3", "before_use", 4, 1, 0.5, {"mics_shard_size": 2}),
    ("adamw amsgrad", "offload-1", "before_use", 2, 2, 0.5, {}),
    ("adagrad", "infinity", "at_step", 2, 1, 0.5, {}),
    ("sgd", "stage-2", "at_step", 3, 1, 0.0, {}),
    ("sgd momentum", "disk-0", "before_use", 1, 2, 0.0, {}),
    ("sgd momentum", "stage-3", "in_backward", 4, 1, 0.0, {"zero_hpz_partition_size": 2}),
    ("lion", "parameters-only", "at_step", 1, 2, 0.0, {}),
    ("rmsprop", "stage-1", "before_use", 2, 1, 0.5, {}),
    ("nadam", "stage-3", "in_backward", 2, 1, 0.0, {}),
    ("asgd", "offload-2", "at_step", 2, 1, 0.0, {}),
]


@pytest.mark.parametrize(("name", "row", "policy", "ranks", "accumulation", "clip", "more"), CASES)
def test_experts_and_branches_that_steps_leave_out(
    name: str, row: str, policy: str, ranks: int, accumulation: int, clip: float, more: dict[str, Any], tmp_path: Path
) -> None:
    """Draw the experts and branches that each step, micro-batch and rank runs; copies and collectives are late."""
    model = make_model(Branching)
    common: dict[str, Any] = {"ranks": ranks, "accumulation": accumulation, "steps": STEPS, "clip": clip}
    common |= {"optimizer": OPTIMIZERS[name], "batch": batch}
    stage, *tiers = ROWS.get(row) or (int(row[-1]), "none", "none")
    own = {"update_policy": policy, "unit_classes": ["Block", "Sequential"] if ranks < 3 else ["Block"]}
    config = {"zero_optimization": zero_block(stage, *tiers, tmp_path) | more, "wherry": own}
    how: dict[str, Any] = {"stage": stage, **common}
    how["place"] = lambda comm: topology(comm, Chaos(comm.rank)) if row in ROWS else comm
    ours, never = train_engine(model, config=config, **how).weights, model.get_parameter("never.weight")
    assert_near(ours, train_plain(model, **common).weights, 1e-6)
    assert torch.equal(ours["never.weight"], never)
    low = train_engine(model, config=config | {"bf16": {"enabled": True}}, **how).weights
    assert torch.equal(low["never.weight"], never.bfloat16())


def test_the_root_unit_is_reduced_after_units_that_a_rank_skips() -> None:
    """Use a branch that completes after the root unit while all ranks skip it, and that one rank runs later."""

    def one_branch(step: int, micro: int, rank: int) -> tuple[Any, ...]:
        return batch(step, micro, rank)[0], [([], rank == 1 and step > 0), ([], False), ([], False)]

    common: dict[str, Any] = {"ranks": 2, "steps": STEPS, "optimizer": OPTIMIZERS["adamw"], "batch": one_branch}
    config = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}, "wherry": {"unit_classes": ["Sequential"]}}
    ours = train_engine(make_model(Branching), stage=3, config=config, **common)
    assert_near(ours.weights, train_plain(make_model(Branching), **common).weights, 1e-6)
