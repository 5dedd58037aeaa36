"""What an engine adds to a training step: python benchmarks/overhead.py [--quick].

A model so small (4 layers of width 64) that computing it costs next to nothing, on one core for each rank, beside the
same model in plain PyTorch. The difference is the engine's own time. Systems share a process and are measured in turn,
each between two halves of as many steps of plain PyTorch: a difference so small is lost in what a machine does within
seconds. DeepSpeed has another process, with plain PyTorch in it too, and the differences are compared.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, systems
from benchmarks.processes import Failed, Processes
from benchmarks.systems import Recipe

ORACLE = "plain"
GROUPS = (
    ("ddp", "fsdp2", *(f"wherry-{place.name}" for place in systems.RESIDENT)),
    tuple(f"deepspeed-{place.name}" for place in systems.RESIDENT),
)
ENGINES = tuple(name for group in GROUPS for name in group)
WARMUP = 10
CALLS_OVER = 5
# Functions in a profile.
SHOWN = 40
# Every unit travels at stage 3: a model this small would stay whole otherwise, by DeepSpeed's default as by ours.
TINY = Recipe(layers=4, hidden=64, heads=4, sequence=32, vocabulary=64, batch=2, length=16, clip=0.0, persistence=0)


class Group:
    """Plain PyTorch and some engines, in one process for each rank; `failed` says which could not be built, and why."""

    def __init__(self, names: Sequence[str], ranks: int) -> None:
        self.failed = {name: reason for name in names if (reason := systems.cannot_run(name))}
        self.losses: dict[str, list[float]] = {}
        self.processes = Processes(ranks, one_core=True)
        self._build([ORACLE, *(name for name in names if name not in self.failed)])

    def _build(self, names: list[str]) -> None:
        """Systems in fresh processes. The one that fails is left out, and the others begin again."""
        for name in names:
            print(f"building {name}", file=sys.stderr, flush=True)
            try:
                answers = self.processes.ask(do="build", system=name, recipe=TINY, warmup=WARMUP)
            except Failed as failure:
                if name == ORACLE:
                    raise
                self.failed[name] = str(failure)
                self.processes.close()
                self.processes = Processes(self.processes.ranks, one_core=True)
                self.losses.clear()
                return self._build([other for other in names if other != name])
            losses = zip(*(answer["losses"] for answer in answers), strict=True)
            self.losses[name] = [statistics.fmean(step) for step in losses]

    def time(self, name: str, steps: int) -> tuple[float, float]:
        """Microseconds of the median step, until the last rank has taken it, and of rank 0's processor in one."""
        answers = self.processes.ask(do="time", system=name, steps=steps)
        wall = statistics.median(max(step) for step in zip(*(a["seconds"] for a in answers), strict=True))
        return 1e6 * wall, 1e6 * answers[0]["cpu_seconds"]

    def beside_plain(self, name: str, steps: int) -> dict[str, float]:
        """An engine's step, and what it adds to the steps of plain PyTorch just before and after it."""
        half = (steps + 1) // 2
        before, own, after = self.time(ORACLE, half), self.time(name, steps), self.time(ORACLE, half)
        wall, cpu = (statistics.fmean(pair) for pair in zip(before, after, strict=True))
        return {"step": own[0], "over plain": own[0] - wall, "processor over plain": own[1] - cpu}

    def calls(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.processes.ask(do="calls", system=name, steps=CALLS_OVER)[0]
        return found


def measure(groups: Sequence[Group], rounds: int, steps: int, ranks: int) -> list[harness.Row]:
    """For each engine its step, and what it adds to plain's in time and in processor time."""
    built = [(group, name) for group in groups for name in group.losses if name != ORACLE]
    taken = harness.interleave({name: partial(group.beside_plain, name, steps) for group, name in built}, rounds)
    rows = []
    for group, name in built:
        over = group.calls(name)["python"] - group.calls(ORACLE)["python"]
        off = systems.loss_difference(group.losses[name], group.losses[ORACLE]) if ranks == 1 else None
        for what in ("step", "over plain", "processor over plain"):
            values = [turn[what] for turn in taken[name]]
            case = {"measure": what, "ranks": ranks}
            rows.append(harness.row(case, name, "us", values, python_calls_over_plain=over, loss_difference=off))
    for group in groups:
        for name, reason in group.failed.items():
            rows.append(harness.row({"measure": "step", "ranks": ranks}, name, "us", reason=reason))
    return sorted(rows, key=lambda row: str(row["case"]))


def profile(name: str, ranks: int) -> None:
    """Print what a step of one system calls most, without the calls that plain PyTorch makes."""
    group = Group([name], ranks)
    try:
        if name in group.failed:
            raise Failed(f"{name}: {group.failed[name]}")
        plain, own = (dict(group.calls(system)["functions"]) for system in (ORACLE, name))
    finally:
        group.processes.close()
    over = {function: times - plain.get(function, 0) for function, times in own.items()}
    for function, times in sorted(over.items(), key=lambda item: -item[1])[:SHOWN]:
        print(f"{times:8g}  {function}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--systems", type=harness.listed(ENGINES), default=list(ENGINES), help="with commas")
    parser.add_argument("--ranks", type=harness.positive, default=1, help="number of ranks, over gloo (default: 1)")
    parser.add_argument("--steps", type=harness.positive, help="steps in one measure")
    parser.add_argument("--profile", choices=ENGINES, metavar="SYSTEM", help="what one of them calls, and nothing else")
    options = harness.parse(parser, argv)
    if TINY.batch % options.ranks:
        parser.error(f"--ranks {options.ranks}: the {TINY.batch} sequences of a step do not divide among them")
    if options.profile:
        profile(options.profile, options.ranks)
        return 0
    rounds = options.rounds or (7 if options.quick else 25)
    steps = options.steps or (20 if options.quick else 50)
    settings = {"rounds": rounds, "steps": steps, "ranks": options.ranks, "cores_a_rank": 1}
    results = harness.Results("overhead", options, settings, part=f"{options.ranks}-rank")
    groups: list[Group] = []
    try:
        for names in GROUPS:
            wanted = [name for name in names if name in options.systems]
            if wanted:
                groups.append(Group(wanted, options.ranks))
        results.add(*measure(groups, rounds, steps, options.ranks))
    finally:
        for group in groups:
            group.processes.close()
    harness.show(results.rows, {"calls of Python": _calls})
    results.close()
    return 0


def _calls(row: Mapping[str, Any]) -> str:
    return f"{row['python_calls_over_plain']:+,.0f}"


if __name__ == "__main__":
    harness.alone(main)
