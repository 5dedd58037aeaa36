"""Operations of a model, counted by running it: not estimated from its shape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import nn


class FlopCount:
    """Counts floating-point operations of what runs inside, by module and by phase; may be entered several times.

    >>> with FlopCount(model) as count:
    ...     model(inputs)
    >>> count.total
    268435456
    """

    def __init__(self, model: nn.Module) -> None:
        self.phases: Counter[str] = Counter()
        self.modules: Counter[str] = Counter()
        self.seconds = 0.0
        self._root = type(model).__name__
        self._modes: list[tuple[Any, str, float]] = []

    @property
    def total(self) -> int:
        return sum(self.phases.values())

    def __enter__(self) -> FlopCount:
        self._begin("forward")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside under the name of a phase."""
        self._begin(name)
        try:
            yield
        finally:
            self._end()

    def _begin(self, phase: str) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        mode = FlopCounterMode(display=False)
        mode.__enter__()
        self._modes.append((mode, phase, time.perf_counter()))

    def _end(self) -> None:
        mode, phase, start = self._modes.pop()
        mode.__exit__(None, None, None)
        self.seconds += time.perf_counter() - start
        self.phases[phase] += mode.get_total_flops()
        for name, operations in mode.get_flop_counts().items():
            if name != "Global":
                self.modules[name] += sum(operations.values())

    def table(self, depth: int = -1, top: int = 0) -> str:
        """Phases, then modules in the order in which they ran, to a depth (-1: all), or the `top` largest of each."""
        rows = [(name, count) for name, count in self.phases.items()]
        rows = [*rows, ("total", self.total)]
        shown = [
            (name, count) for name, count in self.modules.items()
            if count and (depth < 0 or name.count(".") <= depth)
        ]  # fmt: skip
        if top:
            by_level: dict[int, list[tuple[str, int]]] = {}
            for name, count in sorted(shown, key=lambda row: -row[1]):
                by_level.setdefault(name.count("."), []).append((name, count))
            shown = [row for level in sorted(by_level) for row in by_level[level][:top]]
        lines = [f"{count / 1e9:14.6f} GFLOP  {name}" for name, count in [*rows, *shown]]
        return "\n".join(lines)
