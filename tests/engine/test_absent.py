"""Parameters and units that steps leave out, on some ranks or on all: values stay, and collectives meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    assert_equal,
    assert_near,
    assert_same,
    make_model,
    on_ranks,
    train,
    train_engine,
    train_plain,
)
from tests.models import ChoosingOutOfOrder, D, Stack, sgd, vectors
from tests.tiers.rows import ROWS, zero_block
from torch import nn
from torch.utils.checkpoint import checkpoint

from wherry.errors import DivergenceError
from wherry.sharding.norm import Norm
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


# Units that some ranks skip: at stage 3 a rank joins the collectives of units that other ranks run.


def test_an_order_that_all_ranks_share_at_first() -> None:
    """Learn the order in a step that all ranks run alike; let ranks skip units from then on."""

    def settle(engine: Any, step: int) -> None:
        engine.module.settled = True

    model = make_model(ChoosingOutOfOrder)
    common: dict[str, Any] = {"ranks": 2, "steps": 5, "batch": vectors, "optimizer": sgd, "each_step": settle}
    assert_equal(train_engine(model, stage=3, **common), train_engine(model, stage=1, **common))


class Along(Stack):
    """Run the blocks of a given path."""

    path: list[int] = []  # noqa: RUF012

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.path:
            x = self.blocks[index](x)
        return self.out(x)


def gathers(path: Callable[[int], list[int]], steps: int) -> list[int]:
    """Count the gathers of each step of a model that runs the blocks `path(step)`."""

    def use(engine: Any) -> list[int]:
        counts = []
        for step in range(steps):
            engine.module.path = path(step)
            engine.comm.traffic.clear()
            train(engine, step + 1, step, vectors)
            counts.append(engine.comm.traffic.calls["all_gather"])
        return counts

    return on_ranks(use, model=make_model(lambda: Along(blocks=4)), optimizer=sgd)[0]


def test_no_rank_joins_skipped_units_where_all_run_the_same() -> None:
    """Count a shared path's own gathers: at once if it runs all units, else after the ranks agreed a few times."""
    root, both = 1, 2
    assert gathers(lambda step: [0, 1, 2, 3], 3) == [root + both * 4] * 3
    # With another order, the first step gathers for the order of registration as well.
    assert gathers(lambda step: [2, 0, 3, 1], 3)[1:] == [root + both * 4] * 2
    # Until the ranks have agreed, they gather units that no rank runs.
    counts = gathers(lambda step: [0, 2], 8)
    assert counts[0] == root + both * 4
    assert counts[4:] == [root + both * 2] * 4
    # Then they follow any path that all take; a wrong guess of the prefetch costs one gather.
    counts = gathers(lambda step: [0, 2] if step < 5 else [3, 1, 0] if step % 2 else [1], 9)
    own = [root + both * 3, root + both, root + both * 3, root + both]
    assert all(needed <= count <= needed + 1 for needed, count in zip(own, counts[5:], strict=True))


def test_gathers_that_differ_are_an_error_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the digests of ranks whose gathers differ where no backend notices."""
    total, differ = Norm.total, {0, 1}

    def mixed_up(norm: Norm, gradients: Any, gather_digest: int = 0, path: int = 0) -> Any:
        rank = norm.comm.rank
        gather_digest += rank in differ and rank
        differ.discard(rank)
        return total(norm, gradients, gather_digest, path)

    monkeypatch.setattr(Norm, "total", mixed_up)

    def use(engine: Any) -> None:
        before = engine.module.state_dict()
        with pytest.raises(DivergenceError, match="gathered different units"):
            train(engine, 1, batch=vectors)
        assert_same(engine.module.state_dict(), before)
        train(engine, 1, batch=vectors)
        assert engine.was_step_applied()

    on_ranks(use, model=make_model(Stack), optimizer=sgd)


class Wide(nn.Module):
    """Blocks that are each updated alone on two ranks, and small enough to be gathered together."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(60, 60)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(60, 60), nn.Tanh()) for _ in range(6))

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        x = self.entry(x)
        for block in list(self.blocks)[first:]:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("alone", "live"), [("reads", 15_200), ("skips", 10_000_000)])
def test_a_read_or_a_skip_of_one_rank_changes_no_gather_of_all(alone: str, live: int, small_sizes: Any) -> None:
    """Check that a rank which has read its weights, or skips a unit, groups its prefetches as the others do."""
    small_sizes(bucket=2600)

    def use(engine: Any) -> list[float]:
        losses = []
        for step in range(4):
            if alone == "reads" and step == 3 and engine.comm.rank == 0:
                _ = engine.module
            skips = alone == "skips" and step >= 2 and engine.comm.rank == 1
            x = torch.randn(2, 60, generator=torch.Generator().manual_seed(2 * step + engine.comm.rank))
            loss = engine(x, int(skips))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        return losses

    model = Wide()
    zero = {"stage3_max_live_parameters": live, "stage3_prefetch_bucket_size": 40_000}
    # Without these keys, gathers share collectives and none is exempt by its size.
    zero |= {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
    config = {"zero_optimization": {**zero, "offload_optimizer": {"device": "cpu"}}}

    def losses(policy: str) -> Any:
        own = {"wherry": {"update_policy": policy, "unit_classes": ["Sequential"]}}
        return on_ranks(use, model=model, optimizer=partial(torch.optim.AdamW, lr=1e-3), config=config | own)

    assert losses("before_use") == losses("at_step")


class CheckpointedByOne(Stack):
    checkpoints = False

    def run(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        x = checkpoint(first, x.clone().requires_grad_(), use_reentrant=True) if self.checkpoints else first(x)
        for block in others:
            x = block(x)
        return self.out(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_reentrant_checkpoint_of_one_rank_alone(stage: int) -> None:
    """Run a backward within the backward of one rank: all ranks must look for late gradients, or none."""

    def use(engine: Any) -> dict[str, torch.Tensor]:
        engine.module.checkpoints = engine.comm.rank == 1
        train(engine, 2, batch=vectors)
        return engine.module.state_dict()

    model = make_model(CheckpointedByOne)
    plain = train_plain(model, ranks=2, steps=2, batch=vectors, optimizer=sgd)
    for state in on_ranks(use, stage=stage, model=model, optimizer=sgd):
        assert_near(state, plain.weights)
