"""Peak memory by placement, beside the published formulas: python benchmarks/memory.py [--quick] [--path FOLDER].

A batch so small that activations do not count: what is left above an empty process is the training states, and what an
engine takes beside them. Of Wherry's also the bytes of states that the engine holds, beside those that a plan told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, systems
from benchmarks.steps import MODELS, Subject, losses_words, measure

_PLACES = tuple(place.name for place in (*systems.RESIDENT, *systems.OFFLOADED))
SYSTEMS = ("plain", "ddp", *systems.FSDP2, *(f"{who}-{place}" for who in ("wherry", "deepspeed") for place in _PLACES))
LENGTH = 16
STATES = ("parameters", "gradients", "optimizer")


def rows_of(subjects: Sequence[Subject], rounds: int, results: harness.Results) -> None:
    """A row for each subject: bytes above an empty process, beside the formula's."""
    measure(subjects, rounds, results)
    peaks = {row["system"]: row for row in results.rows if row["case"]["measure"] == "peak memory"}
    results.rows = [row for row in results.rows if row["case"]["measure"] not in ("peak memory", "step")]
    for subject in subjects:
        row = peaks[subject.label]
        case = subject.case("memory above an empty process")
        if row["reason"] is not None:
            results.add(harness.row(case, subject.label, "B", reason=row["reason"]))
            continue
        above = [max(1.0, value - row["empty_bytes"]) for value in row["values"]]
        made = harness.row(case, subject.label, "B", above, formula_bytes=row["states_bytes"], memory=row["memory"])
        made["forecast_bytes"] = forecast(subject) if row["memory"] else None
        made["bytes_per_parameter"] = made["value"] / subject.recipe.parameters
        made["loss_difference"] = row.get("loss_difference")
        results.add(made)


def forecast(subject: Subject) -> int:
    """Bytes of states of one rank, on any tier, that `wherry.estimate` says are kept between steps."""
    import wherry
    from wherry.plan.machines import known

    recipe, ranks = subject.recipe, subject.ranks
    config = systems.config_of(systems.place_of(subject.system), recipe, ranks)
    machine = replace(known("4090"), gpus=0)  # without a GPU the host is the device
    found = wherry.estimate(lambda: (recipe.model(), recipe.batch_of(0, 0, ranks)), config, machine, ranks=ranks)
    return sum(row.bytes for row in found.rows if row.category in STATES)


def _held(row: harness.Row) -> str:
    """Of an engine that tells: bytes of states that it counts, and how far off the forecast was."""
    held = sum(state["bytes_actual"] for state in row["memory"] if state["state"] in STATES)
    return f"{held / 1e6:,.0f} MB, {row['forecast_bytes'] / held - 1:+.1%}" if held else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--models", type=harness.listed(MODELS), help="(default: 125m; 10m with --quick)")
    parser.add_argument("--dtypes", type=harness.listed(("fp32", "bf16")), default=["bf16"], help="(default: bf16)")
    parser.add_argument("--systems", type=harness.listed(SYSTEMS), default=list(SYSTEMS), help="with commas")
    parser.add_argument("--ranks", type=harness.positives, default=[2], help="numbers of ranks (default: 2)")
    parser.add_argument("--path", type=harness.folder, default=".", help="a folder on the disk for states (current)")
    options = harness.parse(parser, argv)
    models = options.models or (["10m"] if options.quick else ["125m"])
    rounds = options.rounds or (1 if options.quick else 3)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path)
    results = harness.Results("memory", options, {"rounds": rounds, "length": LENGTH, "models": models})
    for model in models:
        for dtype in options.dtypes:
            for ranks in options.ranks:
                length = min(LENGTH, MODELS[model].length)
                recipe = replace(MODELS[model], dtype=dtype, batch=ranks, length=length)
                subjects = [Subject(model, 1, "plain", "plain", recipe, 2)]  # for the losses
                subjects += [
                    Subject(model, ranks, name, name, recipe, 2)
                    for name in options.systems
                    if (name, ranks) != ("plain", 1)
                ]
                rows_of(subjects, rounds, results)
    harness.show(
        results.rows,
        {
            "formula": lambda row: f"{row['formula_bytes'] / 1e6:,.0f} MB",
            "B/param": lambda row: f"{row['bytes_per_parameter']:.1f}",
            "held, forecast off": _held,
            "losses": losses_words,
        },
    )
    results.close()
    return 0


if __name__ == "__main__":
    harness.alone(main)
