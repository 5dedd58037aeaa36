"""Where time and memory go in some steps: a Chrome trace of their spans, and memory over one of them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherry.observe.spans import recording
from wherry.observe.timeline import Account, Timeline

if TYPE_CHECKING:
    from wherry.observe.log import RankLogger


_TRACE, _MEMORY = "the trace", "memory over a step"


class Profile:
    """What an engine records of steps to come. Behind them nothing of it is left on the model, or in torch.

    No training ends because a file cannot be written, or because something else records already: a line says so.
    """

    def __init__(
        self,
        account: Account,
        folder: Path,
        steps: range,
        memory_step: int | None,
        log: RankLogger,
        *,
        told: bool = True,
    ) -> None:
        self._account = account
        self._folder = folder
        self._steps = steps
        self._memory_step = memory_step
        self._log = log
        # Whether a line says where the files are. Of what nobody asked for torch's snapshot, which has the lines of the
        # program in it, is left out.
        self._told = told
        self._snapshots = told and account.device.type == "cuda"
        self._timeline: Timeline | None = None
        self._profiler: Any = None
        # What has yet to be written, and what has been.
        self._missing = [*([_TRACE] if steps else []), *([_MEMORY] if memory_step is not None else [])]
        self._written: list[str] = []
        # At the end of the program, where nobody closes the engine.
        self._finalizer = weakref.finalize(self, _tell_of_missing, self._missing, log) if told else None

    def __contains__(self, step: int) -> bool:
        return step in self._steps or step == self._memory_step

    @property
    def complete(self) -> bool:
        return not (self._steps or self._memory_step)

    @contextmanager
    def phase(self, phase: str, step: int) -> Iterator[None]:
        """Around each forward, backward and update of a step that is recorded."""
        # What begins with a forward without gradients, as a validation does, is no step.
        begins = phase != "step" and torch.is_grad_enabled()
        if begins and step in self._steps and self._profiler is None:
            self._begin_trace()
        if begins and step == self._memory_step and self._timeline is None:
            self._begin_memory()
        with self._timeline.phase(phase) if self._timeline is not None else nullcontext():
            yield
        if phase != "step":
            return
        if step == self._memory_step:
            self._end_memory()
        if self._steps and step == self._steps[-1]:
            self._end_trace()
        if self.complete:
            self._tell()

    def end_window(self) -> None:
        if self._timeline is not None:
            self._timeline.start_over()

    def close(self) -> None:
        """The engine is closed before all of the steps have come."""
        if self._timeline is not None:
            self._timeline.end()
            self._end_snapshot(None)
        self._end_trace()
        self._tell()
        if self._finalizer is not None:
            self._finalizer()

    # The trace.

    def _begin_trace(self) -> None:
        if recording():
            self._log.warning("profile: another profiler records already, so no trace is written")
            self._missing.remove(_TRACE)
            self._steps = range(0)
            return
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CPU, *([activity.CUDA] if self._account.device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.start()

    def _end_trace(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            self._write(f"trace-rank{self._log.rank}.json.gz", lambda path: profiler.export_chrome_trace(str(path)))
            self._missing.remove(_TRACE)
        self._steps = range(0)

    # Memory.

    def _begin_memory(self) -> None:
        if any(module._compiled_call_impl is not None for module in self._account.model.modules()):
            self._log.warning(
                "profile: the model is compiled, and memory is not recorded of operations that torch fuses"
            )
            self._missing.remove(_MEMORY)
            self._memory_step = None
            return
        self._timeline = Timeline(self._account)
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")

    def _end_memory(self) -> None:
        timeline, step, self._timeline = self._timeline, self._memory_step, None
        self._memory_step = None
        if timeline is None or step is None:
            return
        timeline.end()
        if not timeline.samples:  # nothing was updated but what came before
            return
        rank = self._log.rank
        told = timeline.told(step, rank)
        self._write(f"memory-rank{rank}.json", lambda path: path.write_text(json.dumps(told) + "\n", encoding="utf-8"))
        if rank == 0:
            from wherry.observe.memory_page import memory_page

            self._write("memory.html", lambda path: path.write_text(memory_page(told), encoding="utf-8"))
        self._end_snapshot(f"snapshot-rank{rank}.pickle")
        self._missing.remove(_MEMORY)

    def _end_snapshot(self, name: str | None) -> None:
        if not self._snapshots:
            return
        if name is not None:
            self._write(name, lambda path: torch.cuda.memory._dump_snapshot(str(path)))
        torch.cuda.memory._record_memory_history(enabled=None)

    # Files.

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder / name)
        except OSError as error:
            self._log.warning("profile: %s is not written: %s", self._folder / name, error.strerror or error)
        else:
            self._written.append(name)

    def _tell(self) -> None:
        written, self._written = self._written, []
        if written and self._told:
            self._log.info(
                "profile: in %s: %s; a browser shows the page, and chrome://tracing or ui.perfetto.dev the trace",
                self._folder,
                ", ".join(written),
            )


def _tell_of_missing(missing: list[str], log: RankLogger) -> None:
    if missing and log.rank == 0:
        log.warning("profile: not recorded, as training did not come to it: %s", ", ".join(missing))
