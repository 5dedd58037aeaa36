"""Units that some ranks skip: at stage 3 a rank joins the collectives of units that other ranks run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from tests.models import ChoosingOutOfOrder, Stack, sgd, vectors
from torch import nn
from torch.utils.checkpoint import checkpoint

from wherry.errors import DivergenceError
from wherry.sharding.norm import Norm


def test_an_order_that_all_ranks_share_at_first() -> None:
    """Learn the order in a step that all ranks run alike; let ranks skip units from then on."""

    def settle(engine: Any, step: int) -> None:
        engine.module.settled = True

    model = make_model(ChoosingOutOfOrder)
    common: dict[str, Any] = {"ranks": 2, "steps": 5, "batch": vectors, "optimizer": sgd, "each_step": settle}
    assert_equal(train_engine(model, stage=3, **common), train_engine(model, stage=1, **common))


class Path(Stack):
    """Blocks that run along a given path."""

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

    return on_ranks(use, model=make_model(lambda: Path(blocks=4)), optimizer=sgd)[0]


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
