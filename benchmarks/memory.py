"""Peak memory by placement, beside the published formulas: python benchmarks/memory.py [--quick].

A batch so small that activations do not count: what is left above an empty process is the training states, and what
an engine takes beside them. The formulas are those of the ZeRO papers, and say what the states must take. On two cores
a round takes about five minutes, and with both dtypes or with one rank too twice as much. What a GPU's memory holds
beside the formula is among the figures of gpu.py.
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

from benchmarks import alone, explain, steps, systems
from benchmarks.steps import MODELS, ORACLE, Entry
from wherry.observe import bench

DTYPES = ("fp32", "bf16")
_PLACES = (*systems.RESIDENT, *systems.OFFLOADED)
_ENGINES = tuple(f"{who}-{place.name}" for who in ("wherry", "deepspeed") for place in _PLACES)
SYSTEMS = ("plain", "ddp", *systems.FSDP2, *_ENGINES)
LENGTH = 16


def rows_of(entries: Sequence[Entry], rounds: int) -> list[bench.Row]:
    """A row for each entry: bytes above an empty process, beside the formula's."""
    measured = steps.measure(entries, rounds, "peaks of memory")
    found = []
    for entry, step, row in zip(entries, measured[::2], measured[1::2], strict=True):
        case = row["case"] | {"measure": "memory above an empty process"}
        if row["reason"] is not None:
            found.append(bench.row(case, entry.label, "B", reason=row["reason"]))
            continue
        expected = row["states_bytes"]
        above = [max(1.0, value - row["empty_bytes"]) for value in row["values"]]
        made = bench.row(case, entry.label, "B", above, formula_bytes=expected, memory=row["memory"])
        made["of_limit"] = expected / made["value"]
        made["bytes_per_parameter"] = made["value"] / entry.recipe.parameters
        made["empty_bytes"] = row["empty_bytes"]
        # Plain PyTorch on several ranks trains a model on each.
        made["loss_difference"] = None if entry.system == ORACLE and entry.ranks > 1 else step["loss_difference"]
        found.append(made)
    bench.compare(found)
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns."""
    for case, same in steps.by_case(rows):
        lines, notes = [], []
        for row in same:
            title, off = systems.TITLES[row["system"]], row.get("loss_difference")
            if off is not None and not systems.same_losses(off, case["dtype"]):
                notes.append(f"{title}: NOT THE LOSSES OF PLAIN PYTORCH, {off:.0e} off")
            if row["reason"] is not None:
                lines.append([title, *["-"] * 7])
                notes.append(f"{title}: {row['reason']}")
                continue
            figures = [f"{row['value'] / 1e6:,.0f}", bench.spread_words(row), f"{row['formula_bytes'] / 1e6:,.0f}"]
            figures.append(f"{row['of_limit']:.2f}")
            in_memory = [state for state in row["memory"] if state["tier"] != "disk"]
            stated, owed = (sum(state[key] for state in in_memory) for key in ("bytes_actual", "bytes_expected"))
            peer = f"deepspeed-{row['system'].partition('-')[2]}"
            figures += [f"{row['bytes_per_parameter']:.1f}", f"{stated / 1e6:,.0f}/{owed / 1e6:,.0f}" if owed else ""]
            lines.append([title, *figures, bench.ratio_words(row, peer) if "wherry" in row["system"] else ""])
        ranked = systems.ranked(case["ranks"])
        title = f"{case['model']}, {case['dtype']}, {ranked}: above an empty process, all ranks together"
        columns = ("", "peak MB", "spread", "formula", "of it", "B/param", "held/due", "x DS")
        bench.show(title, columns, lines, [*notes, ""])
    explain(
        "formula: MB of the states, and `of it` which part of the peak that is. held/due: MB of states in rank 0's "
        "memory as the engine counts them, and as its placement comes to. x DS: how many times as much DeepSpeed takes."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("memory", __doc__ or "")
    parser.add_argument("--models", type=bench.listed(tuple(MODELS)), help="of tiny, 10m, 125m (default: 125m)")
    parser.add_argument("--dtypes", type=bench.listed(DTYPES), default=["bf16"], help="fp32, bf16 (default: bf16)")
    parser.add_argument("--systems", type=bench.listed(SYSTEMS), default=list(SYSTEMS), help="with commas")
    parser.add_argument("--ranks", type=bench.positives, default=[2], help="numbers of ranks (default: 2)")
    parser.add_argument("--rounds", type=bench.positive, help="times that everything is measured (3; 1 with --quick)")
    parser.add_argument("--path", type=bench.folder, default=".", help="a folder on the disk for states (current)")
    options = bench.parse(parser, argv)
    models = options.models or (["10m"] if options.quick else ["125m"])
    rounds = options.rounds or (1 if options.quick else 3)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path)
    results = bench.Results("memory", options, {"rounds": rounds, "length": LENGTH, "models": models})
    for model in models:
        for dtype in options.dtypes:
            for ranks in options.ranks:
                length = min(LENGTH, MODELS[model].length)
                recipe = replace(MODELS[model], dtype=dtype, batch=ranks, length=length)
                entries = [Entry(model, ranks, name, 2, recipe=recipe) for name in options.systems]
                # For its losses: what trains something else holds something else.
                oracle = Entry(model, 1, ORACLE, 2, recipe=recipe)
                asked = ranks == 1 and ORACLE in options.systems
                results.add(*rows_of(entries if asked else [*entries, oracle], rounds)[: len(entries)])
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
