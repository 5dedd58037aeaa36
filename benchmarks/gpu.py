"""First figures of a GPU in twelve minutes: python benchmarks/gpu.py [PART ...] [--json FOLDER].

`smoke`: host memory, native kernels, pinning, rates, the Triton kernel. `bits`: 20 plain steps of every policy beside
`at_step`, and the tests for a GPU. `steps`: a model of 1.1 billion parameters at 8k tokens, clipped, under each policy.
`peers`: the same beside FSDP2's and DeepSpeed's offload. `large`: 7 billion with everything on the host. `tokens`: 1k
to 64k tokens, Qwen3-4B, and state on disk.

A part stands alone and has about two minutes. What fails or hangs in it is a row with the reason, and the next one
begins; FOLDER/PART.json is written as rows come. Rates and steps of the same sources that another part has measured
within the hour are taken over. `make gpu` collects what a machine without a network lacks, and prints the commands.
`--toy` runs everything on the emulated device of tests/accelerator, at a size that only shows that it works.
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import bounds, harness, machine, systems
from benchmarks.processes import TOO_LATE, Failed, Processes
from benchmarks.steps import WARMUP, Subject, Turn, recipe_of, rows_of
from benchmarks.systems import COMPUTE
from wherry.errors import WherryError
from wherry.observe.memory import host_memory

NO_TIME = "no time was left"
# Seconds of each part, and further ones after which a part that does not end by itself is left.
SECONDS = {"smoke": 100, "bits": 110, "steps": 120, "peers": 120, "large": 140, "tokens": 130}
GRACE_S = 5.0
# Seconds for pytest to print its results after an interrupt: fewer than GRACE_S, or their row would be lost.
INTERRUPT_S = 2.0
# The system of rows about the machine itself.
MACHINE = "this machine"
# Measures of the same sources and machine are taken over for so many seconds.
FRESH_S = 3600.0


class PartTimeout(BaseException):
    """A part's time limit has passed."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise PartTimeout in the main thread, whatever it waits for, after so many seconds."""

    def on_alarm(*_: object) -> None:
        raise PartTimeout(f"did not end within {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, on_alarm)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


class Part:
    """A part under way: its rows, its deadline, and the process that answers its requests."""

    def __init__(self, options: argparse.Namespace, results: harness.Results) -> None:
        self.options = options
        self.results = results
        self.folder = Path(options.json)
        self.seconds = options.deadline or SECONDS[results.head["part"]]
        self.ends = time.monotonic() + self.seconds
        # Reasons for which a row may be empty though nothing is wrong.
        self.excused = {NO_TIME}
        # Processes that answer requests, by the names of these.
        self._answering: dict[str, Processes] = {}
        # Ended with this part, whatever happens.
        self._workers: list[Processes] = []
        self._programs: list[subprocess.Popen[Any]] = []

    @property
    def gpu(self) -> bool:
        return not self.options.toy

    @property
    def left(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    def log(self, text: str) -> None:
        print(f"{self.left:.0f} s left: {text}", file=sys.stderr, flush=True)

    def answer(self, processes: Processes, limit: float = math.inf, **request: Any) -> Any:
        """Return the answer to a request, or to the one that was sent before."""
        seconds = min(self.left, limit)
        try:
            if request:
                processes.send(**request)
            return processes.answers(seconds)[0]
        except Failed as failure:
            if str(failure) != TOO_LATE:
                raise
            raise Failed(NO_TIME if seconds < limit else f"not within {limit:.0f} s") from None

    def ask(self, limit: float, **request: Any) -> Any:
        """Ask this part's process, and start another one for the next request if this one fails."""
        answer = self.ask_together(limit, {"": request})[""]
        if isinstance(answer, Failed):
            raise answer
        return answer

    def ask_together(self, limit: float, requests: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Ask a process for each name, all at once; an answer may be a failure, which costs that process alone."""
        answers: dict[str, Any] = {}
        for name, request in requests.items():
            try:
                if not self.left:
                    raise Failed(NO_TIME)
                if name not in self._answering:
                    self._answering[name] = self.new_worker()
                self._answering[name].send(**request)
            except Failed as failure:
                answers[name] = failure
        for name in [name for name in requests if name not in answers]:
            try:
                answers[name] = self.answer(self._answering[name], limit)
            except Failed as failure:
                answers[name] = failure
        for name, answer in answers.items():
            if isinstance(answer, Failed) and name in self._answering:
                self._answering.pop(name).close()
        return answers

    def new_worker(self) -> Processes:
        """Start a process that answers requests, and ends with this part at the latest."""
        worker = Processes(1, gpu=self.gpu)
        self._workers.append(worker)
        return worker

    def start(self, *command: str, **how: Any) -> subprocess.Popen[Any]:
        """Start a Python program that ends with this part at the latest."""
        program = subprocess.Popen([sys.executable, *command], cwd=harness.ROOT, start_new_session=True, **how)
        self._programs.append(program)
        return program

    def free(self) -> None:
        """End the processes that answer, before others take the memory."""
        while self._answering:
            self._answering.popitem()[1].close()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        for program in self._programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                _wait(program, INTERRUPT_S)

    def probe(self, name: str, limit: float) -> list[harness.Row]:
        """Add the rows of a probe of smoke.py."""
        self.log(name)
        try:
            measures = self.ask(limit, do="probe", name=name, toy=self.options.toy)
        except Failed as failure:
            rows = [harness.row({"probe": name}, MACHINE, "", reason=str(failure))]
        else:
            rows = [
                harness.row(
                    {"rate": one.pop("name")}, MACHINE, one.pop("unit"), one.pop("values"), more_is_better=True, **one
                )
                for one in measures
            ]
        self.results.add(*rows)
        return rows

    @cached_property
    def earlier(self) -> dict[str, harness.Row]:
        """Rows that other parts have measured on this machine."""
        rows: dict[str, harness.Row] = {}
        now, head = datetime.datetime.now(datetime.UTC), self.results.head
        for path in self.folder.glob("*.json"):
            try:
                file = harness.read(path)
                age = (now - datetime.datetime.fromisoformat(file["date"])).total_seconds()
                same = machine.slug(file["machine"]) == machine.slug(head["machine"])
            except (WherryError, ValueError, TypeError, KeyError):  # no such file of this version
                continue
            same = same and all(file[name] == head[name] for name in ("benchmark", "settings"))
            if same and age < FRESH_S and path != self.results.path:
                # A row that was taken over stands in the file of the part that measured it.
                measured = [row for row in file["rows"] if row["reason"] is None and "from" not in row]
                rows |= {harness.key(row): row | {"from": file["part"]} for row in measured}
        return rows

    def rates(self, probe: str) -> dict[str, float]:
        """The values of a probe's rows, which another part may have measured."""
        names = {"rates": "matrix", "disk": "disk_read", "memory": "host memory"}
        known = [row for row in self.earlier.values() if "rate" in row["case"]]
        if not any(row["case"]["rate"] == names[probe] for row in known):
            known = self.probe(probe, PROBES[probe])
            if known[0]["reason"] is not None:  # one that was killed by chance would cost all bounds
                known = self.probe(probe, PROBES[probe])
        self.results.add(*known)
        return {row["case"]["rate"]: row["value"] for row in known if row["reason"] is None}

    @cached_property
    def host_bytes(self) -> int:
        """Return the host memory for states, from --host-memory or the probe."""
        return self.options.host_memory or int(self.rates("memory").get("host memory", host_memory().available))


# Facts of the machine, and the correctness of training.


# Probes and their limits in seconds; rates that later rows need come first.
PROBES = {"memory": 60.0, "kernels": 20.0, "pin": 40.0, "rates": 40.0, "share": 20.0, "disk": 20.0}


def smoke(part: Part) -> None:
    part.results.head["facts"] = machine.facts()
    for probe, limit in PROBES.items():
        part.probe(probe, limit)
    part.free()
    part.log("the Triton kernel")
    Tests(part, "triton", "tests/gpu/test_kernels.py", "--timeout", "90").end(90.0)


OURS, ALL_OURS = "wherry-2-cpu", "wherry-3-cpu"
# Plain steps of each policy, whose bits are compared.
PLAIN_STEPS = 20
# Processes that run tests at most.
MOST_TESTERS = 5


def bits(part: Part) -> None:
    """Compare bits while the tests for a GPU run and DeepSpeed's operators are compiled: no time is measured."""
    files = ("steps", "profile", "lives") if part.gpu else ("steps",)
    tests = Tests(part, "tests", *(f"tests/gpu/test_{name}.py" for name in files))
    compiler = None
    if systems.cannot_run("deepspeed-2-cpu") is None:
        compiler = part.start("benchmarks/build_peers.py")
    _compare_bits(part)
    tests.end()
    if part.gpu and part.left:
        Tests(part, "plan", "tests/gpu/test_plan.py").end()
    if compiler is not None and _wait(compiler, part.left) is None:
        part.log("DeepSpeed's operators were not compiled in time")


def _compare_bits(part: Part) -> None:
    """Take plain steps of one engine after the other: each exact policy has the losses and weights of `at_step`."""
    policies = [(1.0, policy) for policy in ("at_step", "at_step", "before_use", "streamed")]
    policies += [(0.0, policy) for policy in ("at_step", "in_backward", "before_use", "delayed")]
    expected: dict[Any, dict[str, Any]] = {}
    for system, (clip, policy) in product((OURS, ALL_OURS), policies):
        label = f"{system}:{policy}"
        requests: dict[str, dict[str, Any]] = {}
        for dtype in ("bf16", "fp32"):
            recipe = recipe_of("125m" if part.gpu else "tiny", label, dtype, clip, 1, None)
            requests[dtype] = {"do": "bits", "system": system, "recipe": recipe, "steps": PLAIN_STEPS}
        for dtype, run in part.ask_together(30.0, requests).items():
            training = (dtype, system, clip)
            again = " again" * (policy == "at_step" and training in expected)
            if policy == "at_step" and not isinstance(run, Failed):
                expected.setdefault(training, run)
            part.results.add(_bits_row(dtype, clip, policy, label + again, run, expected.get(training)))
    part.free()


def _bits_row(
    dtype: str, clip: float, policy: str, label: str, run: Any, expected: dict[str, Any] | None
) -> harness.Row:
    case = {"check": "bits of at_step", "dtype": dtype, "clip": clip, "steps": PLAIN_STEPS}
    if isinstance(run, Failed) or expected is None:
        reason = str(run) if isinstance(run, Failed) else "at_step has failed, which it would be compared with"
        return harness.row(case, label, "parameters differ", reason=reason)
    losses: list[float] = run["losses"]
    if policy == "delayed":  # it trains something else
        value = statistics.fmean(losses[-4:]) / statistics.fmean(losses[:4])
        case |= {"check": "loss falls"}
        return harness.row(case, label, "of the first losses", [value], losses=losses, good=value < 1)
    value = float(sum(run["digests"][name] != digest for name, digest in expected["digests"].items()))
    same = losses == expected["losses"] and not value
    return harness.row(case, label, "parameters differ", [value], losses=losses, good=same)


class Tests:
    """Tests for a GPU in a process of their own; NAME.txt is their output."""

    def __init__(self, part: Part, name: str, *arguments: str) -> None:
        self.part, self.name = part, name
        self.file = part.folder / f"{name}.txt"
        options = "-m pytest -m gpu -vv -rs --cheap-first --timeout 60 -p no:cacheprovider -n"
        command = [*options.split(), str(min(MOST_TESTERS, (os.cpu_count() or 1) // 3)), *arguments]
        if not part.gpu:
            command += ["-p", "tests.accelerator.plugin"]
        environment = os.environ | systems.environment(1, part.gpu)
        with self.file.open("w", encoding="utf-8") as output:
            self.process = part.start(*command, stdout=output, stderr=output, env=environment)

    def end(self, limit: float = math.inf) -> None:
        """Add their row once they have ended, or when time is over."""
        in_time = _wait(self.process, min(limit, self.part.left)) is not None
        if not in_time:
            self.process.send_signal(signal.SIGINT)  # pytest then prints its results
            if _wait(self.process, INTERRUPT_S) is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        status, text = _wait(self.process, INTERRUPT_S), self.file.read_text(errors="replace")
        tests = re.findall(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)", text, flags=re.MULTILINE)
        # pytest-xdist prints the result before the name.
        among = re.findall(r"^\[gw\d+\] .*? (PASSED|FAILED|SKIPPED|ERROR) (\S+::.*?) *$", text, flags=re.MULTILINE)
        tests += [(name, result) for result, name in among]
        results = {word: [name for name, result in tests if result == word] for _, word in tests}
        failed = results.get("FAILED", []) + results.get("ERROR", [])
        passed, skipped = len(results.get("PASSED", [])), len(results.get("SKIPPED", []))
        facts = {"failed": failed, "skipped": skipped, "status": status, "in_time": in_time}
        facts["good"] = not failed and (status == 0 or not in_time)
        values, reason = [float(passed)], None
        if not passed and not failed:
            values, reason = [], f"none ran: {skipped} were skipped, and pytest ended with status {status}"
            if status == 0 and not self.part.gpu:
                self.part.excused.add(reason)
        self.part.results.add(
            harness.row({"check": self.name}, "wherry", "passed", values, more_is_better=True, reason=reason, **facts)
        )


def _wait(process: subprocess.Popen[Any], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


# Steps beside their bounds.


@dataclass(frozen=True)
class Series:
    """Systems that are built one after the other, with the sizes of their steps."""

    model: str
    systems: tuple[str, ...]
    # Sequences of a step.
    batches: tuple[int, ...] = (8,)
    clip: float = 1.0
    # Seconds for building a system, with its first steps.
    build_s: float = 50.0
    traced: tuple[str, ...] = ()


STREAMED, ON_DEVICE = f"{OURS}:streamed", "wherry-2:at_step"
# The series of each part, in order of importance.
TIMED: dict[str, tuple[Series, ...]] = {
    "steps": (
        Series("1b", (COMPUTE, f"{OURS}:at_step", f"{OURS}:before_use"), traced=(f"{OURS}:before_use",)),
        Series("1b", (f"{OURS}:in_backward",), clip=0.0),
        Series("1b", (STREAMED, ON_DEVICE), traced=(ON_DEVICE,)),
    ),
    "peers": (
        Series("1b", (f"{OURS}:before_use", f"{ALL_OURS}:before_use", "fsdp2-cpu")),
        Series("1b", ("deepspeed-2-cpu", "deepspeed-3-cpu", "deepspeed-3-super")),
    ),
    "large": (Series("7b", (COMPUTE, f"{ALL_OURS}:before_use"), build_s=110.0, traced=(f"{ALL_OURS}:before_use",)),),
    "tokens": (
        Series("1b", (COMPUTE, f"{OURS}:before_use"), (1, 4, 16, 64)),
        Series("qwen3-4b", (COMPUTE, f"{OURS}:before_use", ON_DEVICE), (2, 4, 8)),
        Series("1b", ("wherry-3-nvme:before_use",)),
    ),
}
TOY_MODELS = {"qwen3-4b": "qwen3-tiny"}
# Seconds after which no further step of a measure is begun.
MEASURE_S = 15.0


def timed(part: Part) -> None:
    """Build every system once. While one is built, the process of the next imports what it needs."""
    jobs = []
    for series in TIMED[part.results.head["part"]]:
        for label in series.systems:
            if part.options.systems is None or label in part.options.systems:
                sizes = _new_sizes(part, series, label)
                if sizes and sizes[0].reason is None:
                    jobs.append((series, sizes))
    rates = part.rates("rates") if jobs else {}
    if any("nvme" in sizes[0].system for _, sizes in jobs):
        rates |= part.rates("disk")
    part.free()
    ahead, compiled = None, systems.compiled("cpu_adam")
    for index, (series, sizes) in enumerate(jobs):
        if not part.left:
            _leave_out(part, sizes, NO_TIME)
            continue
        if "deepspeed" in sizes[0].system and not compiled:
            _wait(part.start("benchmarks/build_peers.py"), part.left / 2)
            compiled = True
        worker = ahead or _importing(part, sizes[0].system)
        following = [others[0].system for _, others in jobs[index + 1 : index + 2]]
        ahead = _take(part, worker, series, sizes, rates, *following)


def _importing(part: Part, system: str) -> Processes:
    worker = part.new_worker()
    worker.send(do="ready", system=system)
    return worker


def _new_sizes(part: Part, series: Series, label: str) -> list[Subject]:
    """List a system's sizes without those that another part has measured, whose rows are added."""
    model = series.model if part.gpu else TOY_MODELS.get(series.model, "tiny")
    recipe = recipe_of(model, label, "bf16", series.clip, 1, None)
    recipe = replace(recipe, built="meta" if series.model == "7b" else "device", recompute=True)
    system = label.partition(":")[0]
    needed = HOST_BYTES * recipe.parameters if part.gpu and systems.place_of(system).optimizer == "cpu" else 0
    short = needed > host_memory().available
    if short:
        recipe = replace(recipe, host_memory=part.host_bytes)
    one = Subject(model, 1, system, label, recipe, part.options.steps, gpu=part.gpu)
    sizes = [replace(one, recipe=replace(recipe, batch=batch)) for batch in series.batches]
    known = [[part.earlier.get(harness.key(row)) for row in rows_of(size, [])] for size in sizes]
    part.results.add(*(row for rows in known for row in rows if row is not None))
    sizes = [size for size, rows in zip(sizes, known, strict=True) if None in rows]
    reason = one.reason
    if short and needed > part.host_bytes:  # a machine without memory may end more than this system
        reason = f"the host has {part.host_bytes / 1e9:.0f} GB of {needed / 1e9:.0f}; --host-memory says if it has more"
    if reason is not None:
        part.excused.add(reason)
    # Every row is there from the beginning: a file says what is not measured yet.
    _leave_out(part, sizes, reason)
    return sizes


# Bytes of host memory that a parameter takes, with all that lies beside it.
HOST_BYTES = 15
# Seconds for a process to import what a system needs.
IMPORT_S = 40.0


def _take(
    part: Part,
    worker: Processes,
    series: Series,
    sizes: Sequence[Subject],
    rates: dict[str, float],
    following: str | None = None,
) -> Processes | None:
    """Build a system and add the rows of its sizes; return a worker that imports for the `following` one."""
    done, one, system = 0, sizes[0], sizes[0].system
    part.log(f"{one.model} {one.label}{' clipped' * bool(one.recipe.clip)}")
    ahead = None
    with worker:
        try:
            part.answer(worker, IMPORT_S)
            worker.send(do="build", system=system, recipe=one.recipe, warmup=WARMUP)
            ahead = _importing(part, following) if following else None
            built = part.answer(worker, series.build_s)
            if ahead is not None:
                ahead.wait(min(IMPORT_S, part.left))  # imports would take cores from what is timed
            for size in sizes:
                limits = {"batch": size.recipe.batch, "steps": size.steps, "seconds": min(MEASURE_S, part.left / 4)}
                took = part.answer(worker, 2 * MEASURE_S, do="time", system=system, **limits)
                turn = Turn.of([built], [took])
                step, peak = rows_of(size, [turn])
                _add_bounds(part, step, size, rates)
                if not done:
                    _compare_losses(part, step, turn.losses)
                peak["host_bytes_per_parameter"] = (peak["value"] - peak["empty_bytes"]) / size.recipe.parameters
                part.results.add(step, peak)
                done += 1
            if one.label in series.traced:
                path = part.folder / f"trace-{one.model}-{one.label.replace(':', '-')}.json.gz"
                try:
                    step["trace"] = part.answer(worker, 30.0, do="trace", system=system, steps=2, path=str(path))
                except Failed as failure:
                    step["trace"] = {"reason": str(failure)}
                part.results.add(step)
        except Exception as error:  # one system without figures leaves the others theirs
            reason = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            _leave_out(part, sizes[done : done + 1], reason)
            later = reason if reason == NO_TIME else f"a size before this one failed: {reason}"
            _leave_out(part, sizes[done + 1 :], later)
    return ahead


def _compare_losses(part: Part, row: harness.Row, losses: list[float]) -> None:
    """Compare a system's losses with those of the first engine of ours that trained the same."""
    row["losses"] = losses
    if row["system"] == COMPUTE:  # it updates nothing
        return
    for other in (*part.earlier.values(), *part.results.rows):
        if other["case"] == row["case"] and other["system"].startswith("wherry") and other.get("losses"):
            count = min(len(losses), len(other["losses"]))
            row["loss_difference"] = systems.loss_difference(losses[:count], other["losses"][:count])
            row["good"] = systems.same_losses(row["loss_difference"], row["case"]["dtype"])
            return


def _leave_out(part: Part, sizes: Sequence[Subject], reason: str | None) -> None:
    """Add empty rows with the reason, or with none yet."""
    for size in sizes:
        size.reason = reason
        part.results.add(*rows_of(size, []))


def _add_bounds(part: Part, row: harness.Row, subject: Subject, rates: dict[str, float]) -> None:
    """Add to a step its part of the GPU's peak and of its bounds: all at once, and as the order of a step allows."""
    recipe = subject.recipe
    card = part.results.head["machine"]["gpu"] or ""
    peak = next((peak for name, peak in PEAKS.items() if name in card), rates.get("matrix"))
    if peak is not None:
        row["mfu"] = row["tflops"] * 1e12 / peak
    if "matrix" not in rates or ("nvme" in subject.system and "disk_read" not in rates):
        return  # The step keeps its figures where a probe of the rates has failed.
    row["matrix_s"] = recipe.flops / rates["matrix"]
    if subject.system == COMPUTE:
        row |= {"overlapped_s": row["matrix_s"], "bound_s": row["matrix_s"], "bound_by": "matrix"}
    else:
        alike = {name: row["case"][name] for name in ("model", "tokens", "measure")}
        rows = [*part.earlier.values(), *part.results.rows]
        computed = [one for one in rows if one["system"] == COMPUTE and one["value"]]
        same = [one for one in computed if alike.items() <= one["case"].items()]
        phases = (same[0]["forward_s"], same[0]["backward_s"]) if same else bounds.computing(recipe, rates["matrix"])
        work = bounds.work_of(subject.system, recipe, gpu=True)
        row["compute_from"] = "measured" if same else "matrix"
        row["overlapped_s"], _ = bounds.bound(work, rates, *phases, waits=False)
        waits = bool(recipe.clip) and recipe.policy != "delayed"
        row["bound_s"], row["bound_by"] = bounds.bound(work, rates, *phases, waits=waits)
    row |= {f"of_{name}": row[f"{name}_s"] / row["value"] for name in ("overlapped", "bound")}


# Published operations a second in bf16, without sparsity; the measured rate stands for that of other cards.
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}


# The command.

PARTS: dict[str, Callable[[Part], None]] = {"smoke": smoke, "bits": bits, **dict.fromkeys(TIMED, timed)}
# Parts in the order of what they tell, for two calls of one machine.
CALLS = (("smoke", "bits", "steps"), ("peers", "large", "tokens"))


def line_of(row: harness.Row) -> str:
    """Format a row as a line: all that is known of a part must fit in a terminal's last page."""
    words = [*map(str, row["case"].values()), row["system"]]
    words.append(row["reason"] or harness.quantity(row["value"], row["unit"]))
    if row.get("failed"):
        words.append(f"FAILED: {', '.join(row['failed'])}")
    if row.get("good") is False:
        words.append(f"WRONG: losses {row['losses'][:4]}" if "losses" in row else "WRONG")
    if row.get("in_time") is False:
        words.append("not in time")
    if "mfu" in row:
        words.append(f"{row['tokens_per_s']:,.0f} tokens/s, MFU {row['mfu']:.2f}")
    if "of_bound" in row:
        words.append(
            f"{row['of_overlapped']:.2f} of all at once, {row['of_bound']:.2f} of the bound ({row['bound_by']})"
        )
    return " ".join(words)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    allotted = ", ".join(map(str, SECONDS.values()))
    parser.add_argument("--deadline", type=harness.positive, help=f"seconds for each part ({allotted})")
    parser.add_argument("--steps", type=harness.positive, default=5, help="steps in a measure (5)")
    labels = {label for series in TIMED.values() for one in series for label in one.systems}
    parser.add_argument("--systems", type=harness.listed(sorted(labels)), help="only these, with commas")
    parser.add_argument(
        "--host-memory", type=harness.positive, metavar="BYTES", help="memory for states on the host (what is free)"
    )
    parser.add_argument("--path", type=harness.folder, help="a folder on the disk for states (FOLDER)")
    parser.add_argument("--toy", action="store_true", help="on the emulated device, only to show that it works")
    parser.set_defaults(json=harness.ROOT / "build" / "gpu")
    options = harness.parse(parser, argv)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    if not options.toy and machine.describe()["gpu"] is None:
        parser.error("nvidia-smi shows no GPU here; --toy shows on an emulated device that everything works")
    return options


def use_emulated_device() -> None:
    """Compile the emulated device, which takes minutes once, and let the processes of parts have it."""
    from tests.accelerator.build import build

    build()
    os.environ[systems.DEVICE_MODULE] = "tests.accelerator.process_group"
    # Threads that wait for each other leave the processors to others: it is no measure.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.toy:
        use_emulated_device()
    options.json.mkdir(parents=True, exist_ok=True)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path or options.json)
    settings = {"toy": options.toy, "steps": options.steps, "sources": _sources()}
    good = True
    for name in options.parts or PARTS:
        results = harness.Results("gpu", options, settings, name, options.json / f"{name}.json")
        try:
            good &= _run(Part(options, results), name)
        except OSError:  # A full disk costs the part's file: its rows are printed, and the next part begins.
            traceback.print_exc()
            good = False
    return 0 if good else 1


def _run(part: Part, name: str) -> bool:
    """Run a part, print its rows and write its file; return whether all is right that there was time for."""
    results = part.results
    try:
        with time_limit(part.seconds + GRACE_S):
            PARTS[name](part)
    except (Exception, PartTimeout) as error:  # a part costs itself alone
        traceback.print_exc()
        results.add(harness.row({"part": name}, MACHINE, "", reason=f"{type(error).__name__}: {error}"))
    finally:
        part.close()
        print("\n".join(line_of(row) for row in results.rows if "from" not in row))
    results.close()
    return all(_is_right(row, part.excused) for row in results.rows)


def _is_right(row: harness.Row, excused: set[str]) -> bool:
    return row["reason"] in {None, *excused} and row.get("good") is not False


def _sources() -> str:
    """A digest of Wherry's sources and of those that measure it."""
    digest = hashlib.sha256()
    for path in sorted(path for name in ("src", "benchmarks") for path in (harness.ROOT / name).rglob("*.[ps][yo]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    harness.alone(main)
