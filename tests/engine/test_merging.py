"""Small flats share collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    TinyLM,
    make_model,
    on_ranks,
    train_step,
)
from torch import nn

BLOCK = 1792  # elements of one block with its padding


def merged(bucket: int = 10**6, **zero: int) -> dict[str, Any]:
    return {"zero_optimization": {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **zero}}


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


@pytest.mark.parametrize("limit", [600, 1000])
def test_every_rank_updates_the_same_flats_together(limit: int, small_sizes: Any) -> None:
    """Use shards that are mostly padding: a batch that is closed by payload would gather in another order."""
    small_sizes(bucket=limit)

    def use(engine: Any) -> list[tuple[str, str]]:
        engine.backward(engine(torch.ones(2, 9)).square().mean())
        comm, asked = engine.comm, engine.comm.asked
        engine.step()
        return [(one[1], one[3]) for one in [*comm.recent][asked - comm.asked :]]

    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(12)])
    first, *others = on_ranks(use, ranks=4, stage=2, config=merged(), model=model)
    assert sum(operation == "all_gather" for operation, _ in first) > 1 and all(other == first for other in others)
