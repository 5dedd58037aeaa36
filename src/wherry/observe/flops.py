"""Operations of a model, counted by running it: not estimated from its shape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class FlopCount:
    """Counts floating-point operations of what runs inside its phases, by phase and by module.

    >>> count = FlopCount()
    >>> with count.phase("forward"):
    ...     model(inputs)
    >>> count.total
    268435456
    """

    def __init__(self) -> None:
        self.phases: Counter[str] = Counter()
        self.modules: Counter[str] = Counter()
        self.seconds = 0.0

    @property
    def total(self) -> int:
        return sum(self.phases.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        from torch.utils.flop_counter import FlopCounterMode

        start = time.perf_counter()
        with FlopCounterMode(display=False) as mode:
            yield
        self.seconds += time.perf_counter() - start
        self.phases[name] += mode.get_total_flops()
        for module, operations in mode.get_flop_counts().items():
            if module != "Global":
                self.modules[module] += sum(operations.values())

    def table(self, depth: int = -1, top: int = 0) -> str:
        """Phases, then modules in the order in which they ran, to a depth (-1: all), or the `top` largest of each."""
        rows = [*self.phases.items(), ("total", self.total)]
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
