"""`wherry.estimate`: the numbers behind `wherry plan`, for programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.plan.estimate import Estimate, Subject, estimate_count
from wherry.plan.estimate import estimate as estimate_profile
from wherry.plan.grid import ALONE, Grid
from wherry.plan.kept import KeptProfiles
from wherry.plan.machine import Machine, known
from wherry.plan.probe import disk_folder, this_machine
from wherry.plan.profile import Line, Profile, Recompute
from wherry.sources import Batch, Source, find, told_by

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from wherry.plan.trace import Profiler

# A profile of this micro-batch and the straight line to it from one: never below what a batch between them keeps.
FAR = 32


class _Key(NamedTuple):
    """What a profile depends on, besides the model and its sequence."""

    micro: int
    # Of the working weights; None for the model's own.
    dtype: str | None
    unit_classes: tuple[str, ...]
    recompute: Recompute | None
    grid: Grid
    # Elements that a linear layer may have before it is cut into tiles; 0 for any number.
    tiled: int = 0

    @property
    def kept(self) -> tuple[Any, ...]:
        """What files of profiles go by: where nothing is tiled, the same as if nothing ever were."""
        return self if self.tiled else self[:-1]


def _tiled(config: Config) -> int:
    """As `assemble` cuts linear layers."""
    tiled = config.wherry.tile_linear and config.placement().parameters.partitioned
    return config.zero_optimization.stage3_max_live_parameters if tiled else 0


class Forecaster:
    """Estimates of one model on one machine for many configs; profiles are made once and kept.

    What of torch is needed to make one is imported then: profiles that a file has need none of it.
    """

    def __init__(
        self, source: Source, machine: Machine, ranks: int, sequence: int | None = None, grid: Grid = ALONE
    ) -> None:
        self.source = source
        self.machine = machine
        self.ranks = ranks
        self.grid = grid
        self.data_ranks = grid.data_ranks(ranks)
        self.sequence = sequence or source.sequence
        self._profiles: dict[_Key, Profile] = {}
        self._kept = KeptProfiles(source.key)
        self._whole: int | None = None
        # Models without values, each made once; their tensors belong to the profiler's one mode.
        self._models: dict[tuple[Grid, int], nn.Module] = {}
        self._profiler: Profiler | None = None
        self._mode: FakeTensorMode | None = None

    def exact(self, config: Config) -> Estimate:
        """From a profile of this very micro-batch."""
        return self._estimate(config, self.profile)

    def quick(self, config: Config) -> Estimate:
        """From profiles of other micro-batches, for searching: never below the exact one up to a micro-batch of 32."""
        return self._estimate(config, self._between, searching=True)

    def _estimate(
        self, config: Config, profile_of: Callable[[Config, int, Grid], Profile], *, searching: bool = False
    ) -> Estimate:
        micro = config.batch(self.data_ranks).micro
        subject = Subject(self.source.name, self.sequence, self._parameters())
        # The first stage has the embeddings and keeps the most activations, the last one has the head.
        stages = [replace(self.grid, stage=stage) for stage in sorted({0, self.grid.pipe - 1})]
        found = [
            estimate_profile(
                subject, profile_of(config, micro, grid), config, self.machine, self.ranks, grid, searching=searching
            )
            for grid in stages
        ]
        fullest = max(found, key=lambda each: each.tightest.share)
        slowest = max(found, key=lambda each: each.seconds or 0.0)
        return replace(fullest, time=slowest.time)

    def _parameters(self) -> int | None:
        """Those of the whole model, where ranks share it."""
        if self.grid.size == 1:
            return None
        if self.source.parameters is not None:
            return self.source.parameters(self.sequence)
        if self._whole is None:
            import torch

            with torch.device("meta"):
                model, _ = self.source.make(1, self.sequence)
            self._whole = sum(parameter.numel() for parameter in model.parameters())
        return self._whole

    def _between(self, config: Config, micro: int, grid: Grid) -> Profile:
        if not self.source.scales or micro == 1:
            return self.profile(config, micro, grid)
        return Line(self.profile(config, 1, grid), self.profile(config, FAR, grid)).at(micro)

    def profile(self, config: Config, micro: int, grid: Grid = ALONE) -> Profile:
        dtype = config.working_precision()
        recompute = Recompute.of(config, gpu=self.machine.gpus > 0, tensor=grid.tensor)
        key = _Key(micro, dtype, tuple(config.wherry.unit_classes), recompute, grid, _tiled(config))
        if key not in self._profiles:
            found = self._kept.read(self.sequence, *key.kept)
            if found is None:
                found = self._traced(key, config.working_dtype())
                self._kept.write(found, self.sequence, *key.kept)
            self._profiles[key] = found
        return self._profiles[key]

    def _traced(self, key: _Key, dtype: torch.dtype | None) -> Profile:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        from wherry.plan.trace import Profiler
        from wherry.plan.units import unit_sizes

        unknown = False
        source = self.source.share(key.grid, dtype)
        if self._mode is None:
            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
            self._profiler = Profiler(self.source.known, self._mode)
        assert self._profiler is not None

        def build(micro_batch: int) -> tuple[nn.Module, tuple[Any, ...], Any]:
            nonlocal unknown
            model, batch = self._made(source, key, micro_batch)
            if batch is None:
                unknown = True
                raise WherryError("the model's inputs are not known")
            return model, batch.args, batch.kwargs

        try:
            with told_by(f"{self.source.name}: a micro-batch of it fails"):
                return self._profiler.make(build, key.micro, dtype, key.unit_classes, key.recompute)
        except WherryError:
            if not unknown:
                raise
        except RuntimeError as error:
            if "overflowed" not in str(error):
                raise
            raise WherryError(
                f"{self.source.name}: no tensor can be as large as a micro-batch of {key.micro:,} samples of "
                f"{self.sequence:,} tokens makes it; give a smaller one"
            ) from error
        with torch.device("meta"):
            model, _ = source.make(key.micro, self.sequence)
        return Profile.of_sizes(unit_sizes(self._cut(model, key.tiled), key.unit_classes), key.micro)

    def _made(self, source: Source, key: _Key, micro: int) -> tuple[nn.Module, Batch | None]:
        """The model, which a profile leaves as it was, and a micro-batch."""
        if source.inputs is None:
            model, batch = source.make(micro, self.sequence)
            return self._cut(model, key.tiled), batch
        place = key.grid, key.tiled
        if place not in self._models:
            self._models[place] = self._cut(source.make(1, self.sequence)[0], key.tiled)
        model = self._models[place]
        return model, source.inputs(model, micro, self.sequence)

    def _cut(self, model: nn.Module, tiled: int) -> nn.Module:
        """With layers in tiles that may not have so many elements: what the source has made is left as it is."""
        if not tiled:
            return model
        from wherry.nn.tiled import tile_beyond
        from wherry.plan.trace import without_values

        assert self._mode is not None
        with self._mode:
            model = without_values(self._mode, model)
            tile_beyond(model, tiled)
        return model


def estimate(
    model_or_params: str | int | float | nn.Module | Callable[..., Any],
    config: Config | dict[str, Any] | str | None = None,
    machine: Machine | str | None = None,
    *,
    ranks: int | None = None,
    sequence: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> Estimate:
    """What training keeps and how long a step takes, without training, and without the model's memory.

    The model is a preset, a Hugging Face config or folder, `"module:callable"`, a callable that returns a model and the
    inputs of a micro-batch, a model (on the meta device, if it is large), or a number of parameters. `machine` is one
    of those that `wherry plan --machine` knows, or this one. `ranks` are all ranks; some of them may share the model.

        found = wherry.estimate("gpt2-1.5b", {"bf16": {"enabled": True}}, "4090")
        print(found.fits, found.tightest, found.seconds)
    """
    for name, value in (("ranks", ranks), ("sequence", sequence)):
        if value is not None and value < 1:
            raise WherryError(f"{name}: expected 1 or more, got {value}")
    resolved = config if isinstance(config, Config) else configs.load(config)
    if machine is None:
        where = this_machine(disk_folder(resolved))
    else:
        where = machine if isinstance(machine, Machine) else known(machine)
    ranks = ranks or where.ranks()
    where = where.holding(ranks)
    grid = Grid(tensor_parallel, pipeline_parallel)
    if isinstance(model_or_params, int | float):
        if not 1 <= model_or_params < math.inf:
            raise WherryError(f"parameters: expected 1 or more, got {model_or_params}")
        return estimate_count(int(model_or_params), resolved, where, ranks, grid)
    return Forecaster(find(model_or_params), where, ranks, sequence, grid).exact(resolved)
