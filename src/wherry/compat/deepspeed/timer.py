"""`deepspeed.utils.timer`: timers that wait for the device, for scripts that time parts of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.utils import print_dist
from wherry.observe.log import logger

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without so much of the data at each end of its order; 0 of none.

    >>> trim_mean([9.0, 1.0, 2.0, 3.0, 0.0], 0.2)
    2.0
    """
    assert 0.0 <= trim_percent <= 1.0, f"trim_mean: expected a part from 0 to 1, got {trim_percent}"
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0


class _Timer:
    """Adds up the time between `start` and `stop`, in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self.elapsed_records: list[float] = []
        self._start = 0.0

    def start(self) -> None:
        assert not self.started_, f"{self.name_} timer has already been started"
        get_accelerator().synchronize()
        self._start, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        assert self.started_, f"{self.name_} timer is not started"
        get_accelerator().synchronize()
        self.elapsed_records.append((time.perf_counter() - self._start) * 1e3)
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self.elapsed_records.clear()

    def elapsed(self, reset: bool = True) -> float:
        running = self.started_
        if running:
            self.stop()
        total = sum(self.elapsed_records)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        return trim_mean(self.elapsed_records, 0.1)


class SynchronizedWallClockTimer:
    """Timers by name."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    @staticmethod
    def memory_usage() -> str:
        accelerator = get_accelerator()
        told = {
            "mem_allocated": accelerator.memory_allocated(),
            "max_mem_allocated": accelerator.max_memory_allocated(),
            "cache_allocated": accelerator.memory_cached(),
            "max_cache_allocated": accelerator.max_memory_cached(),
        }
        return "".join(f" | {name}: {size / 2**30:.4f} GB" for name, size in told.items())

    def log(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:  # fmt: skip
        assert normalizer > 0.0, f"log: expected a normalizer above 0, got {normalizer}"
        told = {name: self.timers[name].elapsed(reset) / normalizer for name in names if name in self.timers}
        print_dist("time (ms)" + "".join(f" | {name}: {ms:.2f}" for name, ms in told.items()), ranks or [0])


class _Idle:
    def start(self, **_: Any) -> None:
        """Nothing is timed."""

    stop = reset = start

    def elapsed(self, **_: Any) -> int:
        return 0

    mean = elapsed


class NoopTimer:
    """Timers that time nothing."""

    Timer = _Idle

    def __call__(self, name: str) -> _Idle:
        return _Idle()

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(self, names: Iterable[str], *_: Any, **__: Any) -> None:
        """Nothing is timed."""


class ThroughputTimer:
    """Samples per second, from `start_step` on."""

    def __init__(
        self, config: Any, batch_size: int | None, start_step: int = 2, steps_per_output: int | None = None,
        monitor_memory: bool = False, logging_fn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = self.start_time = self.end_time = 0.0
        self.initialized = self.started = False

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def start(self) -> None:
        if self.config.enabled:
            self.initialized = self.started = True
            self.start_time = self._now() if self.global_step_count >= self.start_step else 0.0

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:
            return
        self.end_time = self._now()
        duration = self.end_time - self.start_time
        self.total_elapsed_time += duration
        self.step_elapsed_time += duration
        if not global_step:
            return
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                f"CurrSamplesPerSec={self.batch_size / (self.step_elapsed_time + 1e-6)}"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if self.total_elapsed_time else float("-inf")
