"""What wants a GPU, in parts that end in time: python benchmarks/gpu.py [PART ...] [--json FOLDER] [--deadline S].

`facts`: what the machine is and what its memory does when it is used, its rates, the tests for a GPU, and whether every
policy gives the bits of `at_step`. `policies`: steps of a model of 1B at 1k to 64k tokens, with clipping and without.
`peers`: FSDP2's and DeepSpeed's offload beside ours. `large`: 4B and 8B with a trace. `largest`: the largest model that
takes a step in so much of a GPU's memory.

Each part stands alone, and writes FOLDER/PART.json as rows come. What one has measured or compiled within the hour, of
the same sources, the next takes over. What time leaves out is named. Nothing is installed; `make gpu` collects what a
machine without a network lacks. `--toy` runs it on the CPU at a size that shows that it works, and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import bounds, harness, machine, systems
from benchmarks.processes import TOO_LATE, Failed, Processes
from benchmarks.steps import LARGE, MODELS, WARMUP, Subject, Turn, recipe_of, rows_of
from benchmarks.systems import COMPUTE
from wherry.errors import WherryError
from wherry.observe.memory import host_memory

NO_TIME = "no time was left"
OURS, ALL_OURS = "wherry-2-cpu", "wherry-3-cpu"
# Of each part: model, systems and clipping, what matters most first.
TIMED: dict[str, list[tuple[str, tuple[str, ...], float]]] = {
    "policies": [
        ("1b", (COMPUTE, f"{OURS}:before_use"), 1.0),
        ("1b", (f"{OURS}:in_backward",), 0.0),
        ("1b", (f"{OURS}:at_step", f"{OURS}:delayed", f"{ALL_OURS}:before_use", "wherry-2:at_step"), 1.0),
        ("1b", (f"{OURS}:before_use", f"{OURS}:at_step", f"{OURS}:delayed"), 0.0),
    ],
    "peers": [
        ("1b", (COMPUTE, f"{OURS}:before_use", "deepspeed-2-cpu", f"{ALL_OURS}:before_use"), 1.0),
        ("1b", ("fsdp2-cpu", "deepspeed-3-cpu", "deepspeed-3-super", "deepspeed-3-reflow"), 1.0),
        ("1b", (f"{OURS}:in_backward", "deepspeed-2-cpu"), 0.0),
    ],
    "large": [
        ("4b", (COMPUTE, f"{OURS}:before_use", f"{ALL_OURS}:before_use"), 1.0),
        ("8b", (COMPUTE, f"{ALL_OURS}:before_use", f"{OURS}:before_use"), 1.0),
    ],
}
# Sequences of 1,024 tokens in a step.
BATCHES = {"policies": (1, 4, 16, 64), "peers": (4, 16, 64), "large": (8, 32)}
TOY_BATCHES = (1, 4)
# Seconds after which no further step of a measure is begun.
MEASURE_S = 20.0
# Plain steps of each policy, whose bits are compared.
PLAIN_STEPS = 20
# Gigabytes of a GPU that a model may take; None: all of it.
CAPS = (8, 16, 24, 32, None)
# Seconds that one try may take, and bytes of host memory that a parameter takes with all that goes beside it.
TRY_S, HOST_BYTES = 120.0, 15
# What is measured of the same sources is not measured again for so many seconds.
FRESH_S = 3600.0


@dataclass
class Run:
    """One part: until when, and where its rows go."""

    part: str
    options: argparse.Namespace
    folder: Path
    ends: float
    results: harness.Results

    @property
    def gpu(self) -> bool:
        return not self.options.toy

    @property
    def left(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    def ask(self, processes: Processes, limit: float = math.inf, **request: Any) -> Any:
        """The answer to a request, or to the one that was sent; a failure says which time was over."""
        seconds = min(self.left, limit)
        try:
            if request:
                processes.send(**request)
            return processes.answers(seconds)[0]
        except Failed as failure:
            if str(failure) != TOO_LATE:
                raise
            raise Failed(NO_TIME if seconds < limit else f"not within {limit:.0f} s") from None

    def tell(self, what: str) -> None:
        print(f"{self.left:.0f} s left: {what}", file=sys.stderr, flush=True)

    def host_lacks(self, parameters: float) -> str | None:
        """Why states are not even tried to be put there: a machine without memory may end more than a try."""
        needed, free = HOST_BYTES * parameters, host_memory().available
        return f"the host has {free / 1e9:.0f} GB free of {needed / 1e9:.0f}" if needed > free else None

    @cached_property
    def earlier(self) -> dict[str, harness.Row]:
        """What other parts have measured on this machine."""
        found: dict[str, harness.Row] = {}
        now, head = datetime.datetime.now(datetime.UTC), self.results.head
        for path in self.folder.glob("*.json"):
            try:
                file = harness.read(path)
            except WherryError:
                continue
            age = (now - datetime.datetime.fromisoformat(file["date"])).total_seconds()
            same = machine.slug(file["machine"]) == machine.slug(head["machine"])
            same = same and all(file[name] == head[name] for name in ("benchmark", "settings"))
            if same and age < FRESH_S and path != self.results.path:
                rows = [row | {"from": file["part"]} for row in file["rows"] if row["reason"] is None]
                found |= {harness.key(row): row for row in rows}
        return found

    def rates(self, folder: str | None = None) -> dict[str, float]:
        """The machine's, as rows too; with a `folder`, that of its disk, and all of them anew."""
        rows = [row for row in self.earlier.values() if "rate" in row["case"] and folder is None]
        if not rows:
            with Processes(1, gpu=self.gpu) as processes:
                found = self.ask(processes, do="rates", dtype="bf16", folder=folder, quick=not self.gpu)
            units = {name: "flop/s" if name == "matrix" else "B/s" for name in found}
            rows = [
                harness.row({"rate": name}, "this machine", units[name], values, more_is_better=True)
                for name, values in found.items()
            ]
        self.results.add(*rows)
        return {row["case"]["rate"]: row["value"] for row in rows}


