"""Parameters on disk: a window of eight micro-batches reads what one micro-batch reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.engine.harness import assert_close, make_model
from tests.scale.windows import train_windows

from wherry.tiers import disk


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_reads_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    reads: Counter[str] = Counter()
    original = disk.DiskStore._submit

    def counted(self: Any, write: bool, record: Any, buffer: Any, offset: int, nbytes: int | None) -> Any:
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
