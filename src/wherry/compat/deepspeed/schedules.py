"""`deepspeed.runtime.lr_schedules`: Wherry's schedules with DeepSpeed's timing, and the flags that set them.

A schedule counts in `last_batch_iteration`, which is -1 before the first step. A warm-up takes its rates from that
number and begins at 0, so that the first two updates have the rate of step 0. `OneCycle` and `LRRangeTest` are one step
further.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from wherry.compat.deepspeed import unlisted
from wherry.errors import WherryError
from wherry.update import schedules
from wherry.update.schedules import VALID_LR_SCHEDULES as VALID_LR_SCHEDULES

if TYPE_CHECKING:
    from wherry.config.scheduler import Scheduler


class NoRateYet(WherryError, AssertionError):
    """A rate was read before any was set. transformers catches an assertion."""


class _Schedule(schedules.ClosedForm):
    """DeepSpeed's timing and state of a closed form."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        # engine.optimizer and Accelerate's wrapper keep the torch optimizer under this name.
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.base_lrs = self.own_rates(self.optimizer)
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._start()

    def _start(self) -> None:
        self._set(self.get_lr())

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # filled in place, as others may hold the tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        return self.rates(self.last_batch_iteration + 1)

    def get_last_lr(self) -> list[Any]:
        if not hasattr(self, "_last_lr"):
            raise NoRateYet("get_last_lr: no rate has been set since this schedule was resumed; call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of this class, or from the step of one of `wherry.update.schedules`."""
        self.last_batch_iteration = sd["last_batch_iteration" if "last_batch_iteration" in sd else "last_epoch"]


class LRRangeTest(schedules.RangeTestRates, _Schedule):
    """DeepSpeed's `LRRangeTest`."""


class OneCycle(schedules.OneCycleRates, _Schedule):
    """DeepSpeed's `OneCycle`, which cycles the first beta and sets the second to 0.99."""

    MOMENTA = ("betas",)

    def _start(self) -> None:
        super()._start()
        self._set_momenta(*self._each("cycle_min_mom"))

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Compute the betas of each group at this step; None where they do not cycle."""
        momenta = self.momenta(self.last_batch_iteration + 1)
        return [(first, 0.99) for first in momenta] if self.cycle_momentum else None

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        self._set_momenta([first for first, _ in self.get_mom() or ()])

    def _set_momenta(self, momenta: Sequence[float]) -> None:
        for group, first in zip(self.optimizer.param_groups if self.cycle_momentum else (), momenta, strict=False):
            group["betas"] = (first, 0.99)


class WarmupLR(schedules.WarmupRates, _Schedule):
    """DeepSpeed's `WarmupLR`."""

    MIN_STEPS = 2

    def get_lr(self) -> list[float]:
        return self.rates(max(0, self.last_batch_iteration))


class WarmupDecayLR(schedules.WarmupDecayRates, WarmupLR):
    """DeepSpeed's `WarmupDecayLR`, whose `warmup_max_lr` has a default."""

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int, warmup_min_lr: schedules.Rates = 0.0,
        warmup_max_lr: schedules.Rates | None = 0.001, *how: Any, **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, total_num_steps, warmup_min_lr, warmup_max_lr, *how, **named)


class WarmupCosineLR(schedules.WarmupCosineRates, _Schedule):
    """DeepSpeed's `WarmupCosineLR`: 0 before the first step, and a cosine that is one step ahead of the warm-up."""

    MIN_STEPS = 2

    def get_lr(self) -> list[float]:
        step = self.last_batch_iteration
        if step < 0:
            return [0.0] * len(self.base_lrs)
        return self.rates(step + (step >= self.warmup_num_steps))


def build(config: Scheduler, optimizer: Optimizer) -> Any:
    """Build the schedule of a config's block `scheduler`; a key without a value has its default here."""
    params = {name: value for name, value in config.params.items() if value is not None}
    return globals()[config.type](optimizer, **params)


_FLAGS: Mapping[str, Any] = {
    "lr_range_test_min_lr": 0.001, "lr_range_test_step_rate": 1.0, "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False, "cycle_first_step_size": 1000, "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1, "cycle_second_stair_count": -1, "decay_step_size": 1000, "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1, "decay_lr_rate": 0.0, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log",
    "warmup_min_ratio": 0.01, "cos_min_ratio": 0.01,
}  # fmt: skip


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and the parameters of schedules to a script's parser."""
    group = parser.add_argument_group("Convergence Tuning", "schedules of the learning rate, and their parameters")
    group.add_argument("--lr_schedule", help="one of " + ", ".join(VALID_LR_SCHEDULES))
    for name, default in _FLAGS.items():
        group.add_argument(f"--{name}", type=type(default), default=default)
    group.add_argument("--cycle_momentum", action="store_true")
    return parser


def __getattr__(name: str) -> Any:
    return unlisted("runtime.lr_schedules", name)
