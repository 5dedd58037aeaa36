"""Learning rate schedules with DeepSpeed's names and timing, and the flags that set them.

A schedule knows `last_batch_iteration`, -1 before its first step. The warm-ups take their rates from it, and begin at
step 0: so the first two updates both have the rate of step 0. `OneCycle` and `LRRangeTest` count one step further.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from wherry.errors import WherryError
from wherry.observe.log import warn
from wherry.update.schedules import Cycle, warmed

if TYPE_CHECKING:
    from wherry.config.scheduler import Scheduler

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

# The names of parameters, as variables that scripts import.
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT = "cycle_first_step_size", "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT = "cycle_second_step_size", "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_NUM_STEPS, WARMUP_TYPE = "warmup_num_steps", "warmup_type"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO, TOTAL_NUM_STEPS = "warmup_min_ratio", "cos_min_ratio", "total_num_steps"

Rate = Any  # a number, or a tensor where the optimizer's rate is one


class _Schedule:
    """What a rate is follows from `last_batch_iteration` alone."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration

    def _set(self, rates: Sequence[Rate]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # which others may hold: it stays the same one
                group["lr"].fill_(rate.squeeze() if isinstance(rate, torch.Tensor) else rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[Rate]:
        raise NotImplementedError

    def get_last_lr(self) -> list[Rate]:
        """The rates that were set last."""
        if not hasattr(self, "_last_lr"):
            raise _NotYet("get_last_lr: no rate has been set since this schedule was resumed; call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """As `state_dict` gave it; or as a schedule of `import wherry` did, whose next rate is that of this step."""
        last = "last_batch_iteration" if "last_batch_iteration" in sd else "last_epoch"
        self.last_batch_iteration = sd[last]


class _NotYet(WherryError, AssertionError):
    """There is nothing to give."""


class LRRangeTest(_Schedule):
    """Rates that grow from `lr_range_test_min_lr`, to find the largest that trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = _per_group(self.optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[Rate]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [low * increase for low in self.min_lr]


class OneCycle(Cycle, _Schedule):
    """One cycle of the rate, up and down, with the momentum against it; then an optional decay.

    Momentum is the first beta, and the second is 0.99 as long as it cycles.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.first = float(cycle_first_step_size)
        self.second = self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        if self.first <= 0 or self.second < 0:
            raise WherryError(
                "OneCycle: cycle_first_step_size must be positive and cycle_second_step_size non-negative, got "
                f"{cycle_first_step_size} and {cycle_second_step_size}"
            )
        self.step_ratio = self.first / (self.first + self.second)
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = _per_group(self.optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(self.optimizer, cycle_max_lr, "cycle_max_lr")
        self._moms = [
            _per_group(self.optimizer, cycle_min_mom, "cycle_min_mom"),
            _per_group(self.optimizer, cycle_max_mom, "cycle_max_mom"),
        ]
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            kind = type(self.optimizer).__name__
            warn("OneCycle: cycle_momentum is left out, as %s has no betas; only the rate cycles", kind)
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_moms(self._moms[0])

    def get_lr(self) -> list[Rate]:
        return self._rates(self.last_batch_iteration + 1, self.min_lrs, self.max_lrs)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at this step; None where they do not cycle."""
        if not self.cycle_momentum:
            return None
        return [(mom, 0.99) for mom in self._momenta(self.last_batch_iteration + 1, *self._moms)]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        self._set_moms([first for first, _ in self.get_mom() or ()])

    def _set_moms(self, moms: Sequence[float]) -> None:
        for group, mom in zip(self.optimizer.param_groups if self.cycle_momentum else (), moms, strict=False):
            group["betas"] = (mom, 0.99)


class _Warmup(_Schedule):
    """Schedules that begin with a warm-up."""

    def __init__(
        self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = max(2, _positive("warmup_num_steps", warmup_num_steps))
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            warn("warmup_type: %r is neither log nor linear, so it is log", warmup_type)
            warmup_type = WARMUP_LOG_RATE
        self.warmup_type = warmup_type

    def _warmed(self) -> float:
        """How far the warm-up is, 0 to 1."""
        return warmed(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)

    def _tell_of_total(self, total: int) -> None:
        if total < self.warmup_num_steps:
            warn("total_num_steps: %d is less than warmup_num_steps, %d", total, self.warmup_num_steps)


class WarmupLR(_Warmup):
    """From `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, constant afterwards.

    `warmup_max_lr` left out is each group's own rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        own = [_kept(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = _per_group(self.optimizer, warmup_min_lr, "min_lr")
        self.max_lrs = _per_group(self.optimizer, own if warmup_max_lr is None else warmup_max_lr, "max_lr")
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[Rate]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        share = self._share()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _share(self) -> float:
        return self._warmed()


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then back to `warmup_min_lr` in a straight line that ends at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total(total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._tell_of_total(self.total_num_steps)

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._warmed()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Shares of each group's own rate: from `warmup_min_ratio` to 1, then a half cosine to `cos_min_ratio`.

    Before its first step the rate is 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = _total(total_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._tell_of_total(self.total_num_steps)
        self.org_lrs = [_kept(group["lr"]) for group in self.optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[Rate]:
        ratio = self.get_lr_ratio()
        return [own * ratio for own in self.org_lrs]

    def get_lr_ratio(self) -> float:
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._warmed() * (1.0 - self.warmup_min_ratio)
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / steps)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


SCHEDULES: Mapping[str, type[_Schedule]] = {
    LR_RANGE_TEST: LRRangeTest,
    ONE_CYCLE: OneCycle,
    WARMUP_LR: WarmupLR,
    WARMUP_DECAY_LR: WarmupDecayLR,
    WARMUP_COSINE_LR: WarmupCosineLR,
}


def build(config: Scheduler, optimizer: Optimizer) -> _Schedule:
    """The schedule that a config's block `scheduler` names. What is unset has its default here."""
    params = {name: value for name, value in config.params.items() if value is not None}
    if params.get("warmup_num_steps") == 0:  # what a Trainer fills in, whose own default it is
        params["warmup_num_steps"] = 1
    return SCHEDULES[config.type](optimizer, **params)


def _torch_optimizer(optimizer: Any) -> Optimizer:
    # An engine's optimizer has the one inside whose learning rates it uses.
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer")
    return inner


def _kept(rate: Rate) -> Rate:
    """A rate that is a tensor is set in place: what it was is kept apart."""
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _per_group(optimizer: Optimizer, value: Any, name: str) -> list[Any]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * groups
    if len(value) != groups:
        raise WherryError(f"expected {groups} value for {name}, one for each parameter group, got {len(value)}")
    return list(value)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or value <= 0:
        raise WherryError(f"{name} must be a positive integer, got {value!r}")
    return value


def _total(value: Any) -> int:
    if value == "auto":
        raise WherryError(
            'total_num_steps is "auto", and nothing has said how many updates the training makes; write the number'
        )
    return int(value)


_FLAGS: Mapping[str, Any] = {
    LR_RANGE_TEST_MIN_LR: 0.001, LR_RANGE_TEST_STEP_RATE: 1.0, LR_RANGE_TEST_STEP_SIZE: 1000,
    LR_RANGE_TEST_STAIRCASE: False, CYCLE_FIRST_STEP_SIZE: 1000, CYCLE_FIRST_STAIR_COUNT: -1,
    CYCLE_SECOND_STEP_SIZE: -1, CYCLE_SECOND_STAIR_COUNT: -1, DECAY_STEP_SIZE: 1000, CYCLE_MIN_LR: 0.01,
    CYCLE_MAX_LR: 0.1, DECAY_LR_RATE: 0.0, CYCLE_MIN_MOM: 0.8, CYCLE_MAX_MOM: 0.9, DECAY_MOM_RATE: 0.0,
    WARMUP_MIN_LR: 0.0, WARMUP_MAX_LR: 0.001, WARMUP_NUM_STEPS: 1000, WARMUP_TYPE: WARMUP_LOG_RATE,
    WARMUP_MIN_RATIO: 0.01, COS_MIN_RATIO: 0.01,
}  # fmt: skip


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`--lr_schedule` and the parameters of schedules on a script's own parser, for the script to use."""
    group = parser.add_argument_group("Convergence Tuning", "schedules of the learning rate, and their parameters")
    group.add_argument(f"--{LR_SCHEDULE}", help="one of " + ", ".join(VALID_LR_SCHEDULES))
    for name, default in _FLAGS.items():
        group.add_argument(f"--{name}", type=type(default), default=default)
    group.add_argument("--cycle_momentum", action="store_true")
    return parser
