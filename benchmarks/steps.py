"""A training step of GPT-2 under each system: python benchmarks/steps.py [--quick] [--full].

The same model, seed, data and optimizer settings for all, fp32 on the CPU, the global batch and the cores divided among
the ranks. Every measure has processes of its own, which end with it: peak memory is that of one system alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, bounds, explain, systems
from benchmarks.rooms import Room, RoomFailed
from benchmarks.systems import Recipe
from wherry.observe import bench
from wherry.train.presets import PRESETS, Shape

ORACLE = "plain"
# With states on the device; those on host and disk are in offload_step.py.
_ENGINES = tuple(f"{who}-{place.name}" for who in ("deepspeed", "wherry") for place in systems.RESIDENT)
SYSTEMS = ("plain", "ddp", "fsdp2", *_ENGINES)
WARMUP = 2


def _recipe(shape: Shape, batch: int, length: int) -> Recipe:
    return Recipe(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        sequence=shape.sequence,
        vocabulary=shape.vocabulary,
        batch=batch,
        length=length,
        clip=1.0,
    )


MODELS: dict[str, Recipe] = {
    "tiny": _recipe(Shape(layers=2, hidden=32, heads=2, sequence=16), batch=4, length=16),
    "10m": _recipe(PRESETS["gpt2-10m"], batch=4, length=128),
    "125m": _recipe(PRESETS["gpt2-124m"], batch=2, length=256),
}


@dataclass(frozen=True)
class Turn:
    """One measure of one system."""

    # Of each step, until the last rank has taken it.
    steps: list[float]
    # Of all ranks together: that is what the machine must have.
    peak_bytes: int
    # Before a model was built: Python, torch and the system itself.
    empty_bytes: int
    losses: list[float]
    built_seconds: float
    # What the engine itself says that it holds on rank 0, by state and tier, if it can say.
    memory: list[dict[str, Any]]
    # From disks, by all ranks, in a step.
    read_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return statistics.median(self.steps)


def repeats_of(turns: Sequence[Turn]) -> list[float]:
    """Seconds of a step: the median of each measure, or of one measure the steps themselves."""
    return [turn.seconds for turn in turns] if len(turns) > 1 else list(turns[0].steps)


class Entry:
    """One system with one recipe on some ranks: its turns, or the reason why there are none."""

    def __init__(
        self, model: str, ranks: int, system: str, steps: int, *, recipe: Recipe | None = None, label: str = ""
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.system = system
        self.label = label or system
        self.steps = steps
        self.recipe = recipe or MODELS[model]
        self.reason = systems.cannot_run(system)

    def case(self, measure: str) -> dict[str, Any]:
        return {"model": self.model, "dtype": self.recipe.dtype, "ranks": self.ranks, "measure": measure}

    def __str__(self) -> str:
        return f"{self.model} {self.recipe.dtype} {self.ranks} {self.label}"

    def take(self) -> Turn | None:
        """Measure once more; after a failure, nothing more."""
        if self.reason is not None:
            return None
        try:
            with Room(self.ranks) as room:
                built = room.ask(do="build", system=self.system, recipe=self.recipe, warmup=WARMUP)
                timed = room.ask(do="time", system=self.system, steps=self.steps)
        except RoomFailed as failure:
            self.reason = str(failure)
            return None
        losses = [b["losses"] + t["losses"] for b, t in zip(built, timed, strict=True)]
        return Turn(
            steps=[max(step) for step in zip(*(t["seconds"] for t in timed), strict=True)],
            peak_bytes=sum(t["peak_bytes"] for t in timed),
            empty_bytes=sum(b["empty_bytes"] for b in built),
            losses=[statistics.fmean(step) for step in zip(*losses, strict=True)],
            built_seconds=max(b["seconds"] for b in built),
            memory=timed[0]["memory"],
            read_bytes=sum(t["read_bytes"] for t in timed),
        )


def measure(entries: Sequence[Entry], rounds: int, what: str = "training steps") -> list[bench.Row]:
    """Two rows for each entry, in their order: its step's time, and its peak of memory.

    The limit of a step is plain PyTorch on one rank with all cores, which computes and does nothing else; that of
    memory an empty process and the states, by the published formula.
    """
    turns = bench.interleave({str(entry): entry.take for entry in entries}, rounds, what)
    rows = []
    for entry in entries:
        taken = [turn for turn in turns[str(entry)] if turn is not None]
        rows += _rows(entry, taken, turns.get(f"{entry.model} {entry.recipe.dtype} 1 {ORACLE}", []))
    bench.compare(rows)
    return rows


def loss_difference(turns: Sequence[Turn], oracle: Sequence[Turn | None]) -> float | None:
    """How far any loss is from the oracle's, relative to it; None where that has none."""
    expected = next((turn.losses for turn in oracle if turn is not None), None)
    if expected is None:
        return None
    return max(systems.loss_difference(turn.losses, expected) for turn in turns)


