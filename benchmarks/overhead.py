"""What an engine adds to a training step: python benchmarks/overhead.py [--quick].

A model so small (4 layers of width 64) that computing it costs next to nothing, on one core for each rank, beside the
same model in plain PyTorch. The difference is the engine's own time. Systems share a process and are measured in turn,
each between two halves of as many steps of plain PyTorch: a difference so small is lost in what a machine does within
seconds. DeepSpeed has another process, with plain PyTorch in it too, and the differences are compared.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, systems
from benchmarks.rooms import Room, RoomFailed
from benchmarks.systems import Recipe
from wherry.observe import bench

BASES = ("plain", "plain-default")
ROOMS = (
    (*BASES, "ddp", "fsdp2", *(f"wherry-{place.name}" for place in systems.RESIDENT)),
    (*BASES, *(f"deepspeed-{place.name}" for place in systems.RESIDENT)),
)
ENGINES = tuple(name for room in ROOMS for name in room if name not in BASES)
WARMUP = 10
CALLS_OVER = 5
# Functions in a profile.
SHOWN = 40
# Every unit travels at stage 3, as far as the number of ranks lets it: a model this small would stay whole otherwise,
# by DeepSpeed's default as by ours.
TINY = Recipe(layers=4, hidden=64, heads=4, sequence=32, vocabulary=64, batch=2, length=16, clip=0.0, persistence=0)


# Of an engine, and of plain PyTorch beside it: microseconds of a step, and of the processor in it.
Turn = tuple[tuple[float, float], tuple[float, float]]


class Rooms:
    """The rooms with the systems that could be built in them, and why the others could not."""

    def __init__(self, names: Sequence[str], ranks: int) -> None:
        self.ranks = ranks
        self.missing: dict[str, str] = {}
        self.losses: dict[tuple[int, str], list[float]] = {}
        self.oracle = _oracle()
        self._rooms: dict[int, Room] = {}
        self._built: dict[int, list[str]] = {}
        try:
            self._furnish_all(names)
        except BaseException:
            self.close()
            raise

    def _furnish_all(self, names: Sequence[str]) -> None:
        for index, systems_here in enumerate(ROOMS):
            wanted = [name for name in systems_here if name in names]
            for name in list(wanted):
                reason = systems.cannot_run(name)
                if reason is not None:
                    self.missing[name] = reason
                    wanted.remove(name)
            if wanted:
                self._furnish(index, [*BASES, *wanted])

    def _furnish(self, index: int, names: list[str]) -> None:
        """Build systems in a fresh room. The one that fails is left out, and the others begin again."""
        room = self._rooms[index] = Room(self.ranks, one_core=True)
        for name in names:
            print(f"building {systems.TITLES[name]}", file=sys.stderr, flush=True)
            try:
                answers = room.ask(do="build", system=name, recipe=TINY, warmup=WARMUP)
            except RoomFailed as failure:
                room.close()
                del self._rooms[index]
                if name in BASES:
                    raise
                self.missing[name] = str(failure)
                rest = [other for other in names if other != name]
                if len(rest) > len(BASES):
                    self._furnish(index, rest)
                return
            self.losses[index, name] = [
                statistics.fmean(step) for step in zip(*(a["losses"] for a in answers), strict=True)
            ]
        self._built[index] = names

    def places(self) -> list[tuple[int, str]]:
        return [(index, name) for index, names in self._built.items() for name in names]

    def step_us(self, place: tuple[int, str], steps: int) -> tuple[float, float] | None:
        """Microseconds of the median step of a few, and of the processor's time that a step takes on rank 0.

        A step lasts until the last rank has taken it. None where the room has failed.
        """
        answers = self._ask(place, do="time", steps=steps)
        if answers is None:
            return None
        wall = statistics.median(max(step) for step in zip(*(a["seconds"] for a in answers), strict=True))
        return 1e6 * wall, 1e6 * answers[0]["cpu_seconds"]

    def beside_plain_us(self, place: tuple[int, str], steps: int) -> Turn | None:
        """An engine's, between two halves of as many steps of plain PyTorch in its room. None where that has failed."""
        plain, half = (place[0], BASES[0]), (steps + 1) // 2
        before, own, after = self.step_us(plain, half), self.step_us(place, steps), self.step_us(plain, half)
        if before is None or own is None or after is None:
            return None
        wall, cpu = (statistics.fmean(pair) for pair in zip(before, after, strict=True))
        return own, (wall, cpu)

    def calls(self, place: tuple[int, str]) -> dict[str, Any] | None:
        """Of a step, by what is called. None where the room has failed."""
        answers = self._ask(place, do="calls", steps=CALLS_OVER)
        return None if answers is None else answers[0]

    def _ask(self, place: tuple[int, str], **request: Any) -> list[Any] | None:
        """A room's answers. Where it fails it is closed, and its systems are missing, each with the reason."""
        index, name = place
        if index not in self._rooms:
            return None
        try:
            return self._rooms[index].ask(system=name, **request)
        except RoomFailed as failure:
            self._rooms.pop(index).close()
            beside = f"its room ended while {systems.TITLES[name]} was measured: {failure}"
            for other in self._built.pop(index):
                if other not in BASES:
                    self.missing[other] = str(failure) if other == name else beside
            return None

    def close(self) -> None:
        for room in self._rooms.values():
            room.close()


