"""Units that some ranks skip: at stage 3 a rank stands in for what others run, and results are plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_close, assert_equal, make_model, settings, train_engine, train_plain
from tests.engine.test_models import D, Stack, sgd, vectors
from torch import nn
from torch.utils.checkpoint import checkpoint

import wherry
from wherry.errors import DivergenceError
from wherry.parallel.comm import Comm
from wherry.sharding.norm import Norm
from wherry.testing import run_ranks


class Choosing(Stack):
    """Each batch chooses the blocks it runs: layer drop that differs between ranks and micro-batches."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__(blocks)

    def chosen(self, x: torch.Tensor) -> list[bool]:
        bits = int(x[0, 0].abs() * 1000)
        return [bool(bits >> index & 1) for index in range(len(self.blocks))]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block, chosen in zip(self.blocks, self.chosen(x), strict=True):
            if chosen:
                x = block(x)
        return self.out(x)


class ChoosingExperts(Choosing):
    """One of several blocks, by the batch, between blocks that all run: experts in units of their own."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1 + int(x[0, 0].abs() * 1000) % 3](x)
        return self.out(self.blocks[4](x))


class ChoosingCheckpointed(Choosing):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.chosen(x)
        x = x.clone().requires_grad_()
        for block, run in zip(self.blocks, chosen, strict=True):
            if run:
                x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class ChoosingOutOfOrder(Choosing):
    """Blocks that run in another order than they are registered in, and one twice."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[3](self.blocks[1](x))
        for index, chosen in zip((4, 0, 2), self.chosen(x), strict=False):
            if chosen or not self.settled:
                x = self.blocks[index](x)
        return self.out(self.blocks[1](x))

    settled = False


class ChoosingFrozen(Choosing):
    """With a frozen block among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].requires_grad_(False)


class ChoosingMixed(Choosing):
    """Blocks of different sizes, so that no gather may be taken for another."""

    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(D, width), nn.Linear(width, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wide(width) for width in (8, 40, 16, 120, 8))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "cls", [Choosing, ChoosingExperts, ChoosingCheckpointed, ChoosingFrozen, ChoosingMixed], ids=lambda c: c.__name__
)
def test_ranks_that_run_different_units(cls: type[nn.Module], accumulation: int, stage: int) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 3, "steps": 7, "accumulation": accumulation, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=stage, **common), train_plain(model, **common))


@pytest.mark.parametrize("prefetch", [0, 400, 10**6])
def test_whatever_is_gathered_ahead(prefetch: int) -> None:
    model = make_model(Choosing)
    zero = {"stage": 3, "stage3_prefetch_bucket_size": prefetch, "stage3_max_live_parameters": 2 * prefetch}
    common: dict[str, Any] = {"ranks": 2, "steps": 6, "batch": vectors, "optimizer": sgd}
    ours = train_engine(model, stage=3, config={"zero_optimization": zero}, **common)
    assert_close(ours, train_plain(model, **common))


def test_another_order_that_all_ranks_share_at_first() -> None:
    """The order is learnt in a step that all ranks run alike; from then on they may skip."""

    def settle(engine: Any, step: int) -> None:
        engine.module.settled = True

    model = make_model(ChoosingOutOfOrder)
    common: dict[str, Any] = {"ranks": 2, "batch": vectors, "optimizer": sgd}
    ours = train_engine(model, stage=3, steps=6, each_step=settle, **common)
    flat = train_engine(model, stage=1, steps=6, each_step=settle, **common)
    assert_equal(ours, flat)


def calls_by_step(
    paths: Callable[[int, int], list[int]], steps: int, ranks: int = 2
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The gathers of each step, for a model that runs the blocks that `paths(step, rank)` says."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(blocks=4)
            self.path: list[int] = []

        def run(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.path:
                x = self.blocks[index](x)
            return self.out(x)

    model = make_model(Model)

    def body(comm: Comm) -> tuple[list[int], dict[str, torch.Tensor]]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=sgd(mine.parameters()), config=settings(3), mesh=comm)
        counts = []
        for step in range(steps):
            mine.path = paths(step, comm.rank)
            comm.traffic.clear()
            engine.backward(engine(*vectors(step, 0, comm.rank)))
            engine.step()
            counts.append(comm.traffic.calls["all_gather"])
        return counts, engine.module.state_dict()

    return run_ranks(ranks, body)[0]


def test_nobody_stands_in_where_all_ranks_run_the_same() -> None:
    """A path that every rank takes costs its own gathers: at once if it holds all units, after a few steps if not."""
    root, both = 1, 2
    assert calls_by_step(lambda step, rank: [0, 1, 2, 3], 3)[0] == [root + both * 4] * 3
    # In an order of its own: the first step gathers for the order of registration as well.
    assert calls_by_step(lambda step, rank: [2, 0, 3, 1], 3)[0][1:] == [root + both * 4] * 2
    # Units that no rank runs are stood in for until the ranks trust each other.
    counts = calls_by_step(lambda step, rank: [0, 2], 8)[0]
    assert counts[0] == root + both * 4
    assert counts[4:] == [root + both * 2] * 4
    # And then every path that all take is as good; a wrong guess of what to gather ahead costs one gather.
    counts = calls_by_step(lambda step, rank: [0, 2] if step < 5 else [3, 1, 0] if step % 2 else [1], 9)[0]
    own = [root + both * 3, root + both, root + both * 3, root + both]
    assert all(needed <= count <= needed + 1 for needed, count in zip(own, counts[5:], strict=True))


def test_mixed_up_weights_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose gathers differ, where no backend has noticed."""
    total, differ = Norm.total, {0, 1}

    def mixed_up(norm: Norm, gradients: Any, gather_digest: int = 0, path: int = 0) -> Any:
        rank = norm.comm.rank
        gather_digest += rank in differ and rank
        differ.discard(rank)
        return total(norm, gradients, gather_digest, path)

    monkeypatch.setattr(Norm, "total", mixed_up)
    model = make_model(Stack)

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=sgd(mine.parameters()), config=settings(3), mesh=comm)
        before = engine.module.state_dict()
        engine.backward(engine(*vectors(0, 0, comm.rank)))
        with pytest.raises(DivergenceError, match="gathered different units"):
            engine.step()
        after = engine.module.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.backward(engine(*vectors(0, 0, comm.rank)))
        engine.step()
        assert engine.was_step_applied()

    run_ranks(2, body)


