"""How cost grows: python benchmarks/scaling.py [--quick].

With the model, from 10M to 1B parameters on this machine: a step of few tokens and the peak of memory, beside plain
PyTorch. With the number of ranks, from 1 to 1,024: the engine's own step for one rank, run dry, its collectives, its
bytes, its memory, and how long building and stepping it takes where nothing is computed. A run takes about seven
minutes on two cores, half of it the model of 1B, which wants 18 GB.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import bounds, steps
from benchmarks.steps import Entry
from benchmarks.systems import Recipe
from wherry.observe import bench

LENGTH = 32
STAGES = (0, 1, 2, 3)
RANKS = (1, 2, 4, 16, 64, 256, 1024)
SYSTEMS = ("plain", "wherry-0", "wherry-3")


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
        persistence=0,
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


def by_size(names: Sequence[str], systems: Sequence[str], rounds: int, count: int) -> list[bench.Row]:
    """A step and its peak of memory for each size, the sizes in turns too."""
    entries = [Entry(name, 1, system, count, recipe=SIZES[name]) for name in names for system in systems]
    rows = steps.measure(entries, rounds, "sizes")
    for row in rows:
        row["parameters"] = SIZES[row["case"]["model"]].parameters
        if row["value"] is not None:
            row["per_parameter"] = row["value"] / row["parameters"]
    return rows


def by_ranks(stages: Sequence[int], counts: Sequence[int], model: str) -> list[bench.Row]:
    """What one rank of many does in a step, from dry runs."""
    from wherry.dryrun import dry_run
    from wherry.sources import find

    rows = []
    for stage in stages:
        for ranks in counts:
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": zero,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            }
            found = dry_run(find(model), config, ranks=ranks, sequence=LENGTH)
            case = {"model": model, "stage": stage, "ranks": ranks}
            system = f"wherry-{stage}"
            peak, sent = float(found.peak("device")), float(sum(found.bytes.values()))
            memory = bench.row(case | {"measure": "peak of a rank"}, system, "B", [peak])
            memory["of_limit"] = bounds.states_bytes(system, found.parameters, ranks, "bf16") / ranks / peak
            traffic = bench.row(case | {"measure": "collectives of a step"}, system, "B", [max(sent, 1.0)])
            if ranks > 1:
                traffic["of_limit"] = EXCHANGED[stage] * bounds.WEIGHT_BYTES["bf16"] * found.parameters / sent
            rows += [memory, traffic | {"calls": found.calls, "bytes": found.bytes}]
            rows.append(bench.row(case | {"measure": "dry run"}, system, "s", [found.seconds]))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns."""
    sized = [row for row in rows if "parameters" in row]
    for measure, unit, scale, each in (("step", "ms", 1e3, 1e9), ("peak memory", "MB", 1e-6, 1.0)):
        lines, notes = [], []
        for row in (row for row in sized if row["case"]["measure"] == measure):
            name = f"{row['case']['model']} {row['system']}"
            if row["reason"] is not None:
                lines.append([name, *["-"] * 4])
                notes.append(f"{name}: {row['reason']}")
                continue
            figures = [f"{scale * row['value']:,.1f}", bench.spread_words(row), f"{row['per_parameter'] * each:.2f}"]
            lines.append([name, *figures, bench.ratio_words(row, "plain")])
        bench.show(measure, ("", unit, "spread", "ns/param" if each > 1 else "B/param", "x plain"), lines, [*notes, ""])
    dry = [row for row in rows if "stage" in row["case"]]
    lines = []
    for stage, ranks in dict.fromkeys((row["case"]["stage"], row["case"]["ranks"]) for row in dry):
        mine = [row for row in dry if (row["case"]["stage"], row["case"]["ranks"]) == (stage, ranks)]
        peak, traffic, seconds = mine
        calls = sum(traffic["calls"].values())
        figures = [f"{peak['value'] / 1e6:,.0f}", f"{calls}", f"{traffic['value'] / 1e6:,.0f}"]
        lines.append([f"stage {stage}, {ranks:,} ranks", *figures, f"{seconds['value']:.1f}"])
    if lines:
        bench.show("one rank of many, run dry", ("", "peak MB", "calls", "MB in them", "dry run s"), lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("scaling", __doc__ or "")
    parser.add_argument("--sizes", type=bench.listed(tuple(SIZES)), help=f"of {', '.join(SIZES)} (default: from 10m)")
    parser.add_argument("--systems", type=bench.listed(SYSTEMS), default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--ranks", type=bench.positives, help="numbers of ranks run dry (default: 1 to 1024)")
    parser.add_argument("--dry-model", default=DRY, help=f"the model that is run dry ({DRY})")
    parser.add_argument("--rounds", type=bench.positive, default=1, help="times that every size is measured (1)")
    parser.add_argument("--steps", type=bench.positive, help="steps in one measure")
    options = bench.parse(parser, argv)
    sizes = options.sizes or (["10m", "30m"] if options.quick else [name for name in SIZES if name != "1m"])
    ranks = options.ranks or ([1, 8, 1024] if options.quick else list(RANKS))
    rounds, count = options.rounds, options.steps or (2 if options.quick else 5)
    stages = (3,) if options.quick else STAGES
    settings = {"rounds": rounds, "steps": count, "sizes": {name: vars(SIZES[name]) for name in sizes}}
    results = bench.Results("scaling", options, settings | {"ranks": ranks, "dry_model": options.dry_model})
    results.add(*by_size(sizes, options.systems, rounds, count))
    results.add(*by_ranks(stages, ranks, options.dry_model))
    bench.compare(results.rows)
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