def _oracle() -> list[float]:
    """The losses of the first steps: plain PyTorch's, on the whole batch."""
    with Room(1, one_core=True) as room:
        losses: list[float] = room.ask(do="build", system=BASES[0], recipe=TINY, warmup=WARMUP)[0]["losses"]
    return losses


def measure(rooms: Rooms, rounds: int, steps: int) -> list[bench.Row]:
    """For each system that was asked for a row with its step, and for each engine one with what it adds to plain."""
    subjects: dict[str, Callable[[], Any]] = {
        f"{index} {name}": partial(rooms.step_us if name in BASES else rooms.beside_plain_us, (index, name), steps)
        for index, name in rooms.places()
    }
    taken = bench.interleave(subjects, rounds, "overhead")
    seen = {place: rooms.calls(place) for place in rooms.places()}
    # Without those of a room that has failed meanwhile.
    places = rooms.places()
    called = {place: calls for place, calls in seen.items() if place in places and calls is not None}
    times = {f"{index} {name}": [one for one in taken[f"{index} {name}"] if one] for index, name in places}
    rows = []
    for index, name in places:
        # Plain PyTorch's rows are those of the first room: in the others it only serves the systems beside it.
        if name in BASES and index != places[0][0]:
            continue
        calls, plain_calls = called[index, name], called[index, BASES[0]]
        facts: dict[str, Any] = {
            "python_calls": calls["python"],
            "native_calls": calls["native"],
            "python_calls_over_plain": calls["python"] - plain_calls["python"],
            "loss_difference": None,
        }
        # On several ranks plain PyTorch trains a model on each: only its time is of use there.
        if name not in BASES or rooms.ranks == 1:
            facts["loss_difference"] = systems.loss_difference(rooms.losses[index, name], rooms.oracle)
        case, own = _case("step", rooms.ranks), times[f"{index} {name}"]
        if name in BASES:
            row = bench.row(case, name, "us", [wall for wall, _ in own], **facts)
            if name != BASES[0]:
                row["of_limit"] = bench.paired_ratio([wall for wall, _ in times[f"{index} {BASES[0]}"]], row["values"])
            rows.append(row)
            continue
        row = bench.row(case, name, "us", [mine[0] for mine, _ in own], **facts)
        row["of_limit"] = bench.paired_ratio([plain[0] for _, plain in own], row["values"])
        default = [wall for wall, _ in times[f"{index} {BASES[1]}"]]
        rows += [row, _over(own, default, name, rooms.ranks, facts)]
    for name, reason in rooms.missing.items():
        rows += [bench.row(_case(of, rooms.ranks), name, "us", reason=reason) for of in ("step", "over plain")]
    bench.compare(rows)
    return rows


def _case(measure: str, ranks: int) -> dict[str, Any]:
    return {"measure": measure, "ranks": ranks}


def _over(
    turns: Sequence[Turn], default: Sequence[float], name: str, ranks: int, facts: Mapping[str, Any]
) -> bench.Row:
    """What an engine adds to the steps of plain PyTorch beside it, and to those with `AdamW()` of the same round."""
    processor = bench.Summary.of([own[1] - plain[1] for own, plain in turns])
    return bench.row(
        _case("over plain", ranks),
        name,
        "us",
        [own[0] - plain[0] for own, plain in turns],
        over_default_us=statistics.median(own[0] - wall for (own, _), wall in zip(turns, default, strict=True)),
        cpu_us=processor.median,
        cpu_spread=processor.spread if processor.count > 1 else None,
        **facts,
    )


