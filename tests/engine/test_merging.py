"""Small flats that travel together: fewer collectives, the same results."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    adamw,
    assert_close,
    assert_equal,
    make_model,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from tests.engine.test_models import MODELS, sgd, vectors
from tests.engine.test_skipping import Choosing, ChoosingMixed
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update import optimizer_states


def merged(stage: int, bucket: int = 10**6) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}}


COMMON: dict[str, Any] = {"ranks": 2, "steps": 5, "clip": 0.5}


@functools.cache
def each_alone(stage: int, accumulation: int, precision: str | None) -> Run:
    config = {precision: {"enabled": True}} if precision else {}
    return train_engine(make_model(), stage=stage, accumulation=accumulation, config=config, **COMMON)


@pytest.mark.parametrize("bucket", [5000, 10**6])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_merged_or_not_results_are_the_same_bits(stage: int, accumulation: int, bucket: int) -> None:
    for precision in (None, "bf16", "fp16"):
        config = merged(stage, bucket) | ({precision: {"enabled": True}} if precision else {})
        run = train_engine(make_model(), stage=stage, accumulation=accumulation, config=config, **COMMON)
        assert_equal(run, each_alone(stage, accumulation, precision))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str) -> None:
    model = make_model(MODELS[name])
    common: dict[str, Any] = {"ranks": 2, "accumulation": 2, "steps": 4, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=3, config=merged(3), **common), train_plain(model, **common))


@pytest.mark.parametrize("bucket", [400, 10**6])
@pytest.mark.parametrize("cls", [Choosing, ChoosingMixed])
def test_ranks_that_run_different_units(cls: Any, bucket: int) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 3, "steps": 7, "accumulation": 2, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=3, config=merged(3, bucket), **common), train_plain(model, **common))


def calls(stage: int, zero: dict[str, Any], blocks: int = 8) -> list[Counter[str]]:
    """Collectives of each of three steps."""
    from tests.engine.harness import TinyLM

    model = make_model(lambda: TinyLM(blocks))

    def body(comm: Comm) -> list[Counter[str]]:
        mine = copy.deepcopy(model)
        config = settings(stage)
        config["zero_optimization"] |= zero
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        counts = []
        for step in range(3):
            comm.traffic.clear()
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()
            counts.append(Counter(comm.traffic.calls))
        return counts

    return run_ranks(2, body)[0]


def test_small_flats_take_few_collectives() -> None:
    both = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    assert calls(2, both)[2] == {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}
    # Where nothing is shared out, and no norm has to be added up, ranks ask whether any misses a gradient.
    assert calls(0, both)[2] == {"all_reduce": 2}
    # The root unit; the first block, and all others ahead of it; the same backwards.
    assert calls(3, both)[2] == {"reduce_scatter": 1, "all_gather": 5, "all_reduce": 1}


def test_a_bucket_is_not_overfilled_and_large_flats_travel_alone() -> None:
    block = 1792  # elements of one block with its padding
    three = {"reduce_bucket_size": 3 * block, "allgather_bucket_size": 3 * block}
    seen = calls(2, three)[2]
    assert seen["reduce_scatter"] == 3  # eight blocks and the root unit, by three
    alone = {"reduce_bucket_size": block - 1, "allgather_bucket_size": block - 1}
    assert calls(2, alone)[2]["reduce_scatter"] == 9


def test_gathers_ahead_of_a_long_model_go_in_batches() -> None:
    """A window of units that moves on by one must not fall back to a gather for each."""
    zero = {"allgather_bucket_size": 8 * 1792, "stage3_prefetch_bucket_size": 8 * 1792, "reduce_bucket_size": 0}
    many = calls(3, zero, blocks=32)[2]["all_gather"]
    assert many <= 1 + 2 * (32 // 4 + 2)


def test_an_error_leaves_nothing_waiting() -> None:
    class Hiccup(RuntimeError):
        pass

    def stumble(*_: Any) -> None:
        raise Hiccup

    def body(comm: Comm, fails: bool) -> Run:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more=merged(3)), mesh=comm
        )
        for step in range(3):
            if fails:
                handle = mine.blocks[0].mix.register_full_backward_hook(stumble)
                with pytest.raises(Hiccup):
                    engine.backward(engine(*token_batch(step, 1, comm.rank)))
                handle.remove()
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()
        return Run(weights=engine.module.state_dict())

    model = make_model()
    failed, never = (run_ranks(2, lambda comm, fails=fails: body(comm, fails))[0] for fails in (True, False))
    assert all(torch.equal(failed.weights[name], value) for name, value in never.weights.items())


@pytest.mark.parametrize("limit", [600, 700, 1000, 1500])
def test_every_rank_updates_the_same_flats_together(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank's part is mostly padding: a batch that others close later would gather in another order."""
    monkeypatch.setattr(optimizer_states, "BUCKET_NUMEL", limit)
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(12)])

    def body(comm: Comm) -> list[tuple[str, str]]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), mesh=comm, config=settings(2, more=merged(2))
        )
        engine.backward(engine(torch.ones(2, 9)).square().mean())
        asked = comm.asked
        engine.step()
        gathers = [(one[1], one[3]) for one in [*comm.recent][asked - comm.asked :]]
        engine.close()
        return gathers

    first, *others = run_ranks(4, body)
    assert sum(operation == "all_gather" for operation, _ in first) > 1 and all(other == first for other in others)
