"""Named spans of time: for the profiler when one records, and added up by the wall clock when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# Whether a profiler records. A function of C, so that asking it for every unit costs no call of Python.
recording = torch.autograd._profiler_enabled
# What is entered in place of a span while none does.
SILENT: AbstractContextManager[None] = nullcontext()


def span(phase: str, what: str = "") -> AbstractContextManager[object]:
    """`wherry::phase (what)` in a trace."""
    return torch.profiler.record_function(f"wherry::{phase} ({what})" if what else f"wherry::{phase}")


class Spans:
    """An engine's spans. With no profiler recording and no wall clock, entering one costs a function call.

    `synchronize` makes the wall clock wait for the device, so that the time of a span is that of its own work.

    >>> spans = Spans(wall_clock=True)
    >>> with spans("wherry::gather (blocks.3)"):
    ...     ...
    >>> len(spans.seconds["wherry::gather (blocks.3)"])
    1
    """

    def __init__(self, *, wall_clock: bool = False, synchronize: Callable[[], object] | None = None) -> None:
        self.wall_clock = wall_clock
        # Of each time that a span ran.
        self.seconds: dict[str, list[float]] = {}
        self._synchronize = synchronize or (lambda: None)

    def __call__(self, name: str) -> AbstractContextManager[object]:
        if self.wall_clock:
            return self._timed(name)
        return torch.profiler.record_function(name) if recording() else SILENT

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            self._synchronize()
            start = time.perf_counter()
            try:
                yield
            finally:
                self._synchronize()
                self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def breakdown(self) -> str:
        """One line for the log, the longest first: `backward 25.0 ms (2x), step 3.2 ms`. The count begins anew."""
        ordered = sorted(self.seconds.items(), key=lambda item: -sum(item[1]))
        self.seconds = {}
        return ", ".join(
            f"{name} {sum(seconds) * 1e3:.1f} ms" + (f" ({len(seconds)}x)" if len(seconds) > 1 else "")
            for name, seconds in ordered
        )
