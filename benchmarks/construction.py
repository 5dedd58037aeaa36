"""Building and loading a model at stage 3: python benchmarks/construction.py [--quick] [--models 10m,125m].

Seconds until an engine can take its first step, and the peak of memory on the way, for the whole model built first, for
`Init` and for the meta device, beside FSDP2 and DeepSpeed; and the same from a safetensors file. Then the same until a
first step of a few tokens has been made: every system puts something off, moments at the least. Before, each has built
and stepped a model of next to nothing in the same process, and what it loads and starts at first use is no part of it:
torch's first optimizer alone imports 800 modules, which Wherry does not need and all others do. How long that took is
`first use`. The limit of time is the model alone, without an engine; that of memory is what stays: a process that has
built nothing else and the states, which are the weights, and after a step the moments too. What a model that is built
in shards takes by itself, within either's `Init` or from the meta device, is measured on two ranks, where the limit is
a rank's shards and the largest module. A run takes about nine minutes on two cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, explain, systems
from benchmarks.build_worker import PARTITIONED, WAYS
from benchmarks.rooms import Room, RoomFailed
from benchmarks.steps import MODELS
from wherry.observe import bench

WORKER = Path(__file__).parent / "build_worker.py"
TIMEOUT = 180.0
# Of the model that is built in shards, to see what its construction takes by itself.
RANKS = 2


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
            with Room(1, worker=WORKER) as room:
                found: dict[str, Any] = room.ask(TIMEOUT, do="build", way=self.way, recipe=recipe, file=str(self.file))[
                    0
                ]
        except RoomFailed as failure:
            self.reason = str(failure)
            return None
        return found


def measure(model: str, ways: Sequence[str], rounds: int, folder: Path) -> list[bench.Row]:
    file = folder / f"{model}.safetensors"
    with Room(1, worker=WORKER) as room:
        room.ask(do="save", recipe=MODELS[model], file=str(file))
    buildings = {way: Building(model, way, file) for way in ways}
    taken = bench.interleave({way: building.take for way, building in buildings.items()}, rounds, "builds")
    rows = []
    for until, suffix in (("ready", ""), ("stepped", " and step")):
        for way, building in buildings.items():
            case = {"model": model, "work": ("load" if WAYS[way].loads else "build") + suffix}
            if building.reason is not None:
                units = {"time": "s", "memory": "B"}
                rows += [bench.row({**case, "measure": of}, way, units[of], reason=building.reason) for of in units]
                continue
            found = [turn[until] for turn in taken[way] if turn is not None]
            facts = {"loss": found[0]["loss"]} if until == "stepped" else {}
            facts["first_use_s"] = statistics.median(turn["first_use_s"] for turn in found)
            rows.append(bench.row({**case, "measure": "time"}, way, "s", [turn["seconds"] for turn in found], **facts))
            peaks = [float(turn["peak_bytes"] - turn["empty_bytes"]) for turn in found]
            row = bench.row({**case, "measure": "memory"}, way, "B", peaks, states_bytes=found[0]["states_bytes"])
            row["of_limit"] = row["states_bytes"] / row["value"]
            rows.append(row)
    bench.compare(rows)
    for row in rows:
        alone = "plain-load" if row["case"]["work"].startswith("load") else "plain"
        if row["case"]["measure"] == "time" and row["reason"] is None and alone in row["ratio"]:
            row["of_limit"] = row["ratio"][alone]
    return rows


class Partitioning:
    """One way to a model in shards: what it took of the rank that took most, or why it cannot be gone."""

    def __init__(self, model: str, way: str) -> None:
        self.model, self.way = model, way
        self.reason = systems.cannot_run(way)

    def take(self) -> dict[str, float] | None:
        if self.reason is not None:
            return None
        try:
            with Room(RANKS, worker=WORKER) as room:
                found = room.ask(TIMEOUT, do="partition", way=self.way, recipe=MODELS[self.model])
        except RoomFailed as failure:
            self.reason = str(failure)
            return None
        return {key: float(max(one[key] for one in found)) for key in found[0]}


def partitioned(model: str, ways: Sequence[str], rounds: int) -> list[bench.Row]:
    """What building a model in shards takes on one of several ranks: time, and memory beside shards and one module."""
    parts = {way: Partitioning(model, way) for way in ways}
    taken = bench.interleave({way: part.take for way, part in parts.items()}, rounds, "builds in shards")
    case = {"model": model, "work": "build within Init", "ranks": RANKS}
    time, memory = case | {"measure": "time"}, case | {"measure": "memory"}
    rows = []
    for way, part in parts.items():
        if part.reason is not None:
            rows += [bench.row(of, way, unit, reason=part.reason) for of, unit in ((time, "s"), (memory, "B"))]
            continue
        found = [turn for turn in taken[way] if turn is not None]
        rows.append(bench.row(time, way, "s", [turn["seconds"] for turn in found]))
        # What allocators had kept may be enough for a small model.
        peaks, owed = [max(1.0, turn["peak_bytes"]) for turn in found], int(found[0]["owed_bytes"])
        row = bench.row(memory, way, "B", peaks, owed_bytes=owed)
        row["of_limit"] = owed / row["value"]
        rows.append(row)
    bench.compare(rows)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns."""
    for model, work in dict.fromkeys((row["case"]["model"], row["case"]["work"]) for row in rows):
        lines, notes = [], []
        mine = [row for row in rows if (row["case"]["model"], row["case"]["work"]) == (model, work)]
        for time, memory in zip(mine[::2], mine[1::2], strict=True):
            title = WAYS[time["system"]].title
            if time["reason"] is not None:
                lines.append([title, *["-"] * 4])
                notes.append(f"{title}: {time['reason']}")
                continue
            figures = [f"{time['value']:.2f}", bench.spread_words(time), f"{memory['value'] / 1e6:,.0f}"]
            lines.append([title, *figures, f"{memory['of_limit']:.2f}"])
        ranks = mine[0]["case"].get("ranks")
        title = f"{work} {model}" + (f", each of {ranks} ranks, without an optimizer" if ranks else "")
        bench.show(title, ("", "s", "spread", "peak MB", "of states"), lines, [*notes, ""])
    explain(
        "peak MB: above a process that has built next to nothing. of states: which part of the peak the states are "
        "that stay; of a rank its shards and one module."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("construction", __doc__ or "")
    parser.add_argument("--models", type=bench.listed(tuple(MODELS)), help="of tiny, 10m, 125m (default: the last two)")
    parser.add_argument("--systems", type=bench.listed(tuple(WAYS)), default=list(WAYS), help="with commas")
    parser.add_argument("--rounds", type=bench.positive, help="times that everything is measured")
    options = bench.parse(parser, argv)
    models = options.models or (["10m"] if options.quick else ["10m", "125m"])
    rounds = options.rounds or (1 if options.quick else 3)
    results = bench.Results("construction", options, {"rounds": rounds, "models": models})
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            results.add(*measure(model, options.systems, rounds, Path(folder)))
            ways = [way for way in options.systems if way in PARTITIONED]
            if ways:
                results.add(*partitioned(model, ways, rounds))
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