def table(rows: Sequence[Mapping[str, Any]], ranks: int) -> None:
    """Print the rows at 80 columns."""
    lines, notes = [], []
    over = {row["system"]: row for row in rows if row["case"]["measure"] == "over plain"}
    for row in (row for row in rows if row["case"]["measure"] == "step"):
        title = systems.TITLES[row["system"]]
        if row["reason"] is not None:
            lines.append([title, *["-"] * 7])
            notes.append(f"{title}: {row['reason']}")
            continue
        if row["loss_difference"] is not None and row["loss_difference"] > systems.SAME_LOSS:
            notes.append(f"{title}: NOT THE LOSSES OF PLAIN PYTORCH, {row['loss_difference']:.0e} off")
        line = [title, f"{row['value']:,.0f}", bench.spread_words(row)]
        own = over.get(row["system"])
        if own is None:
            lines.append([*line, "", "", "", f"{row['python_calls_over_plain']:+,.0f}", ""])
            continue
        figures = [f"{own['value']:+,.0f}", f"{own['over_default_us']:+,.0f}", f"{own['cpu_us']:+,.0f}"]
        peer = f"deepspeed-{row['system'].rpartition('-')[2]}"
        figures += [f"{own['python_calls_over_plain']:+,.0f}", bench.ratio_words(own, peer)]
        lines.append([*line, *figures])
    notes += [
        "over: the engine's own time, above plain PyTorch with torch's fused AdamW, and with AdamW() as it comes. "
        "CPU: processor time above fused. calls: of Python functions, above plain. "
        "x DS: how many times DeepSpeed's own time at the same stage is longer."
    ]
    if ranks == 1:
        notes.append("On one rank nothing is partitioned: Wherry gathers nothing there, whatever the stage.")
    else:
        notes.append("Plain PyTorch communicates nothing here, so over is the engines' time with communication.")
    columns = ("µs a step", "step", "spread", "over fused", "AdamW()", "CPU", "calls", "x DS")
    bench.show(f"4 layers of width 64, {systems.ranked(ranks)}, 1 core each", columns, lines, notes)


def profile(name: str, ranks: int) -> None:
    """Print what a step of one system calls most, without the calls that plain PyTorch makes."""
    rooms = Rooms([name], ranks)
    try:
        if name in rooms.missing:
            raise RoomFailed(f"{systems.TITLES[name]}: {rooms.missing[name]}")
        index = next(index for index, built in rooms.places() if built == name)
        seen = [rooms.calls((index, system)) for system in (BASES[0], name)]
        if name in rooms.missing:
            raise RoomFailed(f"{systems.TITLES[name]}: {rooms.missing[name]}")
        plain, own = (dict(calls["functions"]) for calls in seen if calls is not None)
    finally:
        rooms.close()
    over = {function: times - plain.get(function, 0) for function, times in own.items()}
    shown = sorted(((times, function) for function, times in over.items() if times > 0), reverse=True)[:SHOWN]
    title = f"calls of a step of {systems.TITLES[name]}, on rank 0 of {ranks}"
    bench.show(title, ("function", "calls"), [(function, f"{times:g}") for times, function in shown])


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("overhead", __doc__ or "")
    parser.add_argument("--systems", type=bench.listed(ENGINES), default=list(ENGINES), help="with commas between them")
    parser.add_argument("--ranks", type=bench.positives, default=[1], help="numbers of ranks, over gloo (default: 1)")
    parser.add_argument("--rounds", type=bench.positive, help="times that every system is measured")
    parser.add_argument("--steps", type=bench.positive, help="steps in one measure")
    parser.add_argument("--profile", choices=ENGINES, metavar="SYSTEM", help="what one of them calls, and nothing else")
    options = bench.parse(parser, argv)
    for ranks in options.ranks:
        if TINY.batch % ranks:
            parser.error(f"--ranks {ranks}: the {TINY.batch} sequences of a step do not divide among them")
    if options.profile:
        for ranks in options.ranks:
            profile(options.profile, ranks)
        return 0
    rounds = options.rounds or (7 if options.quick else 25)
    steps = options.steps or (20 if options.quick else 50)
    settings = {"rounds": rounds, "steps": steps, "ranks": options.ranks, "cores_a_rank": 1}
    results = bench.Results("overhead", options, settings, part=f"{'-'.join(map(str, options.ranks))}-rank")
    for ranks in options.ranks:
        rooms = Rooms(options.systems, ranks)
        try:
            rows = measure(rooms, rounds, steps)
        finally:
            rooms.close()
        table(rows, ranks)
        results.add(*rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
