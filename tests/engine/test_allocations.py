"""Steps of the steady state allocate no memory but scalars: the engine reuses its buffers."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.allocations import Allocations, watch_growth
from tests.engine.harness import engine_of, make_model, settings, token_batch
from tests.plan.measured import Unseen
from tests.tiers.test_placements import offload

from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing import run_ranks
from wherry.tiers.buffers import DevicePool
from wherry.tiers.streams import Link

SETTLED, STEPS, WINDOWS = 5, 2, 8


@pytest.fixture(autouse=True)
def growth(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_growth(monkeypatch)


class OwnMemory(Link):
    """A link to host memory that the device does not share."""

    shared = False


def count(stage: int, ranks: int, accumulation: int, more: dict[str, Any], own_memory: bool = False) -> list[Any]:
    """Return by rank the allocations of later steps, and the misses of the pools in them."""
    model = make_model()

    def body(comm: Comm) -> Any:
        if ranks > 1:
            comm.__class__ = Unseen
        links: list[Link] = []

        def link(pin: bool) -> Link:
            links.append((OwnMemory if own_memory else Link)(torch.device("cpu")))
            return links[-1]

        mesh = Topology(comm, torch.device("cpu"), comm.rank, comm.rank, comm.size, link=link)
        engine = engine_of(copy.deepcopy(model), settings(stage, accumulation, 1.0, copy.deepcopy(more)), mesh)
        devices = [pool for pool in gc.get_objects() if isinstance(pool, DevicePool)]
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
        # The number of buffers in use at once depends on the disk, and a pool keeps all of them.
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


# The module that bundles small flats for one collective.
TOGETHER = "parallel/comm.py"


def assert_nothing_is_allocated(seen: Allocations, missed: int, backwards: int) -> None:
    """Allow the one-element gradient that every backward begins with, as plain PyTorch's does."""
    assert missed == 0
    assert all(where.endswith("ones_like.default") for where in seen.engine), str(seen)
    assert sum(seen.engine.values()) == backwards and sum(seen.engine_bytes.values()) == 4 * backwards, str(seen)
    assert seen.model > 0  # the count works


@pytest.mark.parametrize(
    ("stage", "ranks", "together"),
    [(0, 2, 0), (1, 2, 10**8), (2, 1, 0), (2, 2, 0), (3, 1, 10**8), (3, 2, 0), (3, 2, 10**8)],
)
def test_a_step_allocates_nothing(stage: int, ranks: int, together: int) -> None:
    buckets = {"zero_optimization": {"reduce_bucket_size": together, "allgather_bucket_size": together}}
    accumulation = 1 + stage % 2
    for seen, missed in count(stage, ranks, accumulation, buckets):
        bundles = {where: number for where, number in seen.engine.items() if where.startswith(TOGETHER)}
        assert bool(bundles) == (together > 0 and ranks > 1)
        # Two buffers for each of at most five collectives that move four flats three times.
        assert sum(bundles.values()) <= 2 * 5 * STEPS * accumulation
        for where in bundles:
            del seen.engine[where], seen.engine_bytes[where]
        assert_nothing_is_allocated(seen, missed, STEPS * accumulation)
        # Gathers grow the memory of partitioned weights: in forward and in backward, of the root unit once.
        assert seen.grown == (0 if stage < 3 or ranks == 1 else STEPS * accumulation * (2 * 4 - 1))


@pytest.mark.parametrize("row", ["offload-2", "infinity"])
def test_a_step_with_host_and_disk_allocates_nothing(row: str, tmp_path: Path) -> None:
    config = offload(row, tmp_path, "at_step", "bf16")
    for seen, missed in count(config["zero_optimization"]["stage"], 2, 1, config, own_memory=True):
        assert_nothing_is_allocated(seen, missed, STEPS)
