"""The tables of `wherry plan` that need no model: states by the number of parameters, and GPT-like models by shape."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from wherry.errors import WherryError
from wherry.placement import Placement
from wherry.plan import gpt
from wherry.plan.memory import Cost, States, states
from wherry.plan.quantities import count_name, parse_bytes, parse_count, published_gigabytes, rounded

if TYPE_CHECKING:
    from rich.table import Table

STAGES = (0, 1, 2, 3)
RANKS = "1,4,16,64,256,1024"
_WIDTH = 80
Item = TypeVar("Item")


def _list(text: str, flag: str, parse: Callable[[str, str], Item]) -> list[Item]:
    return [parse(part, flag) for part in text.split(",")]


# Model states, by the number of parameters.


def by_params(arguments: argparse.Namespace) -> int:
    precision, optimizer = arguments.precision or "bf16", arguments.optimizer or "adamw"
    cost = Cost.of(precision, optimizer)
    counts = _list(arguments.params, "--params", parse_count)
    ranks = _list(RANKS if arguments.ranks is None else arguments.ranks, "--ranks", parse_count)
    limit = None
    if arguments.device_memory is not None:
        limit = parse_bytes(arguments.device_memory, "--device-memory")
    tables = {
        count: {n: [states(count, Placement.of_stage(stage), n, cost) for stage in STAGES] for n in ranks}
        for count in counts
    }
    if arguments.json:
        print(json.dumps(_states_as_json(tables, precision, optimizer, limit), indent=2))
    else:
        notes = _states_notes(cost, limit)
        _print([(_states_table(count, rows, limit), notes) for count, rows in tables.items()])
    return 0


def _states_as_json(
    tables: dict[int, dict[int, list[States]]], precision: str, optimizer: str, limit: int | None
) -> dict[str, Any]:
    def row(count: int, ranks: int, stage: int, of: States) -> dict[str, Any]:
        fits = {} if limit is None else {"fits": of.total <= limit}
        placed = {"params": count, "ranks": ranks, "stage": stage, "placement": Placement.of_stage(stage).name}
        return {**placed, **asdict(of), "total": of.total, **fits}

    return {
        "unit": "bytes on one rank",
        "precision": precision,
        "optimizer": optimizer,
        **({} if limit is None else {"device_memory": limit}),
        "rows": [
            row(count, ranks, stage, of)
            for count, rows in tables.items()
            for ranks, by_stage in rows.items()
            for stage, of in zip(STAGES, by_stage, strict=True)
        ],
    }


def _states_table(count: int, rows: dict[int, list[States]], limit: int | None) -> Table:
    table = _table(f"{count_name(count)} parameters: GB on each rank")
    for header in ("ranks", *(Placement.of_stage(stage).name for stage in STAGES)):
        table.add_column(header, justify="right", min_width=9, no_wrap=True)
    for ranks, by_stage in rows.items():
        table.add_row(f"{ranks:,}", *(_cell(of.total, limit) for of in by_stage))
    return table


def _cell(total: int, limit: int | None) -> str:
    number = published_gigabytes(total)
    if limit is None:
        return number
    return f"[bold green]{number} *[/]" if total <= limit else f"{number}  "


def _states_notes(cost: Cost, limit: int | None) -> list[str]:
    rest, spread = cost.parameters + cost.gradients, cost.gradients + cost.optimizer
    master = f"fp32 master {cost.master} and moments {cost.moments}" if cost.master else f"moments {cost.moments}"
    notes = [
        "GB is 10^9 bytes: whole GB, cut off, from 100 up, and up to three figures, rounded, below.",
        f"P parameters on N ranks: data parallel {cost.total}P; ZeRO-1 {rest}P+{cost.optimizer}P/N; "
        f"ZeRO-2 {cost.parameters}P+{spread}P/N; ZeRO-3 {cost.total}P/N.",
        f"Bytes of a parameter: weight {cost.parameters}, gradient {cost.gradients}, "
        f"optimizer {cost.optimizer} ({master}).",
        "Not counted: activations, gathered weights, buffers and padding.",
    ]
    if limit is not None:
        notes.insert(0, f"* fits in {published_gigabytes(limit)} GB.")
    return notes


# By shape: the tables of ZeRO-Infinity.


def by_shape(arguments: argparse.Namespace) -> int:
    work = gpt.Work(**_given(arguments, ("batch", "sequence", "interval", "gpus_per_node", "nodes")))
    shapes = _shapes(arguments)
    peak = float(_number(arguments.peak, "--peak")) if arguments.peak is not None else 70e12
    targets = [float(x) for x in _list(arguments.efficiency or "0.5,0.9", "--efficiency", _number)]
    demands = [gpt.demand(shape, work) for shape in shapes]
    needs = _needs(shapes, work, targets, peak)
    if arguments.json:
        print(json.dumps(_infinity_as_json(demands, needs, work, peak, targets), indent=2))
    else:
        memory = _demand_table(demands), _demand_notes(work)
        _print([memory, (_needs_table(needs, targets), _needs_notes(work, peak))])
    return 0


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, int]:
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise WherryError(f"{flag}: expected a number, got {text.strip()!r}")
    return value


def _shapes(arguments: argparse.Namespace) -> Sequence[gpt.GptShape]:
    given = {name: getattr(arguments, name) for name in ("layers", "hidden", "heads")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return gpt.PUBLISHED
    if missing:
        raise WherryError(f"plan: a shape needs --layers, --hidden and --heads; {' and '.join(missing)} not given")
    return [gpt.GptShape(arguments.layers, _hidden(arguments.hidden), arguments.heads)]


def _hidden(text: str) -> int:
    digits = text.strip().upper()
    in_k = digits.endswith("K")
    digits = digits.removesuffix("K")
    if not digits.isdecimal():
        raise WherryError(f"--hidden: expected a number like 10240 or 10K (K = 1024), got {text!r}")
    return int(digits) * (gpt.K if in_k else 1)


def _hidden_name(hidden: int) -> str:
    return f"{hidden // gpt.K}K" if hidden % gpt.K == 0 else str(hidden)


def _demand_table(demands: Sequence[gpt.Demand]) -> Table:
    table = _table("Memory of GPT-like models")
    headers = (
        *("params\n(T)", "layers", "hidden", "heads", "states\n(TB)"),
        *("activ.\n(TB/node)", "checkp.\n(TB/node)", "working\nstates\n(GB/GPU)", "working\nactiv.\n(GB/GPU)"),
    )
    for header in headers:
        table.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    for demand in demands:
        shape = demand.shape
        table.add_row(
            rounded(Fraction(shape.parameters, 10**12), 2),
            *(str(shape.layers), _hidden_name(shape.hidden), str(shape.heads)),
            *(
                rounded(Fraction(count, 2**40), 2)
                for count in (demand.model_states, demand.node_activations, demand.node_checkpoints)
            ),
            rounded(Fraction(demand.gpu_working_states, 2**30), 2),
            rounded(Fraction(demand.gpu_working_activations, 2**30), 2),
        )
    return table


def _demand_notes(work: gpt.Work) -> list[str]:
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
    samples, sequence = work.samples_per_gpu, work.sequence
    weights = gpt.weight_intensity(samples, sequence)
    optimizer = gpt.optimizer_intensity(samples, sequence)
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


def _needs_table(needs: Sequence[dict[str, Any]], targets: Sequence[float]) -> Table:
    table = _table("Bandwidth that each tier needs for a part of the peak, GB/s")
    table.add_column("what travels", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for target in targets:
        table.add_column(f"at {100 * target:.3g}%", justify="right", no_wrap=True)
    for need in needs:
        table.add_row(need["what"], need["where"], *(_rate(rate) for rate in need["bytes_per_second"]))
    return table


def _rate(rate: float) -> str:
    return published_gigabytes(round(rate))


def _needs_notes(work: gpt.Work, peak: float) -> list[str]:
    return [
        f"GB = 10^9 bytes, for each of {work.gpus} GPUs of {peak / 1e12:g} TFLOP/s, or for all together. "
        "What rests on host or disk is partitioned over them.",
        "Efficiency = ait bw / (ait bw + peak), ait the operations for each byte: weights and gradients "
        "sequence batch; optimizer state sequence batch / 4; checkpoints 24 hidden interval "
        f"(batch of a GPU: {work.samples_per_gpu}).",
    ]


def _infinity_as_json(
    demands: Sequence[gpt.Demand], needs: list[dict[str, Any]], work: gpt.Work, peak: float, targets: list[float]
) -> dict[str, Any]:
    rows = []
    for demand in demands:
        row = asdict(demand)
        rows.append({**row.pop("shape"), "parameters": demand.shape.parameters, **row})
    return {
        "unit": "bytes",
        "batch_per_node": work.batch,
        "sequence": work.sequence,
        "interval": work.interval,
        "gpus_per_node": work.gpus_per_node,
        "nodes": work.nodes,
        "memory": rows,
        "peak": peak,
        "efficiency": targets,
        "bandwidth": needs,
    }


# Printing.


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, header_style="dim")


def _print(parts: Sequence[tuple[Table, Sequence[str]]]) -> None:
    """Each table, and what it goes by under it; what several go by alike stands under the last of them."""
    from wherry.observe.screen import Screen

    console = Screen(highlight=False)
    # A table too wide for the terminal runs over its edge: a digit left out would be worse.
    unlimited = console.options.update(width=10 * _WIDTH)
    console.width = max(min(console.width, _WIDTH), *(console.measure(t, options=unlimited).maximum for t, _ in parts))
    for number, (table, notes) in enumerate(parts, 1):
        console.print(table)
        console.print()
        if number == len(parts) or notes != parts[number][1]:
            for note in notes:
                console.print(note, style="dim", markup=False)
            if number < len(parts):
                console.print()
