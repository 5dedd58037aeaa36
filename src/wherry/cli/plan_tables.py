"""The tables of `wherry plan` that need no model: states by the number of parameters, and GPT-like models by shape."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any, TypeVar

from wherry.errors import WherryError
from wherry.placement import Placement
from wherry.plan import gpt
from wherry.plan.machines import KNOWN
from wherry.plan.model_states import Cost, states
from wherry.plan.quantities import (
    TB,
    amount,
    apart,
    count_name,
    parse_bytes,
    parse_count,
    published_gigabytes,
    rounded,
    without_comma,
)

STAGES = (0, 1, 2, 3)
RANKS = "1,4,16,64,256,1024"
_WIDTH = 80
Item = TypeVar("Item")


def _list(text: str, flag: str, parse: Callable[[str, str], Item]) -> list[Item]:
    return [parse(part, flag) for part in apart(text, flag, counts=flag == "--params")]


# Model states, by the number of parameters.


def by_params(arguments: argparse.Namespace) -> int:
    precision, optimizer = arguments.precision or "bf16", arguments.optimizer or "adamw"
    cost = Cost.of(precision, optimizer)
    counts = _list(arguments.params, "--params", parse_count)
    ranks = _list(RANKS if arguments.ranks is None else arguments.ranks, "--ranks", parse_count)
    limit = {}
    if arguments.device_memory is not None:
        limit = {"device_memory": parse_bytes(arguments.device_memory, "--device-memory", 10 * TB)}
    rows = [_states(count, n, stage, cost, **limit) for count in counts for n in ranks for stage in STAGES]
    if arguments.json:
        told = {"unit": "bytes on one rank", "precision": precision, "optimizer": optimizer, **limit, "rows": rows}
        print(json.dumps(told, indent=2))
        return _status(counts, rows)
    headers = (">ranks", *(f">{Placement.of_stage(stage).name}" for stage in STAGES))
    for count in counts:
        lines = [
            [f"{n:,}", *(_cell(row) for row in rows if (row["params"], row["ranks"]) == (count, n))] for n in ranks
        ]
        _print(f"{count_name(count)} parameters: GB on each rank", headers, lines, min_width=9)
    if small := [count_name(count) for count in counts if _status([count], rows)]:
        print(
            f"{' and '.join(small)} parameters do not fit in {published_gigabytes(limit['device_memory'])} GB here.\n"
        )
    _print_notes(_states_notes(cost, limit.get("device_memory") if any(row.get("fits") for row in rows) else None))
    return _status(counts, rows)


def _status(counts: Sequence[int], rows: Sequence[dict[str, Any]]) -> int:
    """1 where one of the models fits in no row."""
    return int(any(not any(row.get("fits", True) for row in rows if row["params"] == count) for count in counts))


def _states(count: int, ranks: int, stage: int, cost: Cost, device_memory: int | None = None) -> dict[str, Any]:
    placement = Placement.of_stage(stage)
    found = states(count, placement, ranks, cost)
    fits = {} if device_memory is None else {"fits": found.total <= device_memory}
    placed = {"params": count, "ranks": ranks, "stage": stage, "placement": placement.name}
    return {**placed, **asdict(found), "total": found.total, **fits}


def _cell(row: dict[str, Any]) -> str:
    number = published_gigabytes(row["total"])
    if "fits" not in row:
        return number
    return f"[bold green]{number} *[/]" if row["fits"] else f"{number}  "


def _states_notes(cost: Cost, limit: int | None) -> list[str]:
    rest, spread = cost.parameters + cost.gradients, cost.gradients + cost.optimizer
    master = f"fp32 master {cost.master} and moments {cost.moments}" if cost.master else f"moments {cost.moments}"
    return [
        *([] if limit is None else [f"* fits in {published_gigabytes(limit)} GB."]),
        "GB is 10^9 bytes: whole GB, cut off, from 100 up, and up to three figures, rounded, below.",
        f"P parameters on N ranks: data parallel {cost.total}P; ZeRO-1 {rest}P+{cost.optimizer}P/N; "
        f"ZeRO-2 {cost.parameters}P+{spread}P/N; ZeRO-3 {cost.total}P/N.",
        f"Bytes of a parameter: weight {cost.parameters}, gradient {cost.gradients}, "
        f"optimizer {cost.optimizer} ({master}).",
        "Not counted: activations, gathered weights, buffers and padding.",
    ]


# By shape: the tables of ZeRO-Infinity.


def by_shape(arguments: argparse.Namespace) -> int:
    given = ((name, getattr(arguments, name)) for name in ("batch", "sequence", "interval", "gpus_per_node", "nodes"))
    work = gpt.Work(**{name: value for name, value in given if value is not None})
    shapes = _shapes(arguments)
    peak = 70e12 if arguments.peak is None else _number(arguments.peak, "--peak")
    targets = _list(arguments.efficiency or "0.5,0.9", "--efficiency", _number)
    memory = [gpt.demand(shape, work) for shape in shapes]
    needs = _needs(shapes, work, targets, peak)
    if arguments.json:
        told = {
            "unit": "bytes",
            "batch_per_node": work.batch,
            "sequence": work.sequence,
            "interval": work.interval,
            "gpus_per_node": work.gpus_per_node,
            "nodes": work.nodes,
            "memory": memory,
            "peak": peak,
            "efficiency": targets,
            "bandwidth": needs,
        }
        print(json.dumps(told, indent=2))
        return 0
    _print("Memory of GPT-like models", _MEMORY, [_memory_line(row) for row in memory])
    _print_notes(_memory_notes(work))
    print()
    headers = ("what travels", "where", *(f">at {100 * target:.3g}%" for target in targets))
    lines = [
        [need["what"], need["where"], *(published_gigabytes(round(rate)) for rate in need["bytes_per_second"])]
        for need in needs
    ]
    _print("Bandwidth that each tier needs for a part of the peak, GB/s", headers, lines)
    _print_notes(_needs_notes(work, peak))
    return 0


def _number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise WherryError(f"{flag}: expected a number, got {text.strip()!r}{without_comma(text)}")
    return value


def _shapes(arguments: argparse.Namespace) -> Sequence[gpt.GptShape]:
    given = {name: getattr(arguments, name) for name in ("layers", "hidden", "heads")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return gpt.PUBLISHED
    if missing:
        raise WherryError(f"plan: a shape needs --layers, --hidden and --heads; {' and '.join(missing)} not given")
    hidden = arguments.hidden.strip().upper()
    digits = hidden.removesuffix("K")
    if not digits.isdecimal() or len(digits) > 30:
        raise WherryError(f"--hidden: expected a number like 10240 or 10K (K = 1024), got {arguments.hidden!r}")
    return [gpt.GptShape(arguments.layers, int(digits) * (gpt.K if hidden != digits else 1), arguments.heads)]


def _hidden_name(hidden: int) -> str:
    return f"{hidden // gpt.K}K" if hidden % gpt.K == 0 else str(hidden)


_MEMORY = (
    *(">params\n(T)", ">layers", ">hidden", ">heads", ">states\n(TB)", ">activ.\n(TB/node)", ">checkp.\n(TB/node)"),
    *(">working\nstates\n(GB/GPU)", ">working\nactiv.\n(GB/GPU)"),
)


def _memory_line(row: dict[str, int]) -> list[str]:
    scales = {
        "model_states": 2**40,
        "node_activations": 2**40,
        "node_checkpoints": 2**40,
        "gpu_working_states": 2**30,
        "gpu_working_activations": 2**30,
    }
    return [
        rounded(Fraction(row["parameters"], 10**12), 2),
        *(str(row["layers"]), _hidden_name(row["hidden"]), str(row["heads"])),
        *(rounded(Fraction(row[name], scale), 2) for name, scale in scales.items()),
    ]


def _memory_notes(work: gpt.Work) -> list[str]:
    every = "each layer" if work.interval == 1 else f"each {work.interval} layers"
    return [
        "K = 1024, GB = 2^30 and TB = 2^40 bytes; params in 10^12, 12 layers hidden^2 of them.",
        f"States: {gpt.STATE_BYTES} bytes a parameter, which counts gradients in fp32 too.",
        f"Batch {work.batch} on a node of {work.gpus_per_node} GPUs, sequence {work.sequence}.",
        "Activations: 16 hidden + 2 heads sequence values of 2 bytes, a token and layer. "
        f"Checkpoints: hidden values of 2 bytes a token, one for {every}.",
        "Working states: weights and gradients, 2 bytes each, of the largest layer, hidden to 4 hidden. "
        "Working activations: those between two checkpoints.",
    ]


def _needs(
    shapes: Sequence[gpt.GptShape], work: gpt.Work, targets: Sequence[float], peak: float
) -> list[dict[str, Any]]:
    """Bytes a second by what travels and where: first as one GPU must see them, then each GPU's share of it."""
    weights = gpt.weight_intensity(work.samples_per_gpu, work.sequence)
    optimizer = gpt.optimizer_intensity(work.samples_per_gpu, work.sequence)
    rows: list[tuple[str, str, Fraction, int]] = [
        ("weights and gradients", "between GPUs", weights, 1),
        ("weights and gradients", "host or disk, a GPU's share", weights, work.gpus),
        ("optimizer state", "host or disk, all together", optimizer, 1),
        ("optimizer state", "host or disk, a GPU's share", optimizer, work.gpus),
    ]
    for hidden in dict.fromkeys(shape.hidden for shape in shapes):
        intensity = gpt.checkpoint_intensity(hidden, work.interval)
        rows.append((f"checkpoints, hidden {_hidden_name(hidden)}", "host", intensity, 1))
    return [
        {
            "what": what,
            "where": where,
            "intensity": float(intensity),
            "shared_by": shared_by,
            "bytes_per_second": [gpt.bandwidth_for(intensity, target, peak) / shared_by for target in targets],
        }
        for what, where, intensity, shared_by in rows
    ]


