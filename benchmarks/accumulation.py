"""Accumulation by layer beside step by step: python benchmarks/accumulation.py [--quick] [--path FOLDER].

Stage 3 with parameters and optimizer on disk: the time of a step and the bytes that it reads, for windows of 1 to 16
micro-batches of one size, and for some of few tokens, in one run; and DeepSpeed, where it is installed. FSDP2 has no
states on disk; it stands beside them on the host, with `--place 3-cpu`, which has a file of its own. Few tokens are
what a window is for where activations have little room, and what shows how weights travel on a machine that
computes slowly. Both have their defaults, which keep up to 1e9 weights in host memory, and of Wherry each order by
itself too. `weights on disk` keeps none there but those in use: Wherry with its default of buffers, DeepSpeed with as
many as it needs to run; and with one buffer what is read in a window shows. The limit of a time is that of plain
PyTorch with everything in memory, which computes and does nothing else; that of the bytes, with one buffer, weights
twice and optimizer states once. Bytes are those that Wherry asks the disk for; of DeepSpeed, those that the system
has counted, which its cache lessens.
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

from benchmarks import alone, bounds, steps, systems
from benchmarks.steps import MODELS, Entry, Turn
from benchmarks.summary import is_wherry
from benchmarks.systems import Recipe
from wherry.observe import bench

# What a user has who says nothing of the order; and the two that there are.
DEFAULT, ORDERS = "auto", ("layer_major", "step_major")
WINDOWS = (1, 2, 4, 8, 16)
# Tokens of a small micro-batch, and the windows of these.
FEW_TOKENS, FEW_WINDOWS = 64, (1, 8)
# Weights of one unit in memory at a time, in either order; and no more than are in use, with a peer beside that.
TIGHT, ON_DISK, TIGHT_WINDOWS = ", one buffer", "weights on disk", (1, 8)
PEERS = ("deepspeed", "fsdp2")
PLAIN = "plain"
PLACES = tuple(place.name for place in (*systems.RESIDENT, *systems.OFFLOADED) if place.stage == 3)
# Its file has no part in its name.
PLACE = "3-nvme"


def micro_batch(model: str, tokens: int | None) -> Recipe:
    """The recipe of one micro-batch: the model's own, or one sequence of so many tokens."""
    own = MODELS[model]
    return own if tokens is None else replace(own, batch=1, length=min(tokens, own.length))


def entries_of(
    model: str, place: str, windows: Sequence[int], peers: Sequence[str], count: int, tokens: int | None = None
) -> list[Entry]:
    found = []
    name = f"wherry-{place}"
    one = micro_batch(model, tokens)
    few = "" if tokens is None else f", {one.length} tokens"
    for window in windows:
        k = f"k={window}{few}"
        # Micro-batches keep their size: a longer window is more samples.
        recipe = replace(one, accumulation=window, batch=one.batch * window)
        kinds = [(order, replace(recipe, order=order)) for order in ORDERS]
        tight = systems.PLACES[place].parameters == "nvme" and (window in TIGHT_WINDOWS or len(windows) == 1)
        if tight:
            kinds += [(f"{order}{TIGHT}", replace(kind, persistence=0, in_memory=0, units=1)) for order, kind in kinds]
            kinds.append((ON_DISK, replace(recipe, order=DEFAULT, in_memory=0)))
        found.append(Entry(model, 1, name, count, recipe=replace(recipe, order=DEFAULT), label=f"{name} {k}"))
        for words, kind in kinds:
            found.append(Entry(model, 1, name, count, recipe=kind, label=f"{name} {words} {k}"))
        found.append(Entry(model, 1, PLAIN, count, recipe=recipe, label=f"{PLAIN} {k}"))
        for peer in (systems.peer_in(name, place) for name in peers):
            found.append(Entry(model, 1, peer, count, recipe=recipe, label=f"{peer} {k}"))
            if tight and peer.startswith("deepspeed"):
                # What it keeps whole is never read from disk: its default is its best.
                kind = replace(recipe, in_memory=0)
                found.append(Entry(model, 1, peer, count, recipe=kind, label=f"{peer} {ON_DISK} {k}"))
    return found


def rows_of(entry: Entry, turns: Sequence[Turn], plain: Sequence[Turn | None]) -> list[bench.Row]:
    """A row for the time of a step, and with parameters on disk one for the bytes read from it in one.

    Losses are compared with those of plain PyTorch, in its own turns at the same window.
    """
    recipe = entry.recipe
    tokens = recipe.batch // recipe.accumulation * recipe.length
    case = {"model": entry.model, "dtype": recipe.dtype, "window": recipe.accumulation, "tokens": tokens}
    time, read = case | {"measure": "step"}, case | {"measure": "read"}
    if entry.reason is not None:
        rows = [
            bench.row(time, entry.label, "s", reason=entry.reason),
            bench.row(read, entry.label, "B", reason=entry.reason),
        ]
    else:
        losses, off = turns[0].losses, steps.loss_difference(turns, plain)
        rows = [
            bench.row(time, entry.label, "s", steps.repeats_of(turns), losses=losses, loss_difference=off),
            bench.row(read, entry.label, "B", [turn.read_bytes for turn in turns]),
        ]
        if recipe.units == 1 and rows[1]["value"]:
            rows[1]["of_limit"] = least_read(entry.system, recipe) / rows[1]["value"]
    return rows if systems.place_of(entry.system).parameters == "nvme" else rows[:1]


