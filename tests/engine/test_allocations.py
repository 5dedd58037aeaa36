"""A step in the steady state asks for no memory, but for scalars: what the engine needs again, it has already."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.allocations import Allocations, watch_growth
from tests.engine.harness import adamw, make_model, settings, token_batch
from tests.plan.measured import Unseen
from tests.tiers.test_placements import offload

import wherry
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing import run_ranks
from wherry.tiers.buffers import DevicePool
from wherry.tiers.streams import Link

SETTLED, STEPS, WINDOWS = 5, 2, 8


@pytest.fixture(autouse=True)
def growth(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_growth(monkeypatch)


class Apart(Link):
    """Memory of the host's own, as far as the engine can see."""

    shared = False


def count(stage: int, ranks: int, accumulation: int, more: dict[str, Any], apart: bool = False) -> list[Any]:
    """By rank: what the steps after the first few have asked for, and what the pools had to allocate in them."""
    model = make_model()

    def body(comm: Comm) -> Any:
        if ranks > 1:
            comm.__class__ = Unseen
        mine = copy.deepcopy(model)
        links: list[Link] = []

        def link(pin: bool) -> Link:
            links.append((Apart if apart else Link)(torch.device("cpu")))
            return links[-1]

        mesh = Topology(comm, torch.device("cpu"), comm.rank, comm.rank, comm.size, link=link)
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(stage, accumulation, 1.0, copy.deepcopy(more)),
            mesh=mesh,
        )
        devices = [found for found in gc.get_objects() if isinstance(found, DevicePool)]
        batches = [token_batch(0, micro, comm.rank) for micro in range(accumulation)]

        def step() -> None:
            for batch in batches:
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()

        def misses() -> int:
            pools = [*(one.host for one in links), *devices]
            return sum(pool.counters.misses for pool in pools)

        for _ in range(SETTLED):
            step()
        # How many buffers are under way at once follows the disk, and a pool keeps each that it ever needed.
        for _ in range(WINDOWS):
            seen, before = Allocations(), misses()
            with seen.counting():
                for _ in range(STEPS):
                    step()
            missed = misses() - before
            if not any(comm.gather_objects(missed)):
                break
        engine.close()
        return seen, missed

    return run_ranks(ranks, body)


# What small flats are laid together in for one collective.
TOGETHER = "parallel/comm.py"


def assert_nothing_is_allocated(seen: Allocations, missed: int, backwards: int) -> None:
    """But for the gradient that every backward begins with, one number, as plain PyTorch's does."""
    assert missed == 0
    assert all(where.endswith("ones_like.default") for where in seen.engine), str(seen)
    assert sum(seen.engine.values()) == backwards and sum(seen.engine_bytes.values()) == 4 * backwards, str(seen)
    assert seen.model > 0  # the count sees what is there to be seen


@pytest.mark.parametrize("together", [0, 10**8], ids=["flats alone", "small flats together"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_allocates_nothing(stage: int, ranks: int, together: int) -> None:
    buckets = {"zero_optimization": {"reduce_bucket_size": together, "allgather_bucket_size": together}}
    accumulation = 1 + stage % 2
    for seen, missed in count(stage, ranks, accumulation, buckets):
        bundles = {where: number for where, number in seen.engine.items() if where.startswith(TOGETHER)}
        assert bool(bundles) == (together > 0 and ranks > 1)
        # Two buffers for a collective, of which five at most carry the four flats of a micro-batch three times.
        assert sum(bundles.values()) <= 2 * 5 * STEPS * accumulation
        for where in bundles:
            del seen.engine[where], seen.engine_bytes[where]
        assert_nothing_is_allocated(seen, missed, STEPS * accumulation)
        # Partitioned weights grow in the memory that their views are of: in forward and backward, the root unit once.
        assert seen.grown == (0 if stage < 3 or ranks == 1 else STEPS * accumulation * (2 * 4 - 1))


@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters", "infinity"])
def test_nor_does_one_beside_host_and_disk(row: str, tmp_path: Path) -> None:
    config = offload(row, tmp_path, "at_step", "bf16")
    for seen, missed in count(config["zero_optimization"]["stage"], 2, 1, config, apart=True):
        assert_nothing_is_allocated(seen, missed, STEPS)