def _rows(entry: Entry, turns: Sequence[Turn], oracle: Sequence[Turn | None]) -> list[bench.Row]:
    step, memory = entry.case("step"), entry.case("peak memory")
    if entry.reason is not None:
        return [bench.row(case, entry.label, unit, reason=entry.reason) for case, unit in ((step, "s"), (memory, "B"))]
    recipe = entry.recipe
    difference = loss_difference(turns, oracle)
    seconds = repeats_of(turns)
    states = bounds.states_bytes(entry.system, recipe.parameters, entry.ranks, recipe.dtype)
    rows = [
        bench.row(
            step,
            entry.label,
            "s",
            seconds,
            tokens_per_s=recipe.batch * recipe.length / statistics.median(seconds),
            built_s=statistics.median(turn.built_seconds for turn in turns),
            first_loss=turns[0].losses[0],
            last_loss=turns[0].losses[-1],
            loss_difference=difference,
        ),
        bench.row(
            memory,
            entry.label,
            "B",
            [float(turn.peak_bytes) for turn in turns],
            empty_bytes=statistics.median(turn.empty_bytes for turn in turns),
            memory=turns[0].memory,
            states_bytes=states,
        ),
    ]
    alone = [turn.seconds for turn in oracle if turn is not None]
    if alone and len(alone) == len(turns) and (entry.ranks, entry.label) != (1, ORACLE):
        rows[0]["of_limit"] = bench.paired_ratio(alone, [turn.seconds for turn in turns])
    rows[1]["of_limit"] = (rows[1]["empty_bytes"] + states) / rows[1]["value"]
    return rows


def by_case(rows: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """The cases in their order, each with its rows."""
    cases = [dict(pairs) for pairs in dict.fromkeys(tuple(row["case"].items()) for row in rows)]
    return [(case, [row for row in rows if row["case"] == case]) for case in cases]


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns, a table for each size and number of ranks."""
    peaks = {(*_place(row), row["system"]): row for row in rows if row["case"]["measure"] == "peak memory"}
    rows = [row for row in rows if row["case"]["measure"] == "step"]
    for model, ranks in dict.fromkeys(map(_place, rows)):
        recipe, lines, notes = MODELS[model], [], []
        for row in rows:
            if _place(row) != (model, ranks):
                continue
            title = systems.TITLES[row["system"]] if row["system"] != ORACLE else "plain PyTorch"
            if row["reason"] is not None:
                lines.append([title, *["-"] * 7])
                notes.append(f"{title}: {row['reason']}")
                continue
            lines.append(
                [
                    title,
                    f"{1000 * row['value']:,.0f}" if row["value"] > 0.1 else f"{1000 * row['value']:.1f}",
                    bench.spread_words(row),
                    f"{row['tokens_per_s']:,.0f}",
                    f"{peaks[model, ranks, row['system']]['value'] / 1e6:,.0f}",
                    systems.loss_words(row["loss_difference"], row["case"]["dtype"]),
                    bench.ratio_words(row, "ddp"),
                    bench.ratio_words(row, _peer(row["system"])),
                ]
            )
        columns = ("", "ms/step", "spread", "tokens/s", "peak MB", "losses", "x DDP", "x DS")
        title = f"{model}: {recipe.batch} x {recipe.length} tokens on {systems.ranked(ranks)}"
        bench.show(title, columns, lines, [*notes, ""])
    explain(
        "x DDP, x DS: times as fast as DDP, as DeepSpeed in the same place (FSDP2: 3). losses: of every step, against "
        "plain PyTorch on one rank. peak MB: of all ranks together, Python and torch included."
    )


def _place(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["case"]["model"], row["case"]["ranks"]


def _peer(system: str) -> str:
    """DeepSpeed with the same placement: FSDP2 partitions what stage 3 does."""
    return f"deepspeed-{systems.place_of(system).name}"


def entries_of(models: Sequence[str], ranks: Sequence[int], names: Sequence[str], steps: int) -> list[Entry]:
    """Plain PyTorch on one rank is always among them, as the oracle of the losses."""
    entries = []
    for model in models:
        entries.append(Entry(model, 1, ORACLE, steps))
        entries += [Entry(model, count, name, steps) for count in ranks for name in names if name != ORACLE]
    return entries


def check_ranks(parser: argparse.ArgumentParser, models: Sequence[str], ranks: Sequence[int]) -> None:
    for model in models:
        for count in ranks:
            if MODELS[model].batch % count:
                sequences = f"the {MODELS[model].batch} sequences of a step of {model}"
                parser.error(f"--ranks {count}: {sequences} do not divide among them")


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("steps", __doc__ or "")
    parser.add_argument("--full", action="store_true", help="the model of 125 million parameters too; takes 10 GB")
    parser.add_argument("--models", type=bench.listed(tuple(MODELS)), help=f"of {', '.join(MODELS)} (default: 10m)")
    parser.add_argument(
        "--systems", type=bench.listed(SYSTEMS), default=list(SYSTEMS), help="with commas between them"
    )
    parser.add_argument("--ranks", type=bench.positives, default=[1, 2], help="numbers of ranks (default: 1,2)")
    parser.add_argument("--rounds", type=bench.positive, help="times that every system is measured")
    parser.add_argument("--steps", type=bench.positive, help="steps in one measure")
    options = bench.parse(parser, argv)
    models = options.models or (["10m", "125m"] if options.full else ["10m"])
    check_ranks(parser, models, options.ranks)
    rounds = options.rounds or (1 if options.quick else 5)
    steps = options.steps or (3 if options.quick else 8)
    settings = {"rounds": rounds, "steps": steps, "warmup": WARMUP, "models": {m: vars(MODELS[m]) for m in models}}
    results = bench.Results("steps", options, settings, part="-".join(models))
    rows = []
    for model in models:
        rows += measure(entries_of([model], options.ranks, options.systems, steps), rounds)
        results.add(*rows[len(results.rows) :])
    table(rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
