"""One gather for many forwards; and prefetch through models whose forwards are not a straight line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    adamw,
    assert_close,
    gathered,
    make_model,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from tests.engine.test_models import CalledTwice, SometimesUnused, Stack, sgd, vectors
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def test_many_forwards_gather_once_and_ranks_may_make_different_numbers() -> None:
    model = make_model()
    plain = train_plain(model, ranks=2, steps=4)
    reference = copy.deepcopy(model)

    def body(comm: Comm) -> list[float]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=settings(3), mesh=comm)
        losses = []
        for step in range(4):
            if step in (0, 2):
                comm.traffic.clear()
                with wherry.gathered_for_generation(engine):
                    once = comm.traffic.calls["all_gather"]
                    with torch.no_grad():
                        for turn in range(3 + comm.rank):
                            seen = float(engine(*token_batch(9, turn, 0)))
                            if step == 0:
                                assert seen == pytest.approx(float(reference(*token_batch(9, turn, 0))), rel=1e-6)
                    assert comm.traffic.calls["all_gather"] == once == len(engine.units)
                    with pytest.raises(WherryError, match="held by gathered_for_generation"):
                        engine.backward(engine(*token_batch(0, 0, 0)))
                assert gathered(engine) == 0
            loss = engine(*token_batch(step, 0, comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(sum(comm.gather_objects(float(loss.detach()))) / 2)
        return losses

    assert run_ranks(2, body)[0] == pytest.approx(plain.losses, rel=1e-5)


def test_weights_that_are_held_do_not_change() -> None:
    model = make_model()
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(2))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with wherry.gathered_for_generation(engine):
        with pytest.raises(WherryError, match="step: weights are held by gathered_for_generation"):
            engine.step()
        with pytest.raises(WherryError, match="offload_states: weights are held by gathered_for_generation"):
            engine.offload_states()
    engine.step()
    assert engine.global_steps == 1
    with wherry.gathered_for_generation(engine):
        engine.close()
    assert engine.closed


def test_an_exception_inside_releases_the_weights() -> None:
    models = [make_model() for _ in range(2)]

    def body(comm: Comm) -> None:
        engine, *_ = wherry.initialize(model=models[comm.rank], config=settings(3), mesh=comm)
        with pytest.raises(KeyError), wherry.gathered_for_generation(engine), wherry.gathered_for_generation(engine):
            raise KeyError("stop")
        assert gathered(engine) == 0

    run_ranks(2, body)


class Twice(Stack):
    """Two forwards of the blocks in one step, one of them without gradients."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.run(y)
        return F.mse_loss(self.run(x), target + y)


class Recomputed(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


@pytest.mark.parametrize("prefetch", [0, 10**6])
@pytest.mark.parametrize("model_class", [CalledTwice, SometimesUnused, Twice, Recomputed])
def test_prefetch_changes_nothing_but_time(model_class: Any, prefetch: int) -> None:
    model = make_model(model_class)
    plain = train_plain(model, ranks=2, accumulation=2, steps=5, batch=vectors, optimizer=sgd)

    run = train_engine(
        model, stage=3, ranks=2, accumulation=2, steps=5, batch=vectors, optimizer=sgd, finish=gathered,
        config={"zero_optimization": {"stage3_prefetch_bucket_size": prefetch}},
    )  # fmt: skip
    assert_close(run, plain)
    assert run.extra == 0
