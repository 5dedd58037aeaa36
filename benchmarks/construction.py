"""Building and loading a model at stage 3: python benchmarks/construction.py [--quick] [--models 10m,125m].

Seconds until an engine can take its first step, and until it has taken one of a few tokens, with the peak of memory on
the way: for the whole model built first, for `Init` and for the meta device, beside FSDP2 and DeepSpeed; and the same
from a safetensors file. Before, each has built and stepped a model of next to nothing in the same process: what it
loads and starts at first use is `first use`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, systems
from benchmarks.build_worker import WAYS
from benchmarks.processes import Failed, Processes
from benchmarks.steps import MODELS

WORKER = Path(__file__).parent / "build_worker.py"
TIMEOUT = 180.0


class Building:
    """One way to an engine: what it took, or why it cannot be gone."""

    def __init__(self, model: str, way: str, file: Path) -> None:
        self.model, self.way, self.file = model, way, file
        self.reason = systems.cannot_run(way)

    def take(self) -> dict[str, Any] | None:
        if self.reason is not None:
            return None
        # Weights rest partitioned, whatever their size, as they do in a model that needs it.
        recipe = replace(MODELS[self.model], persistence=0)
        try:
            with Processes(1, worker=WORKER) as process:
                answers = process.ask(TIMEOUT, do="build", way=self.way, recipe=recipe, file=str(self.file))
        except Failed as failure:
            self.reason = str(failure)
            return None
        found: dict[str, Any] = answers[0]
        return found


def measure(model: str, ways: Sequence[str], rounds: int, folder: Path) -> list[harness.Row]:
    file = folder / f"{model}.safetensors"
    with Processes(1, worker=WORKER) as process:
        process.ask(do="save", recipe=MODELS[model], file=str(file))
    buildings = {way: Building(model, way, file) for way in ways}
    taken = harness.interleave({way: building.take for way, building in buildings.items()}, rounds)
    rows = []
    for until, suffix in (("ready", ""), ("stepped", " and step")):
        for way, building in buildings.items():
            case = {"model": model, "work": ("load" if WAYS[way].loads else "build") + suffix}
            time, memory = {**case, "measure": "time"}, {**case, "measure": "memory"}
            if building.reason is not None:
                rows += [
                    harness.row(of, way, unit, reason=building.reason) for of, unit in ((time, "s"), (memory, "B"))
                ]
                continue
            found = [turn[until] for turn in taken[way] if turn is not None]
            facts = {"first_use_s": statistics.median(turn["first_use_s"] for turn in found)}
            rows.append(harness.row(time, way, "s", [turn["seconds"] for turn in found], **facts))
            peaks = [float(turn["peak_bytes"] - turn["empty_bytes"]) for turn in found]
            rows.append(harness.row(memory, way, "B", peaks, states_bytes=found[0]["states_bytes"]))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--models", type=harness.listed(MODELS), help="(default: 10m, 125m)")
    parser.add_argument("--systems", type=harness.listed(WAYS), default=list(WAYS), help="with commas")
    options = harness.parse(parser, argv)
    models = options.models or (["10m"] if options.quick else ["10m", "125m"])
    rounds = options.rounds or (1 if options.quick else 3)
    results = harness.Results("construction", options, {"rounds": rounds, "models": models})
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            results.add(*measure(model, options.systems, rounds, Path(folder)))
    harness.show(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    harness.alone(main)