# Steps beside their bound.


def timed(run: Run) -> bool:
    """Every system is built once, and takes steps of each size. While it is built, the next one's process starts."""
    pending: dict[str, list[Subject]] = {}
    for model, labels, clip in TIMED[run.part]:
        for label in labels if run.options.systems is None else [one for one in labels if one in run.options.systems]:
            recipe = recipe_of(model if run.gpu else "tiny", label, "bf16", clip, 1, None)
            recipe = replace(recipe, built="meta" if run.part == "large" else "device", recompute=True)
            name, system = model if run.gpu else "tiny", label.partition(":")[0]
            one = Subject(name, 1, system, label, recipe, run.options.steps, gpu=run.gpu)
            batches = BATCHES[run.part] if run.gpu else TOY_BATCHES
            sizes = [replace(one, recipe=replace(recipe, batch=batch)) for batch in batches]
            earlier = run.earlier if recipe.built == "device" else {}
            known = [[earlier.get(harness.key(row)) for row in rows_of(size, [])] for size in sizes]
            run.results.add(*(row for rows in known for row in rows if row is not None))
            sizes = [size for size, rows in zip(sizes, known, strict=True) if None in rows]
            lacks = run.host_lacks(recipe.parameters) if "-cpu" in system and run.gpu else None
            # Every row is there from the beginning: a file says what is not measured yet.
            _leave_out(run, sizes, one.reason or lacks)
            if sizes and sizes[0].reason is None:
                pending[f"{name} {label} {clip}"] = sizes
    rates = run.rates()
    ahead: list[Processes] = []

    def start(system: str) -> None:
        ahead.append(Processes(1, gpu=run.gpu))
        ahead[-1].send(do="ready", system=system)

    following = [sizes[0].system for sizes in pending.values()][1:]
    try:
        for index, sizes in enumerate(pending.values()):
            if not run.left:
                _leave_out(run, sizes, NO_TIME)
                continue
            if not ahead:
                start(sizes[0].system)
            _take(run, ahead.pop(), sizes, rates, partial(start, *following[index : index + 1]))
    finally:
        for processes in ahead:
            processes.close()
    return True


