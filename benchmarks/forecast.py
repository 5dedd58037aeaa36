"""What `wherry plan` says a step takes, beside what it takes: python benchmarks/forecast.py [--quick] [--path FOLDER].

All of it runs on the CPU. The machine is measured as the planner measures it, and kept as the planner keeps it: on a
busy machine measure it anew when that is quiet (--again). On two cores a round takes about five minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, steps, systems
from benchmarks.steps import MODELS, ORACLE, Entry
from wherry import config as configs
from wherry.observe import bench
from wherry.plan import probe
from wherry.plan.forecaster import Forecaster
from wherry.plan.machine import Machine
from wherry.sources import of_shape
from wherry.train.presets import Shape

DTYPES = ("fp32", "bf16")
PLACES = tuple(place.name for place in systems.RESIDENT + systems.OFFLOADED)
# How far a prediction may be from what is measured.
WITHIN = 0.25


def forecaster_of(entry: Entry, machine: Machine) -> Forecaster:
    """It keeps its profiles, for all placements of a model on so many ranks."""
    recipe = entry.recipe
    shape = Shape(recipe.layers, recipe.hidden, recipe.heads, recipe.sequence, recipe.vocabulary)
    return Forecaster(of_shape(entry.model, shape), machine, entry.ranks, recipe.length)


def predicted(entry: Entry, forecaster: Forecaster) -> dict[str, Any]:
    """The planner's step of an entry: its seconds, its terms, and the one that limits it."""
    config = systems.config_of(systems.place_of(entry.system), entry.recipe, entry.ranks)
    found = forecaster.exact(configs.load(config))
    assert found.time is not None
    return {
        "predicted_s": found.time.total,
        "terms": found.time.terms,
        "limited_by": found.time.limited_by,
        "predicted_bytes": sum(row.bytes for row in found.rows if row.tier != "disk") * entry.ranks,
    }


def entries_of(
    models: Sequence[str], dtypes: Sequence[str], places: Sequence[str], ranks: Sequence[int], count: int
) -> list[Entry]:
    """Every placement on every number of ranks, and of each model plain PyTorch on one, which is the limit."""
    return [
        Entry(model, number, system, count, recipe=replace(MODELS[model], dtype=dtype))
        for model in models
        for dtype in dtypes
        for number, system in [(1, ORACLE), *((n, f"wherry-{place}") for n in ranks for place in places)]
    ]


def measure(entries: Sequence[Entry], rounds: int, machine: Machine) -> list[bench.Row]:
    rows = steps.measure(entries, rounds, "steps")
    planned = [entry for entry in entries if entry.system != ORACLE]
    forecasters = {(entry.model, entry.ranks): forecaster_of(entry, machine) for entry in planned}
    for entry, row in zip(entries, (row for row in rows if row["case"]["measure"] == "step"), strict=True):
        if entry.system == ORACLE:
            continue
        row.update(predicted(entry, forecasters[entry.model, entry.ranks]))
        if row["value"]:
            row["off"] = row["predicted_s"] / row["value"] - 1
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns."""
    shown = [row for row in rows if row["case"]["measure"] == "step" and row["system"] != ORACLE]
    for case, same in steps.by_case(shown):
        lines, notes = [], []
        for row in same:
            if row["reason"] is not None:
                lines.append([systems.TITLES[row["system"]], *["-"] * 5])
                notes.append(f"{row['system']}: {row['reason']}")
                continue
            inside = "" if abs(row["off"]) <= WITHIN else " !"
            lines.append(
                [
                    systems.TITLES[row["system"]],
                    f"{1000 * row['predicted_s']:,.1f}",
                    f"{1000 * row['value']:,.1f}",
                    bench.spread_words(row),
                    f"{100 * row['off']:+.0f} %{inside}",
                    row["limited_by"],
                ]
            )
        title = f"{case['model']}, {case['dtype']}, {systems.ranked(case['ranks'])}"
        bench.show(title, ("", "predicted ms", "measured ms", "spread", "off", "limited by"), lines, [*notes, ""])
    print(f"!: off by more than {100 * WITHIN:.0f} %.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("forecast", __doc__ or "")
    parser.add_argument("--models", type=bench.listed(tuple(MODELS)), default=["10m"], help=", ".join(MODELS))
    parser.add_argument("--dtypes", type=bench.listed(DTYPES), default=list(DTYPES), help=", ".join(DTYPES))
    parser.add_argument("--places", type=bench.listed(PLACES), default=list(PLACES), help=", ".join(PLACES))
    parser.add_argument("--ranks", type=bench.listed(("1", "2", "4")), default=["1", "2"], help="numbers of ranks")
    parser.add_argument("--path", type=bench.folder, default=".", help="a folder on the disk for states (current)")
    parser.add_argument("--again", action="store_true", help="measure the machine anew")
    parser.add_argument("--rounds", type=bench.positive, help="times that every placement is measured (3)")
    parser.add_argument("--steps", type=bench.positive, help="steps in one measure")
    options = bench.parse(parser, argv)
    rounds, count = options.rounds or (1 if options.quick else 3), options.steps or (3 if options.quick else 8)
    ranks = [int(number) for number in options.ranks]
    steps.check_ranks(parser, options.models, ranks)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks do not see a GPU, nor may the planner
    machine = probe.this_machine(options.path, again=options.again)
    settings = {"rounds": rounds, "steps": count, "warmup": steps.WARMUP, "machine": vars(machine)}
    results = bench.Results("forecast", options, settings | {"models": {m: vars(MODELS[m]) for m in options.models}})
    entries = entries_of(options.models, options.dtypes, options.places, ranks, count)
    results.add(*measure(entries, rounds, machine))
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
