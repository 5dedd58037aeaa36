"""Small flats share collectives: fewer calls, the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    TinyLM,
    assert_close,
    assert_equal,
    make_model,
    on_ranks,
    train_engine,
    train_plain,
    train_step,
)
from tests.models import Choosing, ChoosingMixed, sgd, vectors
from torch import nn

from wherry.update import optimizer_states

BLOCK = 1792  # elements of one block with its padding


def merged(bucket: int = 10**6, **zero: int) -> dict[str, Any]:
    return {"zero_optimization": {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **zero}}


@pytest.mark.parametrize(
    ("stage", "accumulation", "bucket", "precision"),
    [
        (0, 3, 5000, "bf16"),
        (1, 1, 10**6, None),
        (2, 1, 5000, "bf16"),
        (2, 3, 10**6, "fp16"),
        (3, 1, 10**6, "bf16"),
        (3, 3, 5000, None),
    ],
)
def test_merged_or_not_results_are_the_same_bits(
    stage: int, accumulation: int, bucket: int, precision: str | None
) -> None:
    config: dict[str, Any] = {precision: {"enabled": True}} if precision else {}
    common: dict[str, Any] = {"stage": stage, "accumulation": accumulation, "ranks": 2, "steps": 3, "clip": 0.5}
    run = train_engine(make_model(), config=merged(bucket) | config, **common)
    assert_equal(run, train_engine(make_model(), config=config, **common))


@pytest.mark.parametrize(("cls", "bucket"), [(Choosing, 10**6), (ChoosingMixed, 400)])
def test_ranks_that_run_different_units(cls: type[nn.Module], bucket: int) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 3, "steps": 5, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=3, config=merged(bucket), **common), train_plain(model, **common))


def calls(stage: int, config: dict[str, Any], blocks: int = 8) -> Counter[str]:
    """Count the collectives of the second step."""

    def use(engine: Any) -> Counter[str]:
        for step in range(2):
            engine.comm.traffic.clear()
            train_step(engine, step, engine.comm.rank)
        return Counter(engine.comm.traffic.calls)

    return on_ranks(use, stage=stage, config=config, model=make_model(lambda: TinyLM(blocks)))[0]


def test_small_flats_take_few_collectives() -> None:
    assert calls(2, merged()) == {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}
    # Without shards and a norm, ranks still exchange whether any of them misses a gradient.
    assert calls(0, merged()) == {"all_reduce": 2}
    # The root unit; the first block, and all others ahead of it; the same in backward.
    assert calls(3, merged()) == {"reduce_scatter": 1, "all_gather": 5, "all_reduce": 1}


def test_a_bucket_is_not_overfilled_and_large_flats_are_communicated_alone() -> None:
    assert calls(2, merged(3 * BLOCK))["reduce_scatter"] == 3  # eight blocks and the root unit, by three
    assert calls(2, merged(BLOCK - 1))["reduce_scatter"] == 9


def test_prefetch_windows_of_a_long_model_are_gathered_in_batches() -> None:
    """Check that a window which moves on by one unit does not issue a gather for each."""
    zero = {"stage3_prefetch_bucket_size": 8 * BLOCK, "reduce_bucket_size": 0}
    assert calls(3, merged(8 * BLOCK, **zero), blocks=32)["all_gather"] <= 1 + 2 * (32 // 4 + 2)


@pytest.mark.parametrize("limit", [600, 700, 1000, 1500])
def test_every_rank_updates_the_same_flats_together(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use shards that are mostly padding: a batch that is closed by payload would gather in another order."""
    monkeypatch.setattr(optimizer_states, "BUCKET_NUMEL", limit)

    def use(engine: Any) -> list[tuple[str, str]]:
        engine.backward(engine(torch.ones(2, 9)).square().mean())
        comm, asked = engine.comm, engine.comm.asked
        engine.step()
        return [(one[1], one[3]) for one in [*comm.recent][asked - comm.asked :]]

    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(12)])
    first, *others = on_ranks(use, ranks=4, stage=2, config=merged(), model=model)
    assert sum(operation == "all_gather" for operation, _ in first) > 1 and all(other == first for other in others)