def _take(
    run: Run, processes: Processes, sizes: Sequence[Subject], rates: dict[str, float], start_next: partial[None]
) -> None:
    """The rows of a system, size after size."""
    done, one, system = 0, sizes[0], sizes[0].system
    run.tell(f"{one.model} {one.label} {'clipped' * bool(one.recipe.clip)}")
    with processes:
        try:
            run.ask(processes)
            processes.send(do="build", system=system, recipe=one.recipe, warmup=WARMUP)
            if start_next.args:
                start_next()
            built = run.ask(processes)
            for size in sizes:
                limits = {"batch": size.recipe.batch, "steps": size.steps, "seconds": min(MEASURE_S, run.left / 4)}
                took = run.ask(processes, do="time", system=system, **limits)
                trace = None
                if run.part == "large" and not done and system != COMPUTE:
                    path = run.folder / f"trace-{one.model}-{one.label.replace(':', '-')}.json.gz"
                    trace = run.ask(processes, do="trace", system=system, steps=2, path=str(path))
                step, peak = rows_of(size, [Turn.of([built], [took], trace)])
                _add_bound(run.results.rows, step, size, rates)
                peak["host_bytes_per_parameter"] = (peak["value"] - peak["empty_bytes"]) / size.recipe.parameters
                run.results.add(step, peak)
                done += 1
        except Failed as failure:
            _leave_out(run, sizes[done:], str(failure))


def _leave_out(run: Run, sizes: Sequence[Subject], reason: str | None) -> None:
    """Rows that say why they are empty: without a reason, that they are not measured yet."""
    for size in sizes:
        size.reason = reason
        run.results.add(*rows_of(size, []))


def _add_bound(rows: Sequence[harness.Row], row: harness.Row, subject: Subject, rates: dict[str, float]) -> None:
    """Beside a step the time of its products at the machine's rate, and the shortest that it could take."""
    recipe = subject.recipe
    row["matrix_s"] = recipe.flops / rates["matrix"]
    if subject.system == COMPUTE:
        row |= {"bound_s": row["matrix_s"], "bound_by": "matrix"}
        return
    alike = {name: row["case"][name] for name in ("model", "tokens", "measure")}
    same = [one for one in rows if one["system"] == COMPUTE and one["value"] and alike.items() <= one["case"].items()]
    phases = (same[0]["forward_s"], same[0]["backward_s"]) if same else bounds.computing(recipe, rates["matrix"])
    work = bounds.work_of(subject.system, recipe, subject.gpu)
    waits = bool(recipe.clip) and recipe.policy != "delayed"
    row["bound_s"], row["bound_by"] = bounds.bound(work, rates, *phases, waits=waits)
    row["compute_from"] = "measured" if same else "matrix"


# What the machine is, and whether training is right there.


def facts(run: Run) -> bool:
    touched = int(min(1 << 34, host_memory().available / 2)) if run.gpu else 1 << 26
    run.results.head["facts"] = machine.facts(touched)
    run.rates(str(run.options.path or run.folder))
    compiler = None
    if run.gpu and systems.cannot_run("deepspeed-2-cpu") is None:
        # For the part that times it: here, where nothing is timed any more.
        compiler = subprocess.Popen([sys.executable, str(harness.ROOT / "benchmarks" / "build_peers.py")])
    good = [_same_bits(run), _tests(run)]
    if compiler is not None and _wait(compiler, run.left) is None:
        run.tell("DeepSpeed's operators are still being compiled")
    return all(good)


def _same_bits(run: Run) -> bool:
    """Plain steps of one engine after the other: each exact policy has the losses and the weights of `at_step`."""
    policies = [(1.0, policy) for policy in ("at_step", "at_step", "before_use")]
    policies += [(0.0, policy) for policy in ("at_step", "before_use", "in_backward", "delayed")]
    places = [(dtype, system) for dtype in ("bf16", "fp32") for system in (OURS, ALL_OURS)]
    first: dict[Any, list[float]] = {}
    reason, good = None, []
    with Processes(1, gpu=run.gpu) as processes:
        for (dtype, system), (clip, policy) in product(places, policies):
            case = {"check": "bits of at_step", "dtype": dtype, "clip": clip, "steps": PLAIN_STEPS}
            label, unit = f"{system}:{policy}", "weights differ"
            training = dtype, system, clip
            label += " again" * (policy == "at_step" and training in first)
            recipe = replace(MODELS["125m" if run.gpu else "tiny"], dtype=dtype, clip=clip, policy=policy)
            if reason is None:
                try:
                    found = run.ask(processes, do="bits", system=system, recipe=recipe, steps=PLAIN_STEPS)
                except Failed as failure:
                    reason = str(failure)
            if reason is not None:
                good.append(reason == NO_TIME)
                run.results.add(harness.row(case, label, unit, reason=reason))
                continue
            losses, value = found["losses"], float(found["differ"])
            good.append(losses == first.setdefault(training, losses) and not value)
            if policy == "delayed":  # it trains something else
                case["check"], unit = "loss falls", "of the first losses"
                value = statistics.fmean(losses[-4:]) / statistics.fmean(losses[:4])
                good[-1] = value < 1
            run.results.add(harness.row(case, label, unit, [value], losses=losses, good=good[-1]))
    return all(good)


