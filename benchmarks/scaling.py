"""How cost grows: python benchmarks/scaling.py [--quick].

With the model, from 10M to 1B parameters on this machine: a step of few tokens and the peak of memory, beside plain
PyTorch, FSDP2 and DeepSpeed, each with its defaults. With the number of ranks, from 1 to 1,024: the engine's own step
for one rank, run dry, its collectives, its bytes, its memory, and how long building and stepping it takes where nothing
is computed. On two cores a round takes about twelve minutes, half of it the model of 1B, which wants 18 GB. Rows are
kept as they come.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, bounds, steps
from benchmarks.steps import Entry
from benchmarks.systems import Recipe, ranked
from wherry.observe import bench

LENGTH = 32
STAGES = (0, 1, 2, 3)
RANKS = (1, 2, 4, 16, 64, 256, 1024)
SYSTEMS = ("plain", "fsdp2", "deepspeed-3", "wherry-0", "wherry-3")
# What a process takes beside its states, as a part of them, when these fill the machine.
BESIDE_STATES = 0.1


def _sized(layers: int, hidden: int) -> Recipe:
    return Recipe(
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        sequence=LENGTH,
        vocabulary=256,
        batch=1,
        length=LENGTH,
        clip=1.0,
    )


SIZES: dict[str, Recipe] = {
    "1m": _sized(2, 192),
    "10m": _sized(6, 384),
    "30m": _sized(10, 512),
    "100m": _sized(14, 768),
    "300m": _sized(24, 1024),
    "1b": _sized(32, 1600),
}
# How often a stage must exchange every parameter: gradients summed; reduced to shards and weights gathered; and with
# weights in shards gathered twice.
EXCHANGED = {0: 1, 1: 2, 2: 2, 3: 3}
# The model of the dry runs.
DRY = "gpt2-1.5b"


def by_size(name: str, systems: Sequence[str], rounds: int, count: int) -> list[bench.Row]:
    """A step and its peak of memory with a model of one size."""
    entries = [Entry(name, 1, system, count, recipe=SIZES[name]) for system in systems]
    for entry in entries:
        entry.reason = entry.reason or _too_large(entry)
    rows = steps.measure(entries, rounds, name)
    for row in rows:
        row["parameters"] = SIZES[row["case"]["model"]].parameters
        if row["value"] is not None:
            row["per_parameter"] = row["value"] / row["parameters"]
    return rows


def _too_large(entry: Entry) -> str | None:
    """Why a size is not tried here: what is out of memory is ended by the system, and others may be with it."""
    states = bounds.states_bytes(entry.system, entry.recipe.parameters, entry.ranks, entry.recipe.dtype)
    need, free = (1 + BESIDE_STATES) * states, bounds.free_host_memory()
    return f"needs {need / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB are free" if need > free else None


def by_ranks(stage: int, counts: Sequence[int], model: str, rounds: int) -> list[bench.Row]:
    """What one rank of many does in a step, from dry runs; what they count is the same in every round."""
    from wherry.plan.dry_run import dry_run
    from wherry.sources import find

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    runs = {str(ranks): partial(dry_run, find(model), config, ranks=ranks, sequence=LENGTH) for ranks in counts}
    rows = []
    for ranks, taken in bench.interleave(runs, rounds, f"stage {stage} run dry").items():
        found = taken[0]
        case = {"model": model, "stage": stage, "ranks": int(ranks)}
        system = f"wherry-{stage}"
        peak, sent = float(found.peak("device")), float(sum(found.bytes.values()))
        memory = bench.row(case | {"measure": "peak of a rank"}, system, "B", [peak])
        states = bounds.states_bytes(system, found.parameters, int(ranks), "bf16")
        memory["of_limit"] = states / int(ranks) / peak
        traffic = bench.row(case | {"measure": "collectives of a step"}, system, "B", [max(sent, 1.0)])
        if int(ranks) > 1:
            traffic["of_limit"] = EXCHANGED[stage] * bounds.WEIGHT_BYTES["bf16"] * found.parameters / sent
        rows += [memory, traffic | {"calls": found.calls, "bytes": found.bytes}]
        rows.append(bench.row(case | {"measure": "dry run"}, system, "s", [run.seconds for run in taken]))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns."""
    sized = [row for row in rows if "parameters" in row]
    for measure, unit, scale, each in (("step", "ms", 1e3, 1e9), ("peak memory", "MB", 1e-6, 1.0)):
        lines, notes = [], []
        for row in (row for row in sized if row["case"]["measure"] == measure):
            name = f"{row['case']['model']} {row['system']}"
            if row["reason"] is not None:
                lines.append([name, *["-"] * 5])
                notes.append(f"{name}: {row['reason']}")
                continue
            figures = [f"{scale * row['value']:,.1f}", bench.spread_words(row), f"{row['per_parameter'] * each:.2f}"]
            beside = [bench.ratio_words(row, peer) for peer in ("plain", "deepspeed-3")]
            lines.append([name, *figures, *beside])
        columns = ("", unit, "spread", "ns/param" if each > 1 else "B/param", "x plain", "x DS")
        bench.show(measure, columns, lines, [*notes, ""])
    dry = [row for row in rows if "stage" in row["case"]]
    lines = []
    for stage, ranks in dict.fromkeys((row["case"]["stage"], row["case"]["ranks"]) for row in dry):
        mine = [row for row in dry if (row["case"]["stage"], row["case"]["ranks"]) == (stage, ranks)]
        peak, traffic, seconds = mine
        calls = sum(traffic["calls"].values())
        figures = [f"{peak['value'] / 1e6:,.0f}", f"{calls}", f"{traffic['value'] / 1e6:,.0f}"]
        lines.append([f"stage {stage}, {ranked(ranks)}", *figures, f"{seconds['value']:.1f}"])
    if lines:
        bench.show("one rank of many, run dry", ("", "peak MB", "calls", "MB in them", "dry run s"), lines)


def main(argv: Sequence[str] | None = None) -> int:
    from wherry.sources import find

    parser = bench.parser("scaling", __doc__ or "")
    parser.add_argument("--sizes", type=bench.listed(tuple(SIZES)), help=f"of {', '.join(SIZES)} (default: from 10m)")
    parser.add_argument("--systems", type=bench.listed(SYSTEMS), default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--ranks", type=bench.positives, help="numbers of ranks run dry (default: 1 to 1024)")
    parser.add_argument("--dry-model", default=DRY, help=f"the model that is run dry ({DRY})")
    parser.add_argument("--rounds", type=bench.positive, help="times that everything is measured (3; 1 with --quick)")
    parser.add_argument("--steps", type=bench.positive, help="steps in one measure")
    options = bench.parse(parser, argv)
    sizes = options.sizes or (["10m", "30m"] if options.quick else [name for name in SIZES if name != "1m"])
    ranks = options.ranks or ([1, 8, 1024] if options.quick else list(RANKS))
    rounds, count = options.rounds or (1 if options.quick else 3), options.steps or (2 if options.quick else 5)
    stages = (3,) if options.quick else STAGES
    settings = {"rounds": rounds, "steps": count, "sizes": {name: vars(SIZES[name]) for name in sizes}}
    find(options.dry_model)  # or it would be refused when all sizes have been measured
    results = bench.Results("scaling", options, settings | {"ranks": ranks, "dry_model": options.dry_model})
    for name in sizes:
        results.add(*by_size(name, options.systems, rounds, count))
    for stage in stages:
        results.add(*by_ranks(stage, ranks, options.dry_model, rounds))
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