class Wide(nn.Module):
    """Blocks that are each updated by themselves on two ranks, and small enough to be gathered together."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(600, 600)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(600, 600), nn.Tanh()) for _ in range(6))

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks[first:]:  # type: ignore[union-attr]
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("alone", "live"), [("reads", 1_500_000), ("skips", 1_000_000_000)])
def test_what_one_rank_does_alone_changes_no_gather_of_all(alone: str, live: int) -> None:
    """A rank that has looked at its weights, or skips a unit, groups what it gathers ahead as the others do."""
    model = Wide()

    def body(comm: Comm, policy: str) -> list[float]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=torch.optim.AdamW(mine.parameters(), lr=1e-3),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "stage3_param_persistence_threshold": 0,
                    "stage3_max_live_parameters": live,
                    "stage3_prefetch_bucket_size": 4_000_000,
                },
                "wherry": {"update_policy": policy, "unit_classes": ["Sequential"]},
            },
            mesh=comm,
        )
        losses = []
        for step in range(4):
            if alone == "reads" and step == 3 and comm.rank == 0:
                _ = engine.module
            skips = alone == "skips" and step >= 2 and comm.rank == 1
            x = torch.randn(2, 600, generator=torch.Generator().manual_seed(2 * step + comm.rank))
            loss = engine(x, int(skips))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        engine.close()
        return losses

    assert run_ranks(2, partial(body, policy="before_use")) == run_ranks(2, partial(body, policy="at_step"))


class CheckpointedByOne(Stack):
    checkpoints = False

    def run(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        x = checkpoint(first, x.clone().requires_grad_(), use_reentrant=True) if self.checkpoints else first(x)
        for block in others:
            x = block(x)
        return self.out(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_reentrant_checkpoint_that_one_rank_alone_has(stage: int) -> None:
    """Its backward within the backward may bring late gradients: all ranks look for them, or none."""

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        mine.checkpoints = comm.rank == 1  # type: ignore[assignment]
        engine, *_ = wherry.initialize(model=mine, optimizer=sgd(mine.parameters()), config=settings(stage), mesh=comm)
        for step in range(2):
            engine.backward(engine(*vectors(step, 0, comm.rank)))
            engine.step()
        return engine.module.state_dict()

    model = make_model(CheckpointedByOne)
    plain = train_plain(model, ranks=2, steps=2, batch=vectors, optimizer=sgd)
    for state in run_ranks(2, body):
        for name, weight in plain.weights.items():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-5)
