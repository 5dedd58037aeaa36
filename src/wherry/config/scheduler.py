"""`scheduler`: how the learning rate changes from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from wherry.config.fields import ConfigBlock, Constructed, Flag, Integer, Number, Numbers, Text, key, lowered
from wherry.config.problems import did_you_mean, named, shown

_RESUME = "The step that a resumed schedule continues after; -1 for a new one."
WarmupType = Annotated[Literal["log", "linear"], BeforeValidator(lowered)]


def _bounded(below: float = math.inf) -> AfterValidator:
    """Of a number, or of a list of them."""

    def check(value: float | list[float]) -> float | list[float]:
        for number in value if isinstance(value, list) else [value]:
            if number < 0:
                raise ValueError(f"expected at least 0, got {shown(number)}")
            if number >= below:
                raise ValueError(f"expected less than {below:g}, got {shown(number)}")
        return value

    return AfterValidator(check)


Rates = Annotated[Numbers, _bounded()]
Momenta = Annotated[Numbers, _bounded(below=1)]


class _ScheduleBlock(ConfigBlock):
    last_batch_iteration: Integer = key(-1, _RESUME, ge=-1)


class WarmupParams(_ScheduleBlock):
    warmup_min_lr: Numbers = key(0.0, "Learning rate at the first step; a list gives one for each group.")
    warmup_max_lr: Numbers | None = key(
        None, "Learning rate after the warm-up; a list gives one for each group. Unset: the optimizer's own."
    )
    warmup_num_steps: Integer = key(1000, "Steps of the warm-up.", ge=0)
    warmup_type: WarmupType = key("log", "Shape of the warm-up: log or linear.")


class WarmupDecayParams(WarmupParams):
    total_num_steps: Integer | None = key(None, "Step at which the rate is back at warmup_min_lr. Required.", ge=1)


class WarmupCosineParams(_ScheduleBlock):
    total_num_steps: Integer | None = key(None, "Step at which the cosine ends. Required.", ge=1)
    warmup_min_ratio: Number = key(0.0, "First learning rate, as a share of the optimizer's own.", ge=0)
    warmup_num_steps: Integer = key(1000, "Steps of the warm-up.", ge=0)
    cos_min_ratio: Number = key(1e-4, "Last learning rate, as a share of the optimizer's own.", ge=0)
    warmup_type: WarmupType = key("log", "Shape of the warm-up: log or linear.")


class OneCycleParams(_ScheduleBlock):
    cycle_min_lr: Rates = key(..., "Lowest learning rate of the cycle; a list gives one for each group.")
    cycle_max_lr: Rates = key(..., "Highest learning rate of the cycle; a list gives one for each group.")
    decay_lr_rate: Number = key(0.0, "After the cycle, the rate at which the learning rate decays.", ge=0)
    cycle_first_step_size: Integer = key(2000, "Steps of the rising half.", ge=1)
    cycle_second_step_size: Integer | None = key(None, "Steps of the falling half. Unset: as the rising half.", ge=1)
    cycle_first_stair_count: Integer = key(0, "Stairs of the rising half; 0 for a straight line.", ge=0)
    cycle_second_stair_count: Integer | None = key(
        None, "Stairs of the falling half; 0 for a straight line. Unset: as the rising half.", ge=0
    )
    decay_step_size: Integer = key(0, "Steps over which one decay_lr_rate applies; 0 for no decay.", ge=0)
    cycle_momentum: Flag = key(True, "Cycle the momentum against the learning rate.")
    cycle_min_mom: Momenta = key(0.8, "Lowest momentum of the cycle; a list gives one for each group.")
    cycle_max_mom: Momenta = key(0.9, "Highest momentum of the cycle; a list gives one for each group.")
    decay_mom_rate: Number = key(0.0, "After the cycle, the rate at which the momentum changes.")


class LRRangeTestParams(_ScheduleBlock):
    lr_range_test_min_lr: Numbers = key(1e-3, "Learning rate at the start; a list gives one for each group.")
    lr_range_test_step_size: Integer = key(2000, "Steps for one increase.", ge=1)
    lr_range_test_step_rate: Number = key(1.0, "Share of the start that is added at each increase.", ge=0)
    lr_range_test_staircase: Flag = key(False, "Increase in stairs instead of continuously.")


SCHEDULES: dict[str, type[ConfigBlock]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
}
NEEDS_TOTAL = ("WarmupDecayLR", "WarmupCosineLR")
_SIMPLEST_FIRST = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")


def _type(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected the name of a schedule, got {shown(value)}")
    name = named(value, SCHEDULES)
    if name is None:
        hint = did_you_mean(value, SCHEDULES) or "; expected one of " + ", ".join(SCHEDULES)
        advice = "a schedule of torch.optim.lr_scheduler is passed to initialize(lr_scheduler=...)"
        raise ValueError(f'unknown schedule "{value}"{hint}; {advice}')
    return name


def with_parameters(names: Iterable[str]) -> str | None:
    """The schedule that has parameters of all these names; of several the simplest.

    >>> with_parameters(["warmup_num_steps", "total_num_steps"])
    'WarmupDecayLR'
    """
    wanted = set(names)
    return next((name for name in _SIMPLEST_FIRST if wanted <= SCHEDULES[name].model_fields.keys()), None)


class Scheduler(Constructed):
    models: ClassVar = SCHEDULES

    type: Annotated[str, BeforeValidator(_type), WithJsonSchema({"type": "string", "enum": list(SCHEDULES)})] = key(
        ...,
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest. auto: the one that has the parameters "
        "given; none without any.",
    )
    params: dict[Text, Any] = key({}, "What the schedule is constructed with.")
