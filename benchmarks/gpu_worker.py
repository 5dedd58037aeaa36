"""A process with the GPU: measures its rates, builds systems, times their steps, and answers in JSON lines."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import bounds, systems
from benchmarks.systems import SYSTEMS, Recipe, Trainee
from benchmarks.worker import answer_requests, forget_peak, peak_bytes, resident_bytes

GIB = 2**30
# Parts of a traceback that are shown, from its end.
TRACED = 8


class GpuWorker:
    """Systems of one process that share its GPU, or without one its CPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device = systems.device_type()
        self.trainees: dict[str, Trainee] = {}
        self.recipes: dict[str, Recipe] = {}
        self.steps: dict[str, int] = {}
        # Bytes of the process, of the device and of the whole machine that each took while it was built.
        self.own: dict[str, tuple[int, int, int]] = {}
        # DeepSpeed's super_offload leaves the process a fifth of the cores, and has the others for a process of its
        # own: that is how it works, and nothing that its neighbours asked for.
        self.cores: dict[str, set[int]] = {}
        self.children: dict[str, list[Any]] = {}
        # When the last steps ended, but for what they had put off.
        self.ended = 0.0

    def ready(self) -> bool:
        """Everything is imported, and the GPU has been seen."""
        self._synchronize()
        return True

    def rates(self, dtype: str, toy: bool, folder: str | None) -> dict[str, Any]:
        rates, rows = bounds.measure(self.device, dtype, toy=toy, folder=folder)
        self._clean()
        return {"rates": vars(rates), "rows": rows}

    def cap(self, gib: float | None) -> float | None:
        """Let this process have so much of the GPU's memory; None gives it all. Returns the fraction."""
        if self.device != "cuda":
            return None
        total = self.torch.cuda.get_device_properties(0).total_memory
        fraction = min(1.0, gib * GIB / total) if gib else 1.0
        self._clean()
        self.torch.cuda.set_per_process_memory_fraction(fraction)
        return fraction

    def build(
        self, name: str, system: str, recipe: dict[str, Any], warmup: int = 2, shrink: bool = False
    ) -> dict[str, Any]:
        """Build a system under a name of its own, and take its first steps.

        `shrink`: a batch that the device has no memory for is halved.
        """
        self._reset_peaks()
        resident, allocated, free = resident_bytes(), self._allocated(), bounds.free_host_memory()
        begun = time.perf_counter()
        self.recipes[name] = Recipe(**recipe)
        self.steps[name] = 0
        with self._apart(name):
            self.trainees[name] = SYSTEMS[system](self.recipes[name], 1)
            self._synchronize()
            built = time.perf_counter() - begun
        seconds, losses = self._warm_up(name, warmup, shrink)
        gc.collect()
        taken = max(0, free - bounds.free_host_memory())
        self.own[name] = max(0, resident_bytes() - resident), max(0, self._allocated() - allocated), taken
        found = {"built_s": built, "step_s": seconds, "batch": self.recipes[name].batch, "losses": losses}
        return found | self._memory(name, (resident, allocated), peaks=False)

    def time(self, name: str, steps: int, batch: int | None = None) -> dict[str, Any]:
        """Seconds of a step in its steady state, after one that is not counted: what that has put off is, and what the
        last puts off is not."""
        if batch is not None:
            self.recipes[name] = Recipe(**vars(self.recipes[name]) | {"batch": batch})
        # What the other systems of this process hold is not this one's.
        resident, allocated, _ = self.own[name]
        others = max(0, resident_bytes() - resident), max(0, self._allocated() - allocated)
        begun, peaks = 0.0, False

        def begin() -> None:
            nonlocal begun, peaks
            self._synchronize()
            peaks = self._reset_peaks()
            begun = time.perf_counter()

        losses = self._run(name, steps + 1, begin)
        seconds = (self.ended - begun) / steps
        return {"seconds": seconds, "losses": losses, **self._memory(name, others, peaks=peaks)}

    def profile(self, name: str, steps: int, path: str) -> dict[str, Any]:
        """A trace of some steps, and how much of the copying was hidden behind computing."""
        from benchmarks.trace import overlap

        activities = [self.torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(self.torch.profiler.ProfilerActivity.CUDA)
        with self.torch.profiler.profile(activities=activities) as profile:
            self._run(name, steps)
        profile.export_chrome_trace(path)
        return overlap(Path(path))

    def close(self, name: str) -> dict[str, Any]:
        """Give a system's memory back; what is still allocated then is a leak, or another's."""
        trainee = self.trainees.pop(name, None)
        self.own.pop(name, None)
        self.cores.pop(name, None)
        engine = getattr(trainee, "engine", None)
        closing = getattr(engine, "close", None) or getattr(engine, "destroy", None)
        try:
            if closing is not None:
                closing()
        finally:
            for child in self.children.pop(name, ()):
                child.kill()  # it has the moments, and would keep them
                child.join()
        del trainee, engine, closing
        self._clean()
        return {"left_bytes": self._allocated()}

    def fits(self, recipe: dict[str, Any], system: str) -> dict[str, Any]:
        """Peak bytes by tier of a step of this recipe, from a dry run of the engine."""
        from wherry.plan.dry_run import dry_run
        from wherry.sources import of_shape
        from wherry.train.presets import Shape

        made = Recipe(**recipe)
        shape = Shape(made.layers, made.hidden, made.heads, made.sequence, made.vocabulary)
        config = systems.config_of(systems.place_of(system), made, 1) | {"wherry": {"update_policy": made.policy}}
        if made.recompute:
            config["activation_checkpointing"] = {"policy": "recompute"}
        apart = self.device == "cuda"
        found = dry_run(of_shape("gpt2", shape), config, ranks=1, sequence=made.length, gpu=apart)
        return {tier: found.peak(tier) for tier in ("device", "host", "disk")}

    def fragments(self, system: str, toy: bool) -> dict[str, Any]:
        """What torch's allocator holds and nobody uses, over steps of changing length: a row; simulated on the CPU."""
        from benchmarks import fragments

        self._clean()
        config, steps = (fragments.TOY_MODEL, 4) if toy else (fragments.LARGE_MODEL, fragments.STEPS)
        device = "cuda" if self.device == "cuda" else "simulated"
        found = fragments.measure(system, config, fragments.BATCH, steps, device)
        self._clean()
        return found.row(system, config, fragments.BATCH, device)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What fails, out of memory or refused, is an answer too: the other systems of this process live on."""
        try:
            do = request.pop("do")
            return {"found": getattr(self, do)(**request)}
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            trace = "".join(traceback.format_exception(error)[-TRACED:])
            error.__traceback__ = None
        if do == "build":
            # What could not take its first steps may not be able to close either: its memory goes with it.
            with suppress(Exception):
                self.close(request["name"])
        self._clean()
        return {"failed": reason, "trace": trace}

    # Inside.

    @contextmanager
    def _apart(self, name: str) -> Iterator[None]:
        """Let a system be built with all cores, and keep those that it leaves this process, and what it starts."""
        before = multiprocessing.active_children()
        # A process that it starts has as many threads as it gives it cores, and not as many as this one has.
        threads = os.environ.pop("OMP_NUM_THREADS", None)
        with _cores(None) as every:
            try:
                yield
            finally:
                if threads is not None:
                    os.environ["OMP_NUM_THREADS"] = threads
                now = _allowed()
                if now != every:
                    self.cores[name] = now
                self.children[name] = [child for child in multiprocessing.active_children() if child not in before]

    def _warm_up(self, name: str, steps: int, shrink: bool) -> tuple[float, list[float]]:
        """Seconds of the last of the first steps, and the losses of all."""
        while True:
            try:
                losses = self._run(name, steps - 1)
                begun = time.perf_counter()
                losses += self._run(name, 1)
                return time.perf_counter() - begun, losses
            except self.torch.OutOfMemoryError as error:
                recipe = self.recipes[name]
                if not shrink or recipe.batch == 1:
                    raise
                error.__traceback__ = None  # it holds what that step had made
            self._clean()
            self.recipes[name] = replace(recipe, batch=recipe.batch // 2)

    def _run(self, name: str, steps: int, first_done: Callable[[], None] = lambda: None) -> list[float]:
        trainee, recipe = self.trainees[name], self.recipes[name]
        first = self.steps[name]
        self.steps[name] += steps
        losses: list[Any] = []
        with _cores(self.cores.get(name)):
            for batch in [recipe.batch_of(first + step, 0, 1) for step in range(steps)]:
                losses.append(trainee.step(*batch))
                if len(losses) == 1:
                    first_done()
            self._synchronize()
            self.ended = time.perf_counter()
            self._settle(name)
        found = [float(loss) for loss in losses]
        if not all(math.isfinite(loss) for loss in found):
            raise RuntimeError(f"{name}: the loss is not finite: {found}")
        return found

    def _settle(self, name: str) -> None:
        settle = getattr(self.trainees[name], "settle", None)
        if settle is not None:
            settle()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _clean(self) -> None:
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
            # Pinned memory that torch keeps for the next tensor.
            getattr(self.torch._C, "_host_emptyCache", lambda: None)()

    def _allocated(self) -> int:
        return int(self.torch.cuda.memory_allocated()) if self.device == "cuda" else 0

    def _reset_peaks(self) -> bool:
        """Let peaks begin anew; whether that of resident memory does, which not every system allows."""
        if self.device == "cuda":
            self.torch.cuda.reset_peak_memory_stats()
        return forget_peak()

    def _memory(self, name: str, others: tuple[int, int], *, peaks: bool) -> dict[str, Any]:
        """Bytes of a system, without those of others: at their highest, or on the host, without `peaks`, now."""
        engine = getattr(self.trainees[name], "engine", None)
        rows = [row._asdict() for row in engine.memory()] if hasattr(engine, "memory") else []
        device = reserved = None
        if self.device == "cuda":
            device = self.torch.cuda.max_memory_allocated() - others[1]
            reserved = self.torch.cuda.max_memory_reserved() - others[1]
        resident = (peak_bytes() if peaks else resident_bytes()) - others[0]
        return {
            "memory": rows,
            "peak_device_bytes": device,
            "peak_reserved_bytes": reserved,
            "resident_bytes": max(0, resident),
            # Memory that a driver has pinned, or a child has, is not the process's own, and missing for all.
            "taken_bytes": self.own[name][2],
        }


def _allowed() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def _cores(wanted: set[int] | None) -> Iterator[set[int]]:
    """While entered this thread, and what it starts, has these cores; afterwards those that it had before."""
    before = _allowed()
    if wanted:
        os.sched_setaffinity(0, wanted)
    try:
        yield before
    finally:
        if _allowed() != before:
            os.sched_setaffinity(0, before)


if __name__ == "__main__":
    answer_requests(GpuWorker)
