"""GPT-2 10B with the device limited to 32 GB: python benchmarks/gpu_offload.py [--model 10b] [--trace FILE].

Step time beside the bound of this machine, and a profiler's trace of two steps, from which is read how much of the
copying ran beside kernels. Where host memory is short for 10B it is tried without clipping, which needs less; and then
the largest of the published sizes that fits is taken, and the file says so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, gpu, systems
from benchmarks.gpu import CAP
from benchmarks.gpu_session import SIZES, TOY, NoTime, Session, blocks, let_go, step_row
from benchmarks.rooms import RoomFailed
from benchmarks.systems import Recipe
from wherry.observe import bench

DESCENDING = ("10b", "8b", "6b", "4b", "2b", "1b")
CLIPS = (1.0, 0.0)
STEPS = 2


def measure(session: Session, wanted: str, trace: Path) -> None:
    """Rows for the wanted size, or with the reason for each that does not fit, down to one that does."""
    for model in DESCENDING[DESCENDING.index(wanted) :]:
        if model not in session.sizes:
            continue
        for clip in CLIPS:
            recipe = replace(session.sizes[model], clip=clip)
            row = _measured(session, model, recipe)
            session.results.add(row)  # before the trace, which may fail
            if row["reason"] is None:
                session.results.put(row | {"trace": _traced(session, model, trace)})
                return
            let_go(session, model)  # or its memory is missing for the next
            if "of host memory" not in row["reason"]:
                break


def _measured(session: Session, model: str, recipe: Recipe) -> bench.Row:
    system, options = gpu.place_for(recipe), session.options
    case = {"measure": "offload", "model": model, "clip": recipe.clip, "cap_gib": CAP}
    try:
        session.ask(do="cap", gib=CAP)
        built = session.build(model, system, recipe, warmup=1, shrink=True)
        taken = replace(recipe, batch=built["batch"])
        found = blocks(session, model, options.rounds, options.steps, taken.batch)
    except (RoomFailed, NoTime) as failure:
        return bench.row(case | {"tokens": recipe.batch * recipe.length}, system, "s", reason=str(failure))
    facts = {"built_s": built["built_s"], "batch_of_table": recipe.batch}
    return step_row(session, case | {"tokens": taken.batch * taken.length}, system, taken, found, **facts)


def _traced(session: Session, model: str, path: Path) -> dict[str, Any]:
    """What a profiler saw of some steps, or the reason why there is nothing."""
    try:
        return session.ask(do="profile", name=model, steps=STEPS, path=str(path)) | {"steps": STEPS}
    except (RoomFailed, NoTime) as failure:
        return {"reason": str(failure)}


def main(argv: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    parser = bench.parser("gpu_offload", __doc__ or "")
    parser.add_argument("--model", choices=DESCENDING, default="10b", help="the size to begin with (10b)")
    parser.add_argument("--deadline", type=bench.positive, default=520, help="seconds after which it has ended (520)")
    parser.add_argument("--rounds", type=bench.positive, help="blocks of steps (5; 2 with --quick)")
    parser.add_argument("--steps", type=bench.positive, default=2, help="steps in a block")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the profiler's trace, for chrome://tracing")
    parser.add_argument("--path", type=bench.folder, help="a folder on the disk whose rate is measured too")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at a size that only shows that it works")
    options = bench.parse(parser, argv)
    if not options.toy and systems.device_type() != "cuda":
        parser.error("no GPU is seen by torch here; --toy shows on the CPU that everything works")
    options.rounds = options.rounds or (2 if options.quick else 5)
    sizes = TOY if options.toy else SIZES
    wanted = "1b" if options.toy else options.model
    settings = {"deadline_s": options.deadline, "rounds": options.rounds, "steps": options.steps, "toy": options.toy}
    results = bench.Results("gpu_offload", options, settings | {"recipe": asdict(sizes[wanted])})
    session = Session(options, results, begun)
    with tempfile.TemporaryDirectory() as folder:
        try:
            gpu.run(session, ["rates"])
            measure(session, wanted, options.trace or Path(folder) / "trace.json")
            results.close()  # before a process that has pinned much is waited for
        finally:
            session.close()
    gpu.table(results.rows)
    for row in results.rows:
        seen = row.get("trace", {})
        if seen.get("hidden") is not None:
            print(f"{row['case']['model']}: {100 * seen['hidden']:.0f}% of the copying ran beside kernels")
        elif seen:
            print(f"{row['case']['model']}: no trace: {seen.get('reason', 'the profiler saw no copies')}")
    return 0


if __name__ == "__main__":
    alone(main)
