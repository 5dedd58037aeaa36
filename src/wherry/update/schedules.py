"""Learning rate schedules: closed forms of the step, and torch's schedulers of them.

Step 0 is the first update. Each class takes its parameters under the names that configs use.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wherry.errors import WherryError
from wherry.fake import faking
from wherry.observe.log import warn
from wherry.parallel.agreement import plain

if TYPE_CHECKING:
    from wherry.config.scheduler import Scheduler


class AnotherOptimizerError(WherryError, AssertionError):
    """A schedule that moves another optimizer than the engine's. Scripts written for DeepSpeed catch an assertion."""


Rates = float | Sequence[float]


class ClosedForm:
    """The closed form of a schedule: learning rates of an optimizer's groups at a step."""

    optimizer: Optimizer
    base_lrs: list[Any]

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        """Set the first rates; a subclass calls this after it has read its own parameters."""
        raise NotImplementedError

    def rates(self, step: int) -> list[float]:
        raise NotImplementedError

    def own_rates(self, optimizer: Optimizer) -> list[float]:
        return [float(group["lr"]) for group in optimizer.param_groups]


class WarmupRates(ClosedForm):
    """From `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, constant afterwards.

    `warmup_max_lr` unset is each group's own learning rate.
    """

    MIN_STEPS = 0

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group("warmup_min_lr", warmup_min_lr, optimizer)
        max_lr = self.own_rates(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.max_lrs = _per_group("warmup_max_lr", max_lr, optimizer)
        self.warmup_num_steps = max(self.MIN_STEPS, _count("warmup_num_steps", warmup_num_steps))
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        share = self._share(step)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _share(self, step: int) -> float:
        """Interpolate from the lowest (0) to the highest rate (1)."""
        return _warmed(step, self.warmup_num_steps, self.warmup_type)


class WarmupDecayRates(WarmupRates):
    """Warm up as `WarmupRates` does, then fall linearly to `warmup_min_lr` at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total(type(self).__name__, total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _share(self, step: int) -> float:
        if step < self.warmup_num_steps:
            return super()._share(step)
        remaining = max(0, self.total_num_steps - step)
        return remaining / max(1, self.total_num_steps - self.warmup_num_steps)


class WarmupCosineRates(ClosedForm):
    """Shares of each group's own rate: from `warmup_min_ratio` to 1, then a half cosine to `cos_min_ratio`."""

    MIN_STEPS = 0

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total(type(self).__name__, total_num_steps, warmup_num_steps)
        self.warmup_num_steps = max(self.MIN_STEPS, _count("warmup_num_steps", warmup_num_steps))
        self.warmup_min_ratio = float(warmup_min_ratio)
        self.cos_min_ratio = float(cos_min_ratio)
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        ratio = self._ratio(step)
        return [float(base) * ratio for base in self.base_lrs]

    def _ratio(self, step: int) -> float:
        if step < self.warmup_num_steps:
            share = _warmed(step, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * share
        progress = _progress(step, self.warmup_num_steps, self.total_num_steps)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0


class OneCycleRates(ClosedForm):
    """One cycle of the learning rate, up and down, with the momentum against it; then an optional decay."""

    # The hyper-parameters of an optimizer that the momentum cycles in.
    MOMENTA: tuple[str, ...] = ("betas", "momentum")

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        # As given: each is one number, or one for each group.
        self.cycle_min_lr, self.cycle_max_lr = cycle_min_lr, cycle_max_lr
        self.cycle_min_mom, self.cycle_max_mom = cycle_min_mom, cycle_max_mom
        for name in ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"):
            _per_group(name, getattr(self, name), optimizer)
        self.first = max(1, _count("cycle_first_step_size", cycle_first_step_size))
        second = self.first if cycle_second_step_size is None else cycle_second_step_size
        self.second = _count("cycle_second_step_size", second)
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = self.first_stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.decay_step_size = _count("decay_step_size", decay_step_size)
        self.cycle_momentum = cycle_momentum and self._has_momentum(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        lows, highs = self._each("cycle_min_lr", "cycle_max_lr")
        if step > self.first + self.second:
            return [low / (1.0 + self.decay_lr_rate * self._decay_intervals(step)) for low in lows]
        height = self._height(step)
        return [low + (high - low) * height for low, high in zip(lows, highs, strict=True)]

    def momenta(self, step: int) -> list[float]:
        """Compute the momentum of each group, which for Adam and its like is the first beta."""
        lows, highs = self._each("cycle_min_mom", "cycle_max_mom")
        if step > self.first + self.second:
            return [high * (1.0 + self.decay_mom_rate * self._decay_intervals(step)) for high in highs]
        height = self._height(step)
        return [high - (high - low) * height for low, high in zip(lows, highs, strict=True)]

    def _has_momentum(self, optimizer: Optimizer) -> bool:
        if any(group.get(name) for group in optimizer.param_groups for name in self.MOMENTA):
            return True
        warn(
            "scheduler.params.cycle_momentum: %s has no %s to cycle; only the learning rate cycles. Set "
            "cycle_momentum to false to say so.", type(optimizer).__name__, " or ".join(self.MOMENTA),
        )  # fmt: skip
        return False

    def _height(self, step: int) -> float:
        """Compute the height in the cycle, 0 to 1; with stairs, that of the stair reached."""
        climbed, size, stairs = step % (self.first + self.second), self.first, self.first_stairs
        if climbed > self.first:
            climbed, size, stairs = self.first + self.second - climbed, self.second, self.second_stairs
        return (climbed * stairs // size) / stairs if stairs > 0 else climbed / size

    def _decay_intervals(self, step: int) -> float:
        return (step - self.first - self.second) / self.decay_step_size if self.decay_step_size else 0.0

    def _each(self, *names: str) -> list[list[float]]:
        """Expand these parameters to one number for each of the optimizer's present groups."""
        return [_per_group(name, getattr(self, name), self.optimizer) for name in names]


class RangeTestRates(ClosedForm):
    """A learning rate that grows from `lr_range_test_min_lr` on, to find the largest that trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self.step_size = max(1, _count("lr_range_test_step_size", lr_range_test_step_size))
        self.step_rate = float(lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        intervals = step // self.step_size if self.staircase else step / self.step_size
        return [low * (1.0 + self.step_rate * intervals) for low in self.min_lrs]


class _TorchSchedule(ClosedForm, LRScheduler):
    """A torch scheduler whose learning rates follow from the step alone."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        if last_batch_iteration >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        LRScheduler.__init__(self, optimizer, last_epoch=last_batch_iteration)

    def own_rates(self, optimizer: Optimizer) -> list[float]:
        return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]

    def get_lr(self) -> list[float | Any]:
        return self.rates(self.last_epoch)

    def _get_closed_form_lr(self) -> list[float | Any]:
        return self.get_lr()


class WarmupLR(WarmupRates, _TorchSchedule):
    """A torch scheduler of `WarmupRates`."""


class WarmupDecayLR(WarmupDecayRates, _TorchSchedule):
    """A torch scheduler of `WarmupDecayRates`."""


class WarmupCosineLR(WarmupCosineRates, _TorchSchedule):
    """A torch scheduler of `WarmupCosineRates`."""


class OneCycle(OneCycleRates, _TorchSchedule):
    """A torch scheduler of `OneCycleRates`."""

    def get_lr(self) -> list[float | Any]:
        # torch asks for the rates exactly when they are about to be set, which is the moment for the momentum too.
        momenta = self.momenta(self.last_epoch) if self.cycle_momentum else ()
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            elif group.get("momentum"):
                group["momentum"] = momentum
        return super().get_lr()


class LRRangeTest(RangeTestRates, _TorchSchedule):
    """A torch scheduler of `RangeTestRates`."""


_SCHEDULES: dict[str, type[_TorchSchedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
VALID_LR_SCHEDULES = list(_SCHEDULES)
# The keys of the first rates of schedules that warm up.
_FIRST_RATES = {
    "WarmupLR": "warmup_min_lr",
    "WarmupDecayLR": "warmup_min_lr",
    "WarmupCosineLR": "warmup_min_ratio",
}


def build(config: Scheduler, optimizer: Optimizer) -> LRScheduler:
    """The schedule that a config's block `scheduler` names, on an optimizer."""
    return _SCHEDULES[config.type](optimizer, **config.params)


def resolve(
    given: Any,
    named: Scheduler | None,
    optimizer: Optimizer | None,
    build: Callable[[Scheduler, Optimizer], Any] = build,
) -> Any:
    """The schedule that `initialize` was given, or that the config names, on the optimizer that it made."""
    if given is None:
        if named is None:
            return None
        if optimizer is None:
            warn(
                "scheduler: the config's %s is not used, as there is no optimizer whose rate it could set; give "
                'initialize an optimizer, or the config a block "optimizer"', named.type,
            )  # fmt: skip
            return None
        schedule = build(named, optimizer)
        if not faking() and (key := _FIRST_RATES.get(named.type)) and (idle := _updates_at_rate_zero(schedule)):
            warn(
                "scheduler: %s begins at rate 0, so the first %s will change no weight; set scheduler.params.%s above "
                "0 for fewer", named.type, "update" if idle == 1 else f"{idle} updates", key,
            )  # fmt: skip
        return schedule
    if named is not None:
        warn("scheduler: the config's %s is not used, as initialize was given one", named.type)
    if optimizer is None:
        raise WherryError(
            "lr_scheduler: this engine has no optimizer whose rate it could set; give initialize the optimizer too, or "
            'the config a block "optimizer"'
        )
    if isinstance(given, type) or (callable(given) and not hasattr(given, "step")):
        return given(optimizer)
    built_on = getattr(given, "optimizer", None)
    if isinstance(built_on, Optimizer):
        ours = {id(group) for group in optimizer.param_groups}
        if not any(id(group) in ours for group in built_on.param_groups):
            raise AnotherOptimizerError(
                f"lr_scheduler: {type(given).__name__} was built on another optimizer ({type(built_on).__name__}) and "
                "would move nothing here; build it on the one given to initialize, or give a callable that takes the "
                "optimizer and makes it"
            )
    return given


def _updates_at_rate_zero(schedule: Any) -> int:
    """Count the updates until a schedule that warms up leaves rate 0; none of one that is there for ever."""
    ahead = copy.copy(schedule)
    step = "last_epoch" if isinstance(schedule, LRScheduler) else "last_batch_iteration"  # the latter: DeepSpeed's
    for updates in range(3):
        if any(ahead.get_lr()):
            return updates
        setattr(ahead, step, getattr(ahead, step) + 1)
    return 0


def described(schedule: Any, name: str = "lr_scheduler") -> Iterator[tuple[str, str]]:
    """What of a schedule every rank must have alike. Of one that is none of torch's kind, only what it is."""
    kind = type(schedule)
    yield name, "missing" if schedule is None else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(schedule, LRScheduler):
        for key, value in vars(schedule).items():
            if not key.startswith("_") and (text := plain(value)) is not None:
                yield f"{name}.{key}", text
        for number, inner in enumerate(getattr(schedule, "_schedulers", ())):
            yield from described(inner, f"{name}._schedulers[{number}]")


def _per_group(name: str, value: Rates, optimizer: Optimizer) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [float(value)] * groups  # type: ignore[arg-type]
    if len(value) != groups:
        raise WherryError(
            f"scheduler.params.{name}: expected one number, or one for each of the {groups} parameter groups, "
            f"got {len(value)}"
        )
    return [float(rate) for rate in value]


def _count(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 0:
        raise WherryError(f"scheduler.params.{name}: expected an integer of 0 or more, got {value!r}")
    return value


def _total(schedule: str, value: Any, warmup_steps: int) -> int:
    if value == "auto":
        raise WherryError(
            f'scheduler.params.total_num_steps: is "auto", but {schedule} must know how many updates the training '
            "makes, and nothing has said it; write the number"
        )
    total = _count("total_num_steps", int(value) if isinstance(value, float) else value)
    if total < warmup_steps:
        warn("scheduler.params.total_num_steps: %d is less than warmup_num_steps, %d", total, warmup_steps)
    return total


def _warmup_type(value: str) -> str:
    if value not in ("log", "linear"):
        raise WherryError(f'scheduler.params.warmup_type: expected "log" or "linear", got {value!r}')
    return value


def _warmed(step: int, steps: int, kind: str) -> float:
    """Compute the progress of a warm-up, 0 to 1."""
    if step >= steps:
        return 1.0
    return math.log(step + 1) / math.log(max(2, steps)) if kind == "log" else step / steps


def _progress(step: int, start: int, end: int) -> float:
    """Compute the progress between two steps, 0 to 1; past the end where the two leave no room."""
    return min(1.0, (step - start) / (end - start)) if end > start else 1.0
