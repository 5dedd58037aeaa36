"""Parameters off the device: a window of eight micro-batches moves what one micro-batch moves."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, assert_close, make_model, settings, token_batch
from tests.scale.windows import train_windows

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tickets import DONE, Ticket
from wherry.tiers import disk


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_reads_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
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
        found = dict(reads)
        engine.comm.barrier()
        if engine.comm.rank == 0:
            reads.clear()
        engine.comm.barrier()
        return found

    model = make_model()
    more = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "zero_optimization": {"offload_optimizer": more, "offload_param": {**more, "max_in_cpu": 0, "buffer_count": 1}},
        "wherry": {"update_policy": "at_step"},
    }
    runs = {
        (order, k): train_windows(
            model, stage=3, order=order, accumulation=k, ranks=ranks, each_step=seen, config=config
        )
        for order, k in (("step_major", 1), ("step_major", 8), ("layer_major", 8))
    }
    one, many, together = (run.extra[3] for run in runs.values())
    assert one["bytes read"] > 0
    assert together == one
    assert many["bytes read"] > 2 * one["bytes read"]
    assert_close(runs["layer_major", 8], runs["step_major", 8])


class CountingLink(ChaosLink):
    """A device apart from the host: copies between them, and their bytes."""

    def __init__(self, rank: int, free: int | None) -> None:
        super().__init__(Chaos(rank), free=free)
        self.counted: Counter[str] = Counter()

    def up(self, target: torch.Tensor, source: torch.Tensor, *, after: Ticket = DONE) -> Ticket:
        self.counted += Counter({"copies up": 1, "bytes up": source.nbytes})
        return super().up(target, source, after=after)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self.counted += Counter({"copies down": 1, "bytes down": source.nbytes})
        return super().down(target, source)


@pytest.mark.parametrize("free", [None, 0], ids=["sums on the device", "sums on the host"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_copies_and_communicates_once(ranks: int, free: int | None) -> None:
    """With parameters and optimizer on the host: copies each way, gathers and reductions of one micro-batch."""
    model = make_model()
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}

    def body(comm: Comm, order: str, k: int) -> tuple[Counter[str], dict[str, torch.Tensor]]:
        mine = copy.deepcopy(model)
        link = CountingLink(comm.rank, free)
        more = config | {"wherry": {"accumulation": order, "update_policy": "at_step"}}
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(3, k, more=more),
            mesh=topology(comm, link.chaos, link=link),
        )
        for step in range(2):  # the first is one after another, in whatever order
            link.counted.clear()
            engine.comm.traffic.clear()
            engine.train_batch(iter([token_batch(step, micro, comm.rank) for micro in range(k)]))
        seen = link.counted + engine.comm.traffic.calls
        state = engine.module.state_dict()
        engine.close()
        return seen, state

    runs = {
        (order, k): run_ranks(ranks, lambda comm, order=order, k=k: body(comm, order, k))
        for order, k in (("step_major", 1), ("step_major", 8), ("layer_major", 8))
    }
    for rank in range(ranks):
        one, many, together = (run[rank][0] for run in runs.values())
        assert together == one
        assert min(one["copies up"], one["copies down"]) > 0
        assert many["copies up"] > 7 * one["copies up"]
        if ranks > 1:
            assert min(one["all_gather"], one["reduce_scatter"]) > 0
            assert many["all_gather"] > 7 * one["all_gather"]
    for name, value in runs["step_major", 8][0][1].items():
        torch.testing.assert_close(runs["layer_major", 8][0][1][name], value, rtol=0, atol=1e-5)
