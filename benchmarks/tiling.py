"""A linear layer beyond the budget of live parameters: python benchmarks/tiling.py [--quick] [--full] [--path FOLDER].

One layer trains at stage 3 with its states on disk, cut into tiles that fit the budget. What is live is counted by the
engine, whenever a tile is gathered or released; the run fails if it exceeds the budget, or if the loss does not fall.
The layer has 1 GB of fp32 weights and the budget 150 MB, with `--full` 4 GB and 600 MB: that takes about eight minutes
on two cores, 12 GB on the disk and 10 GB of memory for both ranks together.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone
from benchmarks.rooms import Room, RoomFailed
from wherry.observe import bench

WORKER = Path(__file__).parent / "tiling_worker.py"
# Columns and rows of the layer, and bytes that may be live.
QUICK, USUAL, FULL = (1024, 600_000), (16384, 150_000_000), (32768, 600_000_000)
TIMEOUT = 1800.0


def measure(width: int, budget: int, ranks: int, steps: int, folder: str) -> list[bench.Row]:
    """Rows of what was live, of a step's time, and of the memory of a rank beside what it held before."""
    case = {"layer_bytes": 4 * width * width, "budget_bytes": budget, "ranks": ranks}
    units = {"live": "B", "step": "s", "peak memory": "B"}
    try:
        with Room(ranks, worker=WORKER) as room:
            found = room.ask(TIMEOUT, do="train", width=width, budget=budget, steps=steps, folder=folder)
    except RoomFailed as failure:
        return [
            bench.row(case | {"measure": name}, "wherry-3-nvme", unit, reason=str(failure))
            for name, unit in units.items()
        ]
    live = max(one["live_bytes"] for one in found)
    losses = found[0]["losses"]
    if not 0 < live <= budget:
        raise SystemExit(f"tiling: {live:,} bytes of parameters were live, and {budget:,} may be")
    if not losses[-1] < losses[0]:
        raise SystemExit(f"tiling: the loss does not fall: {losses}")
    facts = {"tiles": found[0]["tiles"], "losses": losses}
    values = {
        "live": [float(live)],
        "step": [max(times) for times in zip(*(one["seconds"] for one in found), strict=True)],
        "peak memory": [float(max(one["peak_bytes"] for one in found))],
    }
    rows = [
        bench.row(case | {"measure": name}, "wherry-3-nvme", unit, values[name], **facts)
        for name, unit in units.items()
    ]
    rows[0]["of_limit"] = live / budget
    return rows


def table(rows: Sequence[bench.Row]) -> None:
    case, reason = rows[0]["case"], rows[0]["reason"]
    title = f"a linear layer of {case['layer_bytes'] / 1e6:,.0f} MB on {case['ranks']} ranks"
    if reason is not None:
        bench.show(title, (), [], [reason])
        return
    live, step, peak = rows
    lines = [
        [f"live parameters, of {case['budget_bytes'] / 1e6:,.1f} MB", f"{live['value'] / 1e6:,.1f} MB"],
        ["tiles", str(live["tiles"])],
        ["a step", f"{step['value']:,.2f} s"],
        ["memory of a rank at most, above what it began with", f"{peak['value'] / 1e6:,.0f} MB"],
        ["loss", f"{live['losses'][0]:.4f} to {live['losses'][-1]:.4f}"],
    ]
    bench.show(title, ("", ""), lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("tiling", __doc__ or "")
    parser.add_argument("--full", action="store_true", help="4 GB of weights within 600 MB")
    parser.add_argument("--ranks", type=bench.positive, default=2, help="processes (2)")
    parser.add_argument("--steps", type=bench.positive, help="steps of training (4, or 2 with --full)")
    parser.add_argument("--path", type=bench.folder, default=".", help="a folder on the disk for states (current)")
    options = bench.parse(parser, argv)
    width, budget = QUICK if options.quick else FULL if options.full else USUAL
    steps = options.steps or (2 if options.full else 4)
    results = bench.Results("tiling", options, {"width": width, "budget_bytes": budget, "steps": steps})
    with tempfile.TemporaryDirectory(dir=os.path.abspath(options.path)) as folder:
        rows = measure(width, budget, options.ranks, steps, folder)
    results.add(*rows)
    results.close()
    table(rows)
    return 0


if __name__ == "__main__":
    alone(main)
