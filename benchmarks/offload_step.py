"""Steps with optimizer and parameters on host and disk: python benchmarks/offload_step.py [--quick] [--path FOLDER].

Beside the bound max(compute + host update, disk), each of them measured in the same run, and beside FSDP2's and
DeepSpeed's own offload, with clipping and, for an update in the backward, without. Ranks share the machine and so its
bound. All of it runs on the CPU: the host is the device, and only the disk is further away; a GPU's are in gpu.py. A
run takes about forty minutes for each dtype on two cores; flags choose a part of it.
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

from benchmarks import alone, bounds, explain, steps, systems
from benchmarks.steps import MODELS, Entry
from wherry.observe import bench

DTYPES = ("fp32", "bf16")
POLICIES = ("at_step", "before_use", "in_backward", "delayed")
PLACES = tuple(place.name for place in systems.OFFLOADED)
PEERS = ("fsdp2-cpu", "fsdp2-nvme", *(f"deepspeed-{name}" for name in (*PLACES, systems.GROUPED.name)))
# Clipping belongs to training; an update in the backward is measured without it, and peers beside it without it.
CLIPS = {"at_step": 1.0, "before_use": 1.0, "in_backward": 0.0, "delayed": 1.0}


def entries_of(
    model: str,
    dtype: str,
    clip: float,
    places: Sequence[str],
    peers: Sequence[str],
    count: int,
    policies: Sequence[str] = POLICIES,
    ranks: Sequence[int] = (1,),
) -> list[Entry]:
    recipe = replace(MODELS[model], dtype=dtype, clip=clip)
    found = [Entry(model, 1, steps.ORACLE, count, recipe=recipe)]
    for number in ranks:
        for place in places:
            for policy in policies:
                if clip and not CLIPS[policy]:
                    continue
                system, own = f"wherry-{place}", replace(recipe, policy=policy)
                found.append(Entry(model, number, system, count, recipe=own, label=f"{system} {policy}"))
        found += [Entry(model, number, peer, count, recipe=recipe) for peer in peers]
    return found


def peers_in(places: Sequence[str]) -> list[str]:
    """Those that keep their states where ours are measured."""
    wanted = {(systems.PLACES[name].stage, systems.PLACES[name].optimizer) for name in places}
    return [peer for peer in PEERS if (systems.place_of(peer).stage, systems.place_of(peer).optimizer) in wanted]


def limits_of(entries: Sequence[Entry], rates: bounds.Rates) -> dict[str, tuple[float, str]]:
    """For each entry, by its label: the shortest time of its step, and what sets it."""
    found = {}
    for entry in entries:
        place = systems.place_of(entry.system)
        work = bounds.work_of(
            entry.recipe.parameters,
            entry.recipe.flops,
            entry.recipe.dtype,
            offload_optimizer=place.optimizer,
            offload_param=place.parameters,
        )
        found[entry.label] = bounds.bound(work, rates)
    return found


def measure(entries: Sequence[Entry], rounds: int, rates: bounds.Rates, clip: float) -> list[bench.Row]:
    rows = steps.measure(entries, rounds, "offloaded steps")
    limits = limits_of(entries, rates)
    for row in rows:
        row["case"]["clip"] = clip
        if row["case"]["measure"] == "step" and row["value"]:
            row["bound_s"], row["bound_by"] = limits[row["system"]]
            row["of_limit"] = row["bound_s"] / row["value"]
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns."""
    shown = [row for row in rows if row["case"].get("measure") == "step"]
    for case, same in steps.by_case(shown):
        lines, notes = [], []
        for row in same:
            if row["reason"] is not None:
                lines.append([row["system"], *["-"] * 6])
                notes.append(f"{row['system']}: {row['reason']}")
                continue
            of_memory = case | {"measure": "peak memory"}
            peak = next(other for other in rows if other["case"] == of_memory and other["system"] == row["system"])
            peer = f"deepspeed-{row['system'].removeprefix('wherry-').split()[0]}"
            lines.append(
                [
                    row["system"],
                    f"{1000 * row['value']:,.1f}",
                    bench.spread_words(row),
                    f"{row['of_limit']:.2f} {row['bound_by']}",
                    f"{peak['value'] / 1e6:,.0f}",
                    systems.loss_words(row["loss_difference"], case["dtype"]),
                    bench.ratio_words(row, peer) if row["system"].startswith("wherry") else "",
                ]
            )
        where = systems.ranked(case["ranks"])
        title = f"{case['model']}, {case['dtype']}, {where}, clipping at {case['clip']:g}"
        bench.show(title, ("", "ms/step", "spread", "of bound", "peak MB", "losses", "x DS"), lines, [*notes, ""])
    explain(
        "of bound: the fraction of the bound that was reached, and its longest term. losses: against plain PyTorch; "
        "those of delayed updates are others, as they are made with gradients one step old."
    )


def _part(models: Sequence[str], ranks: Sequence[int] | None) -> str:
    """What a file of a part is named by: other models than the usual one, and ranks that were asked for."""
    words = [] if list(models) == ["10m"] else list(models)
    return "-".join([*words, f"{'-'.join(map(str, ranks))}-rank"] if ranks else words)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("offload_step", __doc__ or "")
    parser.add_argument("--models", type=bench.listed(tuple(MODELS)), default=["10m"], help=", ".join(MODELS))
    parser.add_argument("--dtypes", type=bench.listed(DTYPES), default=list(DTYPES), help=", ".join(DTYPES))
    parser.add_argument("--places", type=bench.listed(PLACES), default=list(PLACES), help=", ".join(PLACES))
    parser.add_argument("--policies", type=bench.listed(POLICIES), default=list(POLICIES), help=", ".join(POLICIES))
    beside = f"of {', '.join(PEERS)}, or none (default: those in the places)"
    parser.add_argument("--peers", type=bench.listed(PEERS, or_none=True), help=beside)
    parser.add_argument("--ranks", type=bench.positives, help="numbers of ranks (default: 1,2; 1 with --quick)")
    parser.add_argument("--path", type=bench.folder, default=".", help="a folder on the disk for states (current)")
    parser.add_argument("--rounds", type=bench.positive, help="times that every system is measured (3)")
    parser.add_argument("--steps", type=bench.positive, help="steps in one measure")
    options = bench.parse(parser, argv)
    rounds, count = options.rounds or (1 if options.quick else 3), options.steps or (3 if options.quick else 8)
    ranks = options.ranks or ([1] if options.quick else [1, 2])
    steps.check_ranks(parser, options.models, ranks)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path)
    peers = peers_in(options.places) if options.peers is None else options.peers
    settings = {"rounds": rounds, "steps": count, "warmup": steps.WARMUP, "ranks": ranks}
    settings |= {"models": {m: vars(MODELS[m]) for m in options.models}}
    results = bench.Results("offload_step", options, settings, part=_part(options.models, options.ranks))
    for dtype in options.dtypes:
        quick = options.quick or options.models == ["tiny"]
        rates, rows = bounds.measure("cpu", dtype, toy=quick, folder=options.path)
        results.add(*rows)
        for model in options.models:
            # Without clipping only where a policy asks for it.
            for clip in sorted({CLIPS[policy] for policy in options.policies}, reverse=True):
                chosen = options.places, peers, count, options.policies, ranks
                results.add(*measure(entries_of(model, dtype, clip, *chosen), rounds, rates, clip))
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
