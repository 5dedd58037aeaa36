"""What wants a GPU, in one command that ends in time: python benchmarks/gpu.py [STAGE ...] [--deadline SECONDS].

The rates of the machine, and steps of GPT-2 beside the bound that they set. `policies`: update policies side by side
at 1B, with clipping and without; `peers`: FSDP2's and DeepSpeed's offload beside ours; `large`: 4B with a trace. Rows
are written as they come, and what time leaves out is named. DeepSpeed compiles its host optimizer at its first use:
`python benchmarks/build_peers.py` does it once, before. `--toy` runs all of it on the CPU at a size that shows that it
works, and nothing else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import bounds, harness, systems
from benchmarks.processes import Processes
from benchmarks.steps import Subject, measure, recipe_of

# Model, its systems, clipping.
STAGES: dict[str, list[tuple[str, tuple[str, ...], float]]] = {
    "policies": [
        ("1b", ("compute", *(f"wherry-2-cpu:{name}" for name in ("before_use", "at_step", "delayed"))), 1.0),
        ("1b", ("wherry-3-cpu:before_use", "wherry-2:at_step"), 1.0),
        ("1b", ("wherry-2-cpu:in_backward", "wherry-2-cpu:before_use"), 0.0),
    ],
    "peers": [
        ("1b", ("wherry-2-cpu:before_use", "deepspeed-2-cpu", "wherry-3-cpu:before_use"), 1.0),
        ("1b", ("fsdp2-cpu", "deepspeed-3-cpu", "deepspeed-3-super"), 1.0),
    ],
    "large": [("4b", ("wherry-3-cpu:before_use", "wherry-2-cpu:before_use"), 1.0)],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--deadline", type=harness.positive, default=450, help="seconds for all (450)")
    parser.add_argument("--steps", type=harness.positive, default=5, help="steps in a block (5)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the profiler's trace of `large`")
    parser.add_argument("--path", type=harness.folder, help="a folder on the disk whose rate is measured too")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at a size that only shows that it works")
    options = harness.parse(parser, argv)
    if unknown := [name for name in options.stages if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; expected some of {', '.join(STAGES)}")
    if not options.toy and systems.device_type() != "cuda":
        parser.error("no GPU is seen by torch here; --toy shows on the CPU that everything works")
    ends = time.monotonic() + options.deadline
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path or ".")
    gpu = not options.toy
    results = harness.Results(
        "gpu", options, {"deadline_s": options.deadline, "toy": options.toy}, part="-".join(options.stages)
    )
    with Processes(1, gpu=gpu) as processes:
        rates = processes.ask(do="rates", dtype="bf16", folder=options.path, quick=options.toy)[0]
    for name, values in rates.items():
        unit = "flop/s" if name == "matrix" else "B/s"
        results.add(harness.row({"rate": name}, "this machine", unit, values, more_is_better=True))
    for stage in options.stages or STAGES:
        for model, names, clip in STAGES[stage]:
            subjects = []
            for label in names:
                recipe = recipe_of("tiny" if options.toy else model, label, "bf16", clip, 1, None)
                if options.toy:
                    recipe = replace(recipe, built_there=True, recompute=True)
                one = Subject(model, 1, label.partition(":")[0], label, recipe, options.steps, gpu, deadline=ends)
                subjects.append(one)
            if stage == "large":
                subjects[0].trace = options.trace or Path(tempfile.gettempdir(), "wherry-trace.json")
            measure(subjects, options.rounds or 1, results)
            _add_bounds(results, subjects, bounds.medians(rates), gpu)
    harness.show(
        results.rows,
        {"of bound": lambda row: f"{row['bound_s'] / row['value']:.2f} {row['bound_by']}" if "bound_s" in row else ""},
    )
    results.close()
    return 0


def _add_bounds(results: harness.Results, subjects: Sequence[Subject], rates: dict[str, float], gpu: bool) -> None:
    for subject in subjects:
        for row in results.rows:
            if row["case"] == subject.case("step") and row["system"] == subject.label and row["value"]:
                work = bounds.work_of(subject.system, subject.recipe, gpu)
                row["bound_s"], row["bound_by"] = bounds.bound(work, rates)
    results.add()


if __name__ == "__main__":
    harness.alone(main)
