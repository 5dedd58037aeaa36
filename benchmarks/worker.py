"""One rank: builds systems, times their steps, and answers in JSON lines."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from benchmarks.systems import DEVICE_MODULE, SYSTEMS, Recipe, Trainee, device_type

# What systems import, at first use too.
IMPORTS = {
    "fsdp2": ("torch.distributed.fsdp",),
    "wherry": ("wherry.engine", "wherry.config"),
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
        with suppress(OSError):  # a system without memory ends this process before others
            Path("/proc/self/oom_score_adj").write_text("1000")

    def probe(self, name: str, **how: Any) -> list[dict[str, Any]]:
        from benchmarks.smoke import PROBES

        return PROBES[name](**how)

    def ready(self, system: str) -> None:
        """All that needs no model is done, perhaps while another process still measures its own."""
        import_all_of(system)

    def build(self, system: str, recipe: dict[str, Any], warmup: int) -> dict[str, Any]:
        """Build a system and take its first steps; returns their losses, and the seconds and bytes it began with."""
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        import_all_of(system)
        empty = resident_bytes()
        begun = time.perf_counter()
        self.recipes[system] = Recipe(**recipe)
        self.trainees[system] = SYSTEMS[system.partition(":")[0]](self.recipes[system], self.ranks)
        self._synchronize()
        built = time.perf_counter() - begun
        losses = self._run(system, warmup)[1]
        self._settle(system)
        # What has been built stays: the collector need not look at it again for each system of this process.
        gc.collect()
        gc.freeze()
        found = {"seconds": built, "empty_bytes": empty, "losses": losses, "peak_bytes": peak_bytes()}
        return found | self._memory(system)

    def time(
        self, system: str, steps: int, batch: int | None = None, seconds: float = float("inf"), first: bool = True
    ) -> dict[str, Any]:
        """Steps in their steady state, after a `first` that is not counted. What that puts off is, what the last one
        puts off is not.

        With another `batch` than the recipe's, the engine stays the same. Two steps, or as many as `seconds` have.
        """
        on_device = device_type() != "cpu"
        if batch is not None:
            self.recipes[system] = replace(self.recipes[system], batch=batch)
        if on_device:
            import torch

            torch.accelerator.reset_peak_memory_stats()
        begun = time.perf_counter()
        losses = self._run(system, int(first))[1]
        self._synchronize()
        once = time.perf_counter() - begun
        if first:
            steps = min(steps, max(2, int(min(seconds / once, steps))))
        used, begun = time.process_time(), time.perf_counter()
        single, more = self._run(system, steps)
        self._synchronize()
        if on_device:
            # Its queue goes on across steps: they are timed together.
            single = [(time.perf_counter() - begun) / steps]
        used = time.process_time() - used
        phases = getattr(self.trainees[system], "phases", lambda steps: {})(steps)
        self._settle(system)
        found = {"seconds": single, "cpu_seconds": used / steps, "losses": losses + more, "peak_bytes": peak_bytes()}
        return found | {"phases": phases} | self._memory(system)

    def bits(self, system: str, recipe: dict[str, Any], steps: int) -> dict[str, Any]:
        """Take plain steps of a new engine, and return the losses and a digest of each parameter."""
        import torch

        import wherry

        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        # With warn_only, the backwards of flash and memory-efficient attention stay nondeterministic.
        for name in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
        made = Recipe(**recipe)
        trainee: Any = SYSTEMS[system](made, self.ranks)
        losses = [trainee.step(*made.batch_of(step, 0, 1)) for step in range(steps)]
        trainee.settle()
        with wherry.gathered(trainee.engine.module):
            weights = {name: p.detach().cpu().contiguous() for name, p in trainee.engine.module.named_parameters()}
            digests = {name: sha256(memoryview(p.view(torch.uint8).numpy())).hexdigest() for name, p in weights.items()}
        trainee.engine.close()
        return {"losses": [float(loss) for loss in losses], "digests": digests}

    def trace(self, system: str, steps: int, path: str) -> dict[str, Any]:
        """A profiler's trace of some steps, and which part of the copying ran beside kernels."""
        import torch

        from benchmarks.trace import overlap

        with torch.profiler.profile() as profile:
            self._run(system, steps)
        rank = int(os.environ["RANK"])
        path += f".{rank}" * (rank > 0)
        profile.export_chrome_trace(path)
        return overlap(Path(path))

    def rates(self, dtype: str, folder: str | None, quick: bool) -> dict[str, list[float]]:
        from benchmarks import bounds

        return bounds.measure(device_type(), dtype, folder, quick)

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

    def _run(self, system: str, steps: int) -> tuple[list[float], list[float]]:
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
            losses.append(loss)
        return seconds, [float(loss) for loss in losses]

    def _settle(self, system: str) -> None:
        """What a system has put off is done, before it would take place in another's time."""
        settle = getattr(self.trainees[system], "settle", None)
        if settle is not None:
            settle()
        self._synchronize()

    def _synchronize(self) -> None:
        if device_type() != "cpu":
            import torch

            torch.accelerator.synchronize()

    def _memory(self, system: str) -> dict[str, Any]:
        """What an engine says that it holds, and what the device held at most."""
        engine = getattr(self.trainees[system], "engine", None)
        rows = [row._asdict() for row in engine.memory()] if hasattr(engine, "memory") else []
        found: dict[str, Any] = {"memory": rows, "device_bytes": None, "reserved_bytes": None}
        if device_type() != "cpu":
            import torch

            found["device_bytes"] = torch.accelerator.max_memory_allocated()
            found["reserved_bytes"] = torch.accelerator.max_memory_reserved()
        return found


def import_all_of(system: str) -> None:
    """What is imported is no part of what a system takes, which import_time.py measures.

    torch's first optimizer, which Wherry does without, imports 800 modules of 76 MB: all have it done.
    """
    import torch

    for module in IMPORTS.get(system.partition("-")[0], ()):
        importlib.import_module(module)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most this process ever held. What getrusage tells begins with the peak of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


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
        try:
            answer = {"found": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:  # whatever a system may raise is why it has no figures
            traceback.print_exc()
            answer = {"failed": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    if "BENCHMARK_ONE_CORE" in os.environ:
        _bind_to_one_core(int(os.environ["RANK"]))
    if module := os.environ.get(DEVICE_MODULE):
        importlib.import_module(module)
    answer_requests(Worker)


if __name__ == "__main__":
    main()
