"""`deepspeed.utils.timer`: timers that wait for the device, for scripts that time parts of their own."""

from __future__ import annotations

import time
from collections.abc import Iterable

from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.comm import get_rank


class _Timer:
    """The sum of the times between `start` and `stop`, in milliseconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start: float | None = None
        self._elapsed = 0.0

    def start(self) -> None:
        assert self._start is None, f"{self._name} timer has already been started"
        get_accelerator().synchronize()
        self._start = time.perf_counter()

    def stop(self) -> None:
        assert self._start is not None, f"{self._name} timer is not started"
        get_accelerator().synchronize()
        self._elapsed += (time.perf_counter() - self._start) * 1e3
        self._start = None

    def reset(self) -> None:
        self._start, self._elapsed = None, 0.0

    def elapsed(self, reset: bool = True) -> float:
        """Return the sum without stopping a running timer."""
        running = self._start is not None
        if running:
            self.stop()
        total = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start()
        return total


class SynchronizedWallClockTimer:
    """Timers by name."""

    def __init__(self) -> None:
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self._timers.setdefault(name, _Timer(name))

    def log(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, ranks: list[int] | None = None
    ) -> None:
        """Print the sums of these timers, over `normalizer`, on rank 0 or on `ranks`."""
        assert normalizer > 0.0, f"log: normalizer: expected a number above 0, got {normalizer}"
        times = {name: self._timers[name].elapsed(reset) / normalizer for name in names if name in self._timers}
        if get_rank() in (ranks or [0]):
            print(f"[Rank {get_rank()}] time (ms)" + "".join(f" | {name}: {ms:.2f}" for name, ms in times.items()))


class ThroughputTimer:
    """`engine.tput_timer`, of which scripts call `update_epoch_count`; the engine's own report has the rates."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