def _needs_notes(work: gpt.Work, peak: float) -> list[str]:
    return [
        f"GB = 10^9 bytes, for each of {work.gpus} GPUs of {peak / 1e12:g} TFLOP/s, or for all together. "
        "What rests on host or disk is partitioned over them.",
        "Efficiency = ait bw / (ait bw + peak), ait the operations for each byte: weights and gradients "
        "sequence batch; optimizer state sequence batch / 4; checkpoints 24 hidden interval "
        f"(batch of a GPU: {work.samples_per_gpu}).",
    ]


# Machines by name.


def machines(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps([asdict(machine) for machine in KNOWN.values()], indent=2))
        return 0
    headers = ("name", ">GPUs", ">GB of\neach", ">GB of\nhost", ">TFLOP/s\nhalf", ">TFLOP/s\nfp32", ">GB/s of\nmemory")
    lines = [
        (
            machine.name,
            *(str(machine.gpus), amount(machine.gpu_memory / 1e9), amount(machine.host_memory / 1e9)),
            *(amount(rate / 1e12) for rate in (machine.matrix, machine.matrix_fp32)),
            *(amount(rate / 1e9) for rate in (machine.device_stream, machine.pcie)),
        )
        for machine in sorted(KNOWN.values(), key=lambda each: (each.gpus == 1, each.name))
    ]
    _print("Machines by name", (*headers, ">GB/s to\nhost"), lines)
    _print_notes(
        [
            "Rates are those that programs reach, not those of a sheet; half is bf16, or fp16 on v100 and t4.",
            'Names as drivers print them do too, like "NVIDIA RTX A6000". --gpus, --gpu-memory, --host-memory, --disk, '
            "--pcie, --stream and --disk-bandwidth change what is another on yours.",
        ]
    )
    return 0


# Printing.


def _print(title: str, headers: Sequence[str], lines: Sequence[Sequence[str]], min_width: int | None = None) -> None:
    """A table too wide for the terminal runs over its edge: a digit left out would be worse."""
    from wherry.observe.screen import Screen, table

    screen, rows = Screen(highlight=False), table(*headers, title=title, min_width=min_width)
    for line in lines:
        rows.add_row(*line)
    screen.width = max(screen.width, screen.measure(rows, options=screen.options.update(width=10 * _WIDTH)).maximum)
    screen.print(rows)
    screen.print()


def _print_notes(notes: Sequence[str]) -> None:
    from wherry.observe.screen import Screen

    screen = Screen(highlight=False)
    screen.width = min(screen.width, _WIDTH)
    for note in notes:
        screen.print(note, style="dim", markup=False)