def _tests(run: Run) -> bool:
    """Those of tests/gpu that want one: what is simulated needs none."""
    file = run.folder / "tests.txt"
    words = f"-m pytest tests/gpu -vv --timeout 120 -p no:cacheprovider --junitxml {run.folder.absolute()}/tests.xml"
    command = [sys.executable, *words.split(), "-k", "not fragments and not plan"]
    environment = os.environ | systems.environment(1, run.gpu)
    with file.open("w", encoding="utf-8") as output:
        tests = subprocess.Popen(command, cwd=harness.ROOT, stdout=output, stderr=output, env=environment)
        if _wait(tests, run.left) is None:
            tests.send_signal(signal.SIGINT)  # it then writes what it has found
            if _wait(tests, 10.0) is None:
                tests.kill()
    found = re.findall(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)", file.read_text(), flags=re.MULTILINE)
    results = {word: [name for name, result in found if result == word] for _, word in found}
    failed = results.get("FAILED", []) + results.get("ERROR", [])
    passed, skipped = len(results.get("PASSED", [])), len(results.get("SKIPPED", []))
    facts = {"failed": failed, "skipped": skipped, "status": tests.wait(), "in_time": bool(run.left)}
    values, reason = [float(passed)], None
    if not passed and not failed:
        values, reason = [], f"none ran: {skipped} were skipped, and pytest ended with status {facts['status']}"
    row = harness.row({"check": "tests/gpu"}, "wherry", "passed", values, more_is_better=True, reason=reason, **facts)
    run.results.add(row)
    return not failed and (facts["status"] == 0 or not facts["in_time"])


