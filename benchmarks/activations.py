"""What becomes of activations: time of a step and peak memory by policy: python benchmarks/activations.py [--quick].

One GPT-2, one rank, the same seed and data for all; steps of the policies are interleaved. Peak memory is that of
activations alone: of everything that a forward and backward make, counted by operation in a step that is not timed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

import wherry
from wherry.observe import bench
from wherry.observe.footprint import WORKING, Footprint
from wherry.train.model import GPT, GPTConfig

KEEP = "keep"
_ALONE = "checkpoints are shared out among tensor-parallel ranks, and this runs on one"
_ON_HOST = "on a CPU activations are in host memory as they are"


def policies(folder: str, budget: int) -> dict[str, dict[str, Any]]:
    return {
        KEEP: {"policy": "none"},
        "recompute": {"policy": "recompute"},
        "recompute every second": {"policy": "recompute", "every": 2},
        "recompute, keep matmul": {"policy": "recompute", "save_operations": ["matmul", "attention"]},
        "recompute, contiguous": {"policy": "recompute", "contiguous_memory_optimization": True},
        "recompute, host": {"policy": "recompute", "cpu_checkpointing": True},
        "offload to host": {"policy": "offload", "cpu_checkpointing": True},
        "offload to disk": {"policy": "offload", "nvme_path": folder},
        "recompute, disk": {"policy": "recompute", "nvme_path": folder},
        "auto": {"policy": "auto", "memory": budget},
    }


def _engine(config: GPTConfig, batch: int, block: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = GPT(config)
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "activation_checkpointing": {"offload_min_bytes": 1 << 12, **block},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    return wherry.initialize(model=model, config=settings)[0]


def _step(engine: Any, ids: torch.Tensor) -> float:
    begin = time.perf_counter()
    engine.backward(engine(ids, ids))
    engine.step()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _peak(engine: Any, ids: torch.Tensor) -> int:
    with Footprint() as footprint:
        flats = [flat.whole for unit in engine.units for flat in unit.flats]
        footprint.label("weights", flats)
        engine.backward(engine(ids, ids))
        peak = footprint.peaks[WORKING]
    engine.step()
    return peak


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("activations", __doc__ or "")
    parser.add_argument("--rounds", type=bench.positive, help="steps of each (default 9)")
    options = bench.parse(parser, argv)
    rounds = options.rounds or (2 if options.quick else 9)
    small = options.quick or not torch.cuda.is_available()
    config = GPTConfig(layers=4, hidden=64, heads=2, sequence=32) if options.quick else (
        GPTConfig(layers=8, hidden=256, heads=4, sequence=256) if small else GPTConfig(24, 1024, 16, 1024)
    )  # fmt: skip
    batch = 2 if options.quick else 4
    results = bench.Results("activations", options, {"layers": config.layers, "hidden": config.hidden, "batch": batch})
    case = {"layers": config.layers, "hidden": config.hidden, "sequence": config.sequence, "batch": batch}
    residual = 4 * batch * config.sequence * config.hidden
    with tempfile.TemporaryDirectory() as folder:
        chosen = policies(folder, budget=8 * config.layers * residual)
        skipped = {"partition": _ALONE}
        if not torch.cuda.is_available():
            for name in ("recompute, host", "offload to host"):
                del chosen[name]
                skipped[name] = _ON_HOST
        engines = {name: _engine(config, batch, block) for name, block in chosen.items()}
        ids = torch.zeros(batch, config.sequence, dtype=torch.int64, device=next(iter(engines.values())).device)
        try:
            for engine in engines.values():
                _step(engine, ids)  # the first is another one: `auto` has measured when it is over
                _step(engine, ids)
            subjects: dict[str, Callable[[], float]] = {n: partial(_step, e, ids) for n, e in engines.items()}
            seconds = bench.interleave(subjects, rounds, "steps")
            peaks = {name: _peak(engine, ids) for name, engine in engines.items()}
        finally:
            for engine in engines.values():
                engine.close()
    for name in engines:
        results.add(bench.row(case, name, "s", seconds[name], peak_bytes=peaks[name]))
    for name, reason in skipped.items():
        results.add(bench.row(case, name, "s", reason=reason))
    results.close()
    table = [
        (
            row["system"],
            f"{1e3 * row['value']:.1f} ms",
            bench.spread_words(row),
            bench.ratio_words(row, KEEP),
            f"{row['peak_bytes'] / 1e6:.2f} MB",
        )
        for row in results.rows
        if row["reason"] is None
    ]
    bench.show(
        f"Activations of a GPT-2: {config.layers} blocks, {config.hidden} wide",
        ("policy", "step", "spread", "keep/this", "peak"),
        table,
        [f"{name}: {reason}" for name, reason in skipped.items()],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
