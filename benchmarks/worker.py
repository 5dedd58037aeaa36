"""One rank of a room: builds systems, times their steps, and answers in JSON lines."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.systems import SYSTEMS, Recipe, Trainee

# What systems import, at first use too.
IMPORTS = {
    "fsdp2": ("torch.distributed.fsdp",),
    "wherry": ("wherry.build", "wherry.config.loading", "wherry.config.schema"),
    "deepspeed": ("deepspeed", "torch._inductor.compile_fx"),
}


class Worker:
    """The systems of this process, and what it is asked about them."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        self.trainees: dict[str, Trainee] = {}
        self.recipes: dict[str, Recipe] = {}
        self.steps: Counter[str] = Counter()

    def build(self, system: str, recipe: dict[str, Any], warmup: int) -> dict[str, Any]:
        """Build a system and take its first steps; returns their losses, and the seconds and bytes it began with."""
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        import_all_of(system)
        empty = resident_bytes()
        if system.startswith("wherry") and recipe["order"]:
            DiskReads.count()
        begun = time.perf_counter()
        self.recipes[system] = Recipe(**recipe)
        self.trainees[system] = SYSTEMS[system](self.recipes[system], self.ranks)
        built = time.perf_counter() - begun
        losses = self._run(system, warmup)[1]
        self._settle(system)
        # What has been built stays: the collector need not look at it again for each system in the room.
        gc.collect()
        gc.freeze()
        return {"seconds": built, "empty_bytes": empty, "losses": losses}

    def time(self, system: str, steps: int) -> dict[str, Any]:
        """Steps in their steady state, after one that is not counted. What that puts off is, what the last does not.

        Bytes are those of all of them, and of what they have put off, for each: threads read beside the steps, and
        between any two of these it may be of the one or of the other. Before and after, nothing is under way.
        """
        used, before = 0.0, read_bytes(system)

        def begin() -> None:
            nonlocal used
            used = time.process_time()

        seconds, losses = self._run(system, steps + 1, begin)
        used = time.process_time() - used
        self._settle(system)
        read = (read_bytes(system) - before) / (steps + 1)
        engine = getattr(self.trainees[system], "engine", None)
        memory = [row._asdict() for row in engine.memory()] if hasattr(engine, "memory") else []
        found = {"seconds": seconds[1:], "cpu_seconds": used / steps, "losses": losses, "peak_bytes": peak_bytes()}
        return found | {"memory": memory, "read_bytes": read}

    def calls(self, system: str, steps: int) -> dict[str, Any]:
        """Calls of Python and of C functions in one step, the functions that are called most first."""
        python: Counter[str] = Counter()
        native: Counter[str] = Counter()

        def count(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                code = frame.f_code
                python[f"{_short(code.co_filename)}:{code.co_firstlineno} {code.co_name}"] += 1
            elif event == "c_call":
                native[getattr(argument, "__qualname__", repr(argument)).rpartition("_1_abi_1.")[2]] += 1

        trainee, recipe = self.trainees[system], self.recipes[system]
        for _ in range(steps):
            batch = recipe.batch_of(self.steps[system], self.rank, self.ranks)
            self.steps[system] += 1
            sys.setprofile(count)
            try:
                trainee.step(*batch)
            finally:
                sys.setprofile(None)
        return {
            "python": sum(python.values()) / steps,
            "native": sum(native.values()) / steps,
            "functions": [[name, times / steps] for name, times in (python + native).most_common()],
        }

    def _run(
        self, system: str, steps: int, first_done: Callable[[], None] = lambda: None
    ) -> tuple[list[float], list[float]]:
        """Take steps. The batches and the losses' values are outside of the time."""
        trainee, recipe = self.trainees[system], self.recipes[system]
        first = self.steps[system]
        self.steps[system] += steps
        batches = [recipe.batch_of(first + step, self.rank, self.ranks) for step in range(steps)]
        seconds, losses = [], []
        for ids, labels in batches:
            begun = time.perf_counter()
            loss = trainee.step(ids, labels)
            seconds.append(time.perf_counter() - begun)
            if not losses:
                first_done()
            losses.append(loss)
        return seconds, [float(loss) for loss in losses]

    def _settle(self, system: str) -> None:
        """What a system has put off is done, before it would take place in another's time."""
        settle = getattr(self.trainees[system], "settle", None)
        if settle is not None:
            settle()


def import_all_of(system: str) -> None:
    """What is imported is no part of what a system takes, which imports.py measures: some have it done at once.

    torch's first optimizer, which Wherry does without, imports 800 modules of 76 MB: all have it done.
    """
    import torch

    for module in IMPORTS.get(system.partition("-")[0], ()):
        importlib.import_module(module)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


class DiskReads:
    """Bytes that Wherry's disk tier is asked to read. The system's own count leaves out what its cache has."""

    total = 0

    @classmethod
    def count(cls) -> None:
        from wherry.tiers.disk import DiskStore

        read = DiskStore.read

        def counted(self: Any, record: Any, buffer: Any, offset: int = 0, nbytes: int | None = None) -> Any:
            cls.total += buffer.nbytes if nbytes is None else nbytes
            return read(self, record, buffer, offset, nbytes)

        DiskStore.read = counted  # type: ignore[method-assign]


def read_bytes(system: str) -> int:
    """Read from disks so far: asked for by Wherry, or else as the system counts it, its cache left out."""
    if system.startswith("wherry"):
        return DiskReads.total
    process = psutil.Process()
    return int(process.io_counters().read_bytes) if hasattr(process, "io_counters") else 0


def peak_bytes() -> int:
    """The most this process ever held. What getrusage tells begins with the peak of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    from wherry.observe.memory import peak_resident

    return peak_resident()


def forget_peak() -> bool:
    """The most this process ever held is what it holds now, where a system can be told so."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _short(path: str) -> str:
    """A source file's path from its package on."""
    folders = [folder for folder in map(os.path.abspath, filter(None, sys.path)) if path.startswith(folder + os.sep)]
    return path[len(max(folders, key=len)) + 1 :] if folders else path


def _bind_to_one_core(rank: int) -> None:
    """Before any thread starts: a system's own threads get no core that torch was not given."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def answer_requests(make: Callable[[], Any]) -> None:
    """Read requests from stdin, one JSON line each, and answer them on what was stdout."""
    # What systems print must not reach the pipe that carries the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = make()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    if "BENCHMARK_ONE_CORE" in os.environ:
        _bind_to_one_core(int(os.environ["RANK"]))
    answer_requests(Worker)


if __name__ == "__main__":
    main()