def _wait(process: subprocess.Popen[Any], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


# The largest model.


@dataclass
class Ladder:
    """Models in order of size, of which a system takes the lower ones."""

    run: Run
    system: str
    names: list[str]
    # What fits in no case, and what fitted last with the device's bytes that it took; more may fit in more.
    high: int
    fitted: tuple[int, float] | None = None
    tries: list[dict[str, Any]] = field(default_factory=list)

    def recipe(self, place: int) -> systems.Recipe:
        return replace(MODELS[self.names[place]], batch=1, built="meta", recompute=True, dtype="bf16")

    def fits(self, place: int, cap: int | None) -> bool | None:
        """Whether it takes steps in `cap` GB; None if time is over."""
        recipe, begun = self.recipe(place), time.monotonic()
        request = {"system": self.system, "recipe": recipe, "warmup": WARMUP, "device_bytes": cap and cap * 1e9}
        one = {"model": self.names[place], "reason": self.run.host_lacks(recipe.parameters)}
        if one["reason"] is None:
            with Processes(1, gpu=self.run.gpu) as processes:
                try:
                    found = self.run.ask(processes, TRY_S, do="build", **request)
                    one |= {name: found[name] for name in ("device_bytes", "peak_bytes", "losses")}
                    self.fitted = place, found["device_bytes"] or 0.0
                except Failed as failure:
                    one["reason"] = str(failure)
        self.tries.append(one | {"seconds": time.monotonic() - begun})
        self.run.tell(f"{one['model']} {self.system} in {cap or 'all'} GB: {one['reason'] or 'it fits'}")
        if one["reason"] not in (None, NO_TIME) and "OutOfMemoryError" not in one["reason"]:
            self.high = min(self.high, place)
        return None if one["reason"] == NO_TIME else one["reason"] is None

    def guess(self, cap: int | None) -> int:
        """The last that should fit, were the device's bytes in proportion to the parameters."""
        sizes = [self.recipe(place).parameters for place in range(len(self.names))]
        place, taken = self.fitted or (0, 3.0 * sizes[0])
        room = math.inf if cap is None else cap * 1e9 * sizes[place] / max(taken, 1.0)
        return sum(size <= room for size in sizes) - 1


def largest(run: Run) -> bool:
    names = list(LARGE) if run.gpu else ["tiny"]
    chosen = [one for one in (ALL_OURS, OURS) if one in (run.options.systems or (one,))]
    ladders = [Ladder(run, one, names, len(names)) for one in chosen]
    for cap, ladder in product(CAPS if run.gpu else CAPS[-1:], ladders):
        ladder.tries = []
        least = ladder.fitted[0] if ladder.fitted else -1
        low, high = search(partial(ladder.fits, cap=cap), partial(ladder.guess, cap), least, ladder.high)
        case = {"measure": "largest model", "device_GB": cap, "tokens": ladder.recipe(0).length}
        facts = {"tries": ladder.tries, "sure": high - low == 1, "next": names[high] if high < len(names) else None}
        if low < 0:
            reason = ladder.tries[-1]["reason"] if facts["sure"] and ladder.tries else NO_TIME
            run.results.add(harness.row(case, ladder.system, "parameters", reason=reason, **facts))
            continue
        values = [float(ladder.recipe(low).parameters)]
        facts |= {"model": names[low]}
        run.results.add(harness.row(case, ladder.system, "parameters", values, more_is_better=True, **facts))
    return True


def search(fits: Callable[[int], bool | None], guess: Callable[[], int], low: int, high: int) -> tuple[int, int]:
    """Of places in order of size the last known to fit, from `low`, and the first known not to, to `high`.

    Each try is where `guess` says, or next to what is known. One that says nothing, for want of time, is the last.

    >>> search(lambda place: place <= 3, lambda: 5, -1, 10)
    (3, 4)
    """
    while high - low > 1:
        place = min(max(guess(), low + 1), high - 1)
        found = fits(place)
        if found is None:
            break
        low, high = (place, high) if found else (low, place)
    return low, high


PARTS: dict[str, Callable[[Run], bool]] = {"facts": facts, **dict.fromkeys(TIMED, timed), "largest": largest}
COLUMNS: dict[str, Callable[[harness.Row], str]] = {
    "of bound": lambda row: f"{row['bound_s'] / row['value']:.2f} {row['bound_by']}" if "bound_s" in row else "",
    "TFLOPS": lambda row: f"{row['tflops']:.0f}" if "tflops" in row else "",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--deadline", type=harness.positive, default=450, help="seconds for each part (450)")
    parser.add_argument("--steps", type=harness.positive, default=5, help="steps in a measure (5)")
    known = {OURS, ALL_OURS, *(label for parts in TIMED.values() for _, labels, _ in parts for label in labels)}
    parser.add_argument("--systems", type=harness.listed(sorted(known)), help="only these, with commas")
    parser.add_argument("--path", type=harness.folder, help="a folder on the disk that `facts` measures (FOLDER)")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at a size that only shows that it works")
    parser.set_defaults(json=harness.ROOT / "build" / "gpu")
    options = harness.parse(parser, argv)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    if not options.toy and systems.device_type() == "cpu":
        parser.error("no GPU is seen by torch here; --toy shows on the CPU that everything works")
    if options.toy:  # threads that wait for each other leave the processors to others: it is no measure
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    options.json.mkdir(parents=True, exist_ok=True)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path or options.json)
    settings = {"toy": options.toy, "steps": options.steps, "sources": _sources()}
    good = True
    for part in options.parts or PARTS:
        ends = time.monotonic() + options.deadline
        results = harness.Results("gpu", options, settings, part, options.json / f"{part}.json")
        try:
            good &= PARTS[part](Run(part, options, options.json, ends, results))
        except Failed as failure:
            print(f"{part}: {failure}", file=sys.stderr)
            good = False
        harness.show(results.rows, COLUMNS)
        results.close()
    return 0 if good else 1


def _sources() -> str:
    """What tells Wherry's sources, and those that measure it, from others."""
    found = hashlib.sha256()
    for path in sorted(path for name in ("src", "benchmarks") for path in (harness.ROOT / name).rglob("*.[ps][yo]")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    harness.alone(main)
