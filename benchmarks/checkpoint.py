"""Saving and loading the states of training: python benchmarks/checkpoint.py [--quick] [--path FOLDER].

Seconds of a save until it is on the disk, of the training that stood still for it, and of a load, for weights and both
moments of AdamW in fp32, beside torch.save, torch's distributed checkpoint and DeepSpeed. Every system's files are
synced before the clock of the save is stopped. torch.save and DeepSpeed leave that to the system, and so their training
goes on before; Wherry's and DCP's stands still for it, unless they save behind training. Loads read what
the system may have in its cache, for all alike. The limit is the same bytes written to one file of each rank, synced,
and read from it into the memory that they came from.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, explain, systems
from benchmarks.checkpoint_worker import KEEPINGS, LIMIT
from benchmarks.rooms import Room, RoomFailed
from benchmarks.steps import MODELS, check_ranks
from wherry.observe import bench

WORKER = Path(__file__).parent / "checkpoint_worker.py"
MEASURES = ("save", "stall", "load")
# What is measured unless flags say otherwise, within six minutes: model, ranks, rounds.
CASES = (("125m", 1, 3), ("10m", 1, 5), ("10m", 2, 5))
TIMEOUT = 300.0


class Saving:
    """One way to keep states, in a room that stays: what each turn took, or why there is none."""

    def __init__(self, model: str, ranks: int, name: str, folder: Path) -> None:
        self.name, self.folder, self.turns, self.states = name, folder / f"{model}-{name}", 0, 0
        self.reason = systems.cannot_run(KEEPINGS[name].system)
        self.room: Room | None = None
        if self.reason is None and KEEPINGS[name].one_rank and ranks > 1:
            self.reason = "every rank would write the whole"
        self.model = model
        if self.reason is None:
            self.room = Room(ranks, worker=WORKER)

    def build(self) -> None:
        if self.room is not None:
            self._ask(do="build", keeping=self.name, recipe=MODELS[self.model])

    def _ask(self, **request: Any) -> list[Any] | None:
        assert self.room is not None
        try:
            answers = self.room.ask(TIMEOUT, **request)
        except RoomFailed as failure:
            self.reason = str(failure)
            self.room.close()
            return None
        if request["do"] == "build":
            self.states = answers[0]
        return answers

    def take(self) -> dict[str, Any] | None:
        if self.reason is not None:
            return None
        self.turns += 1
        answers = self._ask(do="take", folder=str(self.folder / str(self.turns)))
        if answers is None:
            return None
        found = {measure: max(answer[measure] for answer in answers) for measure in MEASURES}
        above = sum(answer["peak_bytes"] - answer["before_bytes"] for answer in answers)
        return found | {"written_bytes": answers[0]["written_bytes"], "above_bytes": above}

    def close(self) -> None:
        if self.room is not None:
            self.room.close()


def measure(model: str, ranks: int, names: Sequence[str], rounds: int, folder: Path) -> list[bench.Row]:
    savings: dict[str, Saving] = {}
    try:
        for name in names:
            savings[name] = Saving(model, ranks, name, folder)
        # Nothing is timed yet, so all cores are used.
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // ranks)) as builders:
            list(builders.map(Saving.build, savings.values()))
        taken = bench.interleave({name: saving.take for name, saving in savings.items()}, rounds, "saves and loads")
    finally:
        for saving in savings.values():
            saving.close()
    rows = []
    for of in MEASURES:
        case = {"model": model, "ranks": ranks, "measure": of}
        for name, saving in savings.items():
            if saving.reason is not None:
                rows.append(bench.row(case, name, "s", reason=saving.reason))
                continue
            found = [turn for turn in taken[name] if turn is not None]
            facts = {"states_bytes": saving.states, "written_bytes": found[-1]["written_bytes"]}
            facts["above_bytes"] = max(turn["above_bytes"] for turn in found)
            rows.append(bench.row(case, name, "s", [turn[of] for turn in found], **facts))
    bench.compare(rows, LIMIT)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns."""
    for model, ranks in dict.fromkeys((row["case"]["model"], row["case"]["ranks"]) for row in rows):
        mine = [row for row in rows if (row["case"]["model"], row["case"]["ranks"]) == (model, ranks)]
        lines, notes = [], []
        for name in dict.fromkeys(row["system"] for row in mine):
            by = {row["case"]["measure"]: row for row in mine if row["system"] == name}
            title = KEEPINGS[name].title
            if by["save"]["reason"] is not None:
                lines.append([title, *["-"] * 6])
                notes.append(f"{title}: {by['save']['reason']}")
                continue
            speed = by["save"]["states_bytes"] / by["save"]["value"] / 1e6
            times = [f"{by[of]['value']:.3f}" for of in MEASURES]
            lines.append(
                [title, times[0], bench.spread_words(by["save"]), times[1], times[2],
                 f"{speed:,.0f}", f"{by['save']['written_bytes'] / 1e6:,.1f}"]
            )  # fmt: skip
        columns = ("", "save s", "spread", "stall s", "load s", "save MB/s", "MB")
        bench.show(f"{model}, {systems.ranked(ranks)}", columns, lines, [*notes, ""])
    explain("save: until it is on the disk. stall: training stood still. MB: what was written.")


def cases_of(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Model, ranks and rounds of what is measured."""
    if options.models is None and options.ranks is None and not options.quick:
        return [(model, ranks, options.rounds or rounds) for model, ranks, rounds in CASES]
    models = options.models or (["10m"] if options.quick else ["125m", "10m"])
    rounds = options.rounds or (1 if options.quick else 3)
    return [(model, ranks, rounds) for model in models for ranks in options.ranks or [1]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("checkpoint", __doc__ or "")
    parser.add_argument("--models", type=bench.listed(tuple(MODELS)), help="of tiny, 10m, 125m (default: the last two)")
    parser.add_argument("--ranks", type=bench.positives, help="with commas (default: 1, and 2 for 10m)")
    parser.add_argument("--systems", type=bench.listed(tuple(KEEPINGS)), default=list(KEEPINGS), help="with commas")
    parser.add_argument("--rounds", type=bench.positive, help="times that everything is measured")
    parser.add_argument("--path", type=bench.folder, default=".", help="a folder on the disk (current)")
    options = bench.parse(parser, argv)
    cases = cases_of(options)
    for model, ranks, _ in cases:
        check_ranks(parser, [model], [ranks])
    results = bench.Results("checkpoint", options, {"cases": [list(case) for case in cases]}, limit=LIMIT)
    with tempfile.TemporaryDirectory(dir=os.path.abspath(options.path)) as folder:
        for model, ranks, rounds in cases:
            results.add(*measure(model, ranks, options.systems, rounds, Path(folder, str(ranks))))
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
