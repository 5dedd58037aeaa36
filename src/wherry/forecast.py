"""`wherry.estimate`: the numbers behind `wherry plan`, for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.plan.estimate import Estimate, Subject, estimate_count, updates_on_host
from wherry.plan.estimate import estimate as estimate_profile
from wherry.plan.machine import Machine, known
from wherry.plan.memory import states
from wherry.plan.peaks import Setting
from wherry.plan.probe import this_machine
from wherry.plan.profile import Line, Profile, profile
from wherry.plan.units import unit_sizes
from wherry.sources import Source, find

# A profile of this micro-batch and the straight line to it from one: never below what a batch between them keeps.
FAR = 32


class Forecaster:
    """Estimates of one model on one machine for many configs; profiles are made once and kept."""

    def __init__(self, source: Source, machine: Machine, ranks: int, sequence: int | None = None) -> None:
        self.source = source
        self.machine = machine
        self.ranks = ranks
        self.sequence = sequence or source.sequence
        self._profiles: dict[tuple[int, bool, torch.dtype | None, tuple[str, ...]], Profile] = {}

    def exact(self, config: Config, recompute: bool = False) -> Estimate:
        """From a profile of this very micro-batch."""
        return self._estimate(config, recompute, self.profile)

    def quick(self, config: Config, recompute: bool = False) -> Estimate:
        """From profiles of other micro-batches, for searching: never below the exact one up to a micro-batch of 32."""
        return self._estimate(config, recompute, self._between)

    def _estimate(
        self, config: Config, recompute: bool, profile_of: Callable[[Config, int, bool], Profile]
    ) -> Estimate:
        micro = config.batch(self.ranks).micro
        subject = Subject(self.source.name, self.sequence, recompute)
        return estimate_profile(subject, profile_of(config, micro, recompute), config, self.machine, self.ranks)

    def _between(self, config: Config, micro: int, recompute: bool) -> Profile:
        if not self.source.scales or micro == 1:
            return self.profile(config, micro, recompute)
        return Line(self.profile(config, 1, recompute), self.profile(config, FAR, recompute)).at(micro)

    def profile(self, config: Config, micro: int, recompute: bool) -> Profile:
        classes = tuple(config.wherry.unit_classes)
        key = (micro, recompute, config.working_dtype(), classes)
        if key not in self._profiles:
            self._profiles[key] = self._profile(*key)
        return self._profiles[key]

    def _profile(self, micro: int, recompute: bool, dtype: torch.dtype | None, classes: tuple[str, ...]) -> Profile:
        unknown = False

        def build(micro_batch: int) -> tuple[nn.Module, tuple[Any, ...], Any]:
            nonlocal unknown
            model, batch = self.source.make(micro_batch, self.sequence, recompute)
            if batch is None:
                unknown = True
                raise WherryError("the model's inputs are not known")
            return model, batch.args, batch.kwargs

        try:
            return profile(build, micro, dtype, classes)
        except WherryError:
            if not unknown:
                raise
        with torch.device("meta"):
            model, _ = self.source.make(micro, self.sequence, recompute)
        return Profile.of_sizes(unit_sizes(model, classes), micro)


def estimate(
    model_or_params: str | int | float | nn.Module | Callable[..., Any],
    config: Config | dict[str, Any] | str | None = None,
    machine: Machine | str | None = None,
    *,
    ranks: int | None = None,
    sequence: int | None = None,
    recompute: bool = False,
) -> Estimate:
    """What training keeps and how long a step takes, without training, and without the model's memory.

    The model is a preset, a Hugging Face config or folder, `"module:callable"`, a callable that returns a model and the
    inputs of a micro-batch, a model (on the meta device, if it is large), or a number of parameters. `machine` is one
    of those that `wherry plan --machine` knows, or this one.

        found = wherry.estimate("gpt2-1.5b", {"bf16": {"enabled": True}}, "4090")
        print(found.fits, found.tightest, found.seconds)
    """
    where = machine if isinstance(machine, Machine) else this_machine() if machine is None else known(machine)
    resolved = config if isinstance(config, Config) else configs.load(config)
    ranks = ranks or where.ranks()
    if isinstance(model_or_params, int | float):
        count = int(model_or_params)
        setting = Setting.of(resolved, ranks, on_host=updates_on_host(resolved, where))
        held = states(count, setting.placement, ranks, setting.cost)
        return estimate_count(Subject(f"{count:,} parameters"), held, resolved, where, ranks)
    return Forecaster(find(model_or_params), where, ranks, sequence).exact(resolved, recompute)
