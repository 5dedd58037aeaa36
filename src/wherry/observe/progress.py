"""Progress of a long operation: a bar on a terminal, a plain line now and then elsewhere, and only on rank 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID


def is_terminal(stream: Any) -> bool:
    """Whether a person reads `stream` on a terminal that can redraw, and that nobody redraws already."""
    import os

    # A live display of rich's stands in for the stream, and prints above itself what is written to it.
    taken = hasattr(stream, "rich_proxied_file")
    return bool(getattr(stream, "isatty", bool)()) and os.environ.get("TERM", "dumb") != "dumb" and not taken


class Progress:
    """Shows how far an operation has come.

    >>> with Progress("reading the text", total=1200, unit="files") as progress:
    ...     for path in paths:
    ...         read(path)
    ...         progress.advance()
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        unit: str = "",
        rank: int = 0,
        stream: TextIO | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._unit = f" {unit}" if unit else ""
        self._shown = rank == 0
        self._stream = stream or sys.stderr
        self._every = every
        self._clock = clock
        self._bar: Any = None
        self._task: TaskID | None = None
        self._next_line = 0.0

    def __enter__(self) -> Progress:
        if not self._shown:
            return self
        if is_terminal(self._stream):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit.strip()),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task(self.what, total=self.total)
            self._bar.start()
        else:
            # An operation shorter than `every` seconds says nothing.
            self._next_line = self._clock() + self._every
        return self

    def advance(self, count: int = 1) -> None:
        self.done += count
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + self._every
            percent = f" ({100 * self.done // self.total}%)" if self.total else ""
            print(f"{self.what}: {self.done}/{self.total}{self._unit}{percent}", file=self._stream, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
