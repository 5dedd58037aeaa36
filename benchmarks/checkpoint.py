"""Saving and loading the states of training: python benchmarks/checkpoint.py [--quick] [--path FOLDER].

Seconds of a save until it is on the disk, of the training that stood still for it, and of a load, for weights and both
moments of AdamW in fp32, beside torch.save, torch's distributed checkpoint and DeepSpeed. Every system's files are
synced before the clock of the save is stopped. torch.save and DeepSpeed leave that to the system, and so their training
goes on before; Wherry's and DCP's stands still for it, unless they save behind training. The limit is the same bytes
written to one file of each rank, synced, and read from it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, systems
from benchmarks.checkpoint_worker import KEEPINGS
from benchmarks.processes import Failed, Processes
from benchmarks.steps import MODELS

WORKER = Path(__file__).parent / "checkpoint_worker.py"
MEASURES = ("save", "stall", "load")
TIMEOUT = 300.0


class Saving:
    """One way to keep states, in processes that stay: what each turn took, or why there is none."""

    def __init__(self, model: str, ranks: int, name: str, folder: Path) -> None:
        self.name, self.folder, self.turns, self.states = name, folder / f"{model}-{name}", 0, 0
        self.reason = systems.cannot_run(KEEPINGS[name].system)
        if KEEPINGS[name].one_rank and ranks > 1:
            self.reason = "every rank would write the whole"
        self.processes: Processes | None = None
        if self.reason is None:
            self.processes = Processes(ranks, worker=WORKER)
            states = self._ask(do="build", keeping=name, recipe=MODELS[model])
            self.states = states[0] if states else 0

    def _ask(self, **request: Any) -> list[Any] | None:
        assert self.processes is not None
        try:
            return self.processes.ask(TIMEOUT, **request)
        except Failed as failure:
            self.reason = str(failure)
            self.processes.close()
            return None

    def take(self) -> dict[str, float] | None:
        if self.reason is not None:
            return None
        self.turns += 1
        answers = self._ask(do="take", folder=str(self.folder / str(self.turns)))
        return answers and {of: max(answer[of] for answer in answers) for of in (*MEASURES, "written_bytes")}


def measure(model: str, ranks: int, names: Sequence[str], rounds: int, folder: Path) -> list[harness.Row]:
    savings: dict[str, Saving] = {}
    try:
        for name in names:
            savings[name] = Saving(model, ranks, name, folder)
        taken = harness.interleave({name: saving.take for name, saving in savings.items()}, rounds)
    finally:
        for saving in savings.values():
            if saving.processes is not None:
                saving.processes.close()
    rows = []
    for of in MEASURES:
        case = {"model": model, "ranks": ranks, "measure": of}
        for name, saving in savings.items():
            if saving.reason is not None:
                rows.append(harness.row(case, name, "s", reason=saving.reason))
                continue
            found = [turn for turn in taken[name] if turn is not None]
            facts = {"states_bytes": saving.states, "written_bytes": found[-1]["written_bytes"]}
            rows.append(harness.row(case, name, "s", [turn[of] for turn in found], **facts))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--models", type=harness.listed(MODELS), help="(default: 125m, 10m)")
    parser.add_argument("--ranks", type=harness.positives, default=[1], help="with commas (default: 1)")
    parser.add_argument("--systems", type=harness.listed(KEEPINGS), default=list(KEEPINGS), help="with commas")
    parser.add_argument("--path", type=harness.folder, default=".", help="a folder on the disk (current)")
    options = harness.parse(parser, argv)
    models = options.models or (["10m"] if options.quick else ["125m", "10m"])
    rounds = options.rounds or (1 if options.quick else 3)
    results = harness.Results("checkpoint", options, {"models": models, "ranks": options.ranks, "rounds": rounds})
    with tempfile.TemporaryDirectory(dir=os.path.abspath(options.path)) as folder:
        for model in models:
            for ranks in options.ranks:
                results.add(*measure(model, ranks, options.systems, rounds, Path(folder, str(ranks))))
    harness.show(results.rows, {"MB/s": lambda row: f"{row['states_bytes'] / row['value'] / 1e6:,.0f}"})
    results.close()
    return 0


if __name__ == "__main__":
    harness.alone(main)
