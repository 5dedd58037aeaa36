"""Parameters off the device: a window of micro-batches moves the bytes of one micro-batch."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_close, assert_near, make_model, on_ranks, token_batch
from tests.scale.windows import windows

from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tickets import DONE, Ticket
from wherry.tiers import disk


def test_a_window_reads_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    one_at_a_time = threading.Lock()  # ranks that are threads count together
    original = disk.DiskStore._submit

    def counted(self: Any, write: bool, record: Any, buffer: Any, offset: int, nbytes: int | None) -> Any:
        with one_at_a_time:
            reads["writes" if write else "reads"] += 1
            reads["bytes written" if write else "bytes read"] += buffer.nbytes if nbytes is None else nbytes
        return original(self, write, record, buffer, offset, nbytes)

    monkeypatch.setattr(disk.DiskStore, "_submit", counted)

    def seen(engine: Any, step: int) -> dict[str, int]:
        engine.settle()
        engine.comm.barrier()
        counts = dict(reads)
        engine.comm.barrier()
        if engine.comm.rank == 0:
            reads.clear()
        engine.comm.barrier()
        return counts

    more = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "zero_optimization": {"offload_optimizer": more, "offload_param": {**more, "max_in_cpu": 0, "buffer_count": 1}},
        "wherry": {"update_policy": "at_step"},
    }
    one, many, together = (
        windows(make_model(), order, accumulation=k, ranks=2, steps=3, each_step=seen, config=config)
        for order, k in (("step_major", 1), ("step_major", 4), ("layer_major", 4))
    )
    assert one.extra[2]["bytes read"] > 0
    assert together.extra[2] == one.extra[2]
    assert many.extra[2]["bytes read"] > 2 * one.extra[2]["bytes read"]
    assert_close(together, many)


class CountingLink(ChaosLink):
    """A link to a device with memory of its own that counts copies and their bytes."""

    def __init__(self, rank: int, free: int | None) -> None:
        super().__init__(Chaos(rank), free=free)
        self.counted: Counter[str] = Counter()

    def up(self, target: torch.Tensor, source: torch.Tensor, *, after: Ticket = DONE) -> Ticket:
        self.counted += Counter({"copies up": 1, "bytes up": source.nbytes})
        return super().up(target, source, after=after)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self.counted += Counter({"copies down": 1, "bytes down": source.nbytes})
        return super().down(target, source)


@pytest.mark.parametrize(("ranks", "free"), [(1, 0), (2, None), (2, 0)])
def test_a_window_copies_and_communicates_once(ranks: int, free: int | None) -> None:
    """Expect the copies, gathers and reductions of one micro-batch; `free` 0 sums gradients on the host."""
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}

    def run(order: str, k: int) -> list[Any]:
        links: dict[int, CountingLink] = {}

        def place(comm: Comm) -> Topology:
            links[comm.rank] = CountingLink(comm.rank, free)
            return topology(comm, links[comm.rank].chaos, link=links[comm.rank])

        def use(engine: Any) -> tuple[Counter[str], dict[str, torch.Tensor]]:
            rank = engine.comm.rank
            for step in range(2):  # the first window is step-major in any order
                links[rank].counted.clear()
                engine.comm.traffic.clear()
                engine.train_batch(iter([token_batch(step, micro, rank) for micro in range(k)]))
            return links[rank].counted + engine.comm.traffic.calls, engine.module.state_dict()

        config = {"zero_optimization": offload, "wherry": {"accumulation": order, "update_policy": "at_step"}}
        return on_ranks(use, ranks=ranks, accumulation=k, config=config, place=place)

    runs = [run("step_major", 1), run("step_major", 4), run("layer_major", 4)]
    for rank in range(ranks):
        one, many, together = (run[rank][0] for run in runs)
        assert together == one
        assert min(one["copies up"], one["copies down"]) > 0
        assert many["copies up"] > 3 * one["copies up"]
        if ranks > 1:
            assert min(one["all_gather"], one["reduce_scatter"]) > 0
            assert many["all_gather"] > 3 * one["all_gather"]
    assert_near(runs[2][0][1], runs[1][0][1])