def least_read(system: str, recipe: Recipe) -> float:
    """Bytes that a step of any number of micro-batches must read."""
    place = systems.place_of(system)
    return bounds.work_of(
        recipe.parameters, 0.0, recipe.dtype, offload_optimizer=place.optimizer, offload_param=place.parameters
    ).disk_read


def limit(rows: Sequence[bench.Row]) -> None:
    """What part of the speed of plain PyTorch each step has."""
    plain = {_window(row): row["value"] for row in rows if row["system"].startswith(f"{PLAIN} ")}
    for row in rows:
        whole = plain.get(_window(row))
        if whole and row["value"] and row["case"]["measure"] == "step":
            row["of_limit"] = whole / row["value"]


def _same_window(entry: Entry) -> tuple[int, int]:
    return entry.recipe.accumulation, entry.recipe.length


def _window(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["case"]["window"], row["case"]["tokens"]


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns, a line for each window and system."""
    lines, notes = [], dict[str, None]()
    reads = {row["system"]: row for row in rows if row["case"]["measure"] == "read"}
    for row in (row for row in rows if row["case"]["measure"] == "step"):
        if row["reason"] is not None:
            lines.append([row["system"], *["-"] * 4])
            notes[f"{systems.without_window(row['system'])}: {row['reason']}"] = None
            continue
        read = f"{reads[row['system']]['value'] / 1e6:,.1f}" if row["system"] in reads else ""
        part = f"{row['of_limit']:.2f}" if row["of_limit"] else ""
        lines.append([row["system"], f"{1000 * row['value']:,.1f}", bench.spread_words(row), part, read])
        off = row["loss_difference"]
        if off is not None and not systems.same_losses(off, row["case"]["dtype"]):
            notes[f"{row['system']}: NOT THE LOSSES OF PLAIN PYTORCH, {off:.0e} off"] = None
    columns = ("", "ms/step", "spread", "of plain", "MB read")
    bench.show("one step of a window of k micro-batches", columns, lines, [*notes, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("accumulation", __doc__ or "")
    parser.add_argument("--models", type=bench.listed(tuple(MODELS)), default=["10m"], help=", ".join(MODELS))
    parser.add_argument("--place", choices=PLACES, default=PLACE, help=f"where states rest (default: {PLACE})")
    parser.add_argument("--windows", type=bench.positives, default=list(WINDOWS), help="micro-batches in a window")
    parser.add_argument(
        "--few-windows",
        type=lambda text: [] if text == "none" else bench.positives(text),
        default=list(FEW_WINDOWS),
        help=f"micro-batches of {FEW_TOKENS} tokens in a window, or none (default: 1,8)",
    )
    some = bench.listed(PEERS, or_none=True)
    parser.add_argument("--peers", type=some, default=list(PEERS), help=f"of {', '.join(PEERS)}, or none (all)")
    parser.add_argument("--path", type=bench.folder, default=".", help="a folder on the disk for states (current)")
    parser.add_argument("--rounds", type=bench.positive, help="times that every system is measured")
    parser.add_argument("--steps", type=bench.positive, help="steps in one measure")
    options = bench.parse(parser, argv)
    rounds, count = options.rounds or (1 if options.quick else 5), options.steps or (2 if options.quick else 5)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path)
    settings = {"rounds": rounds, "steps": count, "warmup": steps.WARMUP, "place": options.place}
    part = "" if options.place == PLACE else options.place
    results = bench.Results("accumulation", options, settings, part=part)
    for model in options.models:
        entries = entries_of(model, options.place, options.windows, options.peers, count)
        entries += entries_of(model, options.place, options.few_windows, options.peers, count, FEW_TOKENS)
        turns = bench.interleave({str(entry): entry.take for entry in entries}, rounds, "accumulation windows")
        plain = {_same_window(entry): turns[str(entry)] for entry in entries if entry.system == PLAIN}
        rows = []
        for entry in entries:
            taken = [turn for turn in turns[str(entry)] if turn is not None]
            rows += rows_of(entry, taken, plain[_same_window(entry)])
        bench.compare(rows)
        limit(rows)
        results.add(*rows)
        _check_losses(rows)
    table(results.rows)
    results.close()
    return 0


def _check_losses(rows: Sequence[bench.Row]) -> None:
    """Ours must have trained what plain PyTorch has; of a peer that has not, its row says so."""
    for row in rows:
        off = row.get("loss_difference")
        if off is not None and is_wherry(row["system"]) and not systems.same_losses(off, row["case"]["dtype"]):
            raise SystemExit(
                f"accumulation: {row['system']} has other losses than plain PyTorch: {off:.0e} off, "
                f"expected {systems.SAME_LOSS:g} at most"
            )


if __name__ == "__main__":
    alone(main)
