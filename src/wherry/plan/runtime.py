""" "auto" in a config, settled where the model, the ranks and the machine are at hand: in `wherry.initialize`."""

from __future__ import annotations

import copy
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils.data import Dataset, default_collate

from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.observe.memory import device_memory, host_memory
from wherry.parallel.comm import Comm
from wherry.plan.choose import ACCUMULATION, MICRO, OPTIMIZER, PARAM, RATIO, STAGE, TRAIN, choose
from wherry.plan.estimate import Estimate, Subject, estimate
from wherry.plan.grid import Grid
from wherry.plan.machine import Machine
from wherry.plan.probe import disk_folder, this_machine
from wherry.plan.profile import Line, Profile, Recompute
from wherry.plan.trace import Profiler
from wherry.plan.units import unit_sizes

PLACING = (STAGE, OPTIMIZER, PARAM)
# What is chosen by the time of a step.
TIMED = (RATIO, MICRO, ACCUMULATION, TRAIN)
# What is left to activations where nobody knows them.
FOR_STATES = 0.6
FAR = 8


def settle(
    model: nn.Module,
    config: Config,
    comm: Comm,
    device: torch.device,
    *,
    ranks_here: int,
    data: Dataset[Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    tensor: Comm | None = None,
    pipe: Comm | None = None,
) -> Config:
    """The config with its "auto" stage, tiers, ratio and batch sizes chosen, by rank 0 of `comm` for all.

    With `data` a micro-batch is profiled on fake tensors, and the micro-batch is chosen too. Without it the states are
    placed so that they leave room for activations, and ratio and batch sizes keep their defaults. `comm` are the ranks
    that share the data, and the model is the part of it that they have; the ranks that share the model with this one,
    along `tensor` and `pipe`, need room beside it where they are on its node. Stages of a pipeline have one batch size
    between them, and no stage has the inputs of the others: there `data` tells nothing.
    """
    if pipe is not None and pipe.size > 1:
        data = None
    wanted = frozenset(key for key in (*PLACING, *(TIMED if data is not None else ())) if key in config.auto)
    if not wanted:
        return config
    grid = _grid(tensor, pipe)
    free = _free_on_gpus(device, comm)
    chosen: tuple[dict[str, Any], dict[str, str]] | str = "rank 0 chooses"
    if comm.rank == 0:
        try:
            chosen = _choose(model, config, comm.size, grid, free, wanted, ranks_here, data, collate)
        except WherryError as error:
            chosen = str(error)
    told = comm.gather_objects(chosen)[0]
    if tensor is not None:
        told = tensor.gather_objects(told)[0]  # parts of the same weights are placed alike
    if isinstance(told, str):
        raise WherryError(told)
    values, reasons = told
    settled = configs.load(config, overrides=values)
    settled._notes += [
        f"{key}: auto, chosen to be {value!r}" + (f": {reasons[key]}" if key in reasons else "")
        for key, value in values.items()
    ]
    return settled


def _grid(tensor: Comm | None, pipe: Comm | None) -> Grid:
    if pipe is None:
        return Grid(tensor.size if tensor is not None else 1)
    return Grid(tensor.size if tensor is not None else 1, pipe.size, pipe.rank)


def _choose(
    model: nn.Module,
    config: Config,
    ranks: int,
    grid: Grid,
    free_on_gpu: int | None,
    wanted: frozenset[str],
    ranks_here: int,
    data: Dataset[Any] | None,
    collate: Callable[[list[Any]], Any] | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    everywhere = ranks * grid.size
    nodes, folders = -(-everywhere // ranks_here), _folders(config)
    if data is None:
        machine = _room(free_on_gpu, ranks_here, nodes, _free(config, folders))
        profiles: _Profiles = _ByWeights(model, config)
    else:
        machine = replace(this_machine(disk_folder(config, next(iter(folders), None))), nodes=nodes)
        machine = replace(machine, disk=_free(config, folders)) if folders else machine
        machine = replace(machine, gpu_memory=free_on_gpu) if free_on_gpu is not None else machine
        how = Recompute.of(config, gpu=machine.gpus > 0, tensor=grid.tensor)
        profiles = _ByBatches(model, config, data, collate or default_collate, how)

    def answer(candidate: Config, profile_of: Callable[[int], Profile]) -> Estimate:
        found = profile_of(candidate.batch(ranks).micro)
        return estimate(Subject(type(model).__name__), found, candidate, machine, everywhere, grid, searching=True)

    quick, exact = (partial(answer, profile_of=each) for each in (profiles.quick, profiles.exact))
    choice = choose(config, quick, ranks, free=wanted, confirm=exact)
    return choice.values, choice.reasons


def _folders(config: Config) -> list[str]:
    """Where the config lets states rest on disk."""
    zero = config.zero_optimization
    given = (zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path)
    paths = ([each] if isinstance(each, str) else each for each in given if each is not None)
    return [folder for folders in paths for folder in folders]


def _free(config: Config, folders: Sequence[str]) -> int:
    """Bytes that are free for what is spread evenly over them."""
    places = [place for folder in folders if (place := disk_folder(config, folder)) is not None]
    disks = Counter(os.stat(place).st_dev for place in places)
    free = (shutil.disk_usage(place).free * len(places) // disks[os.stat(place).st_dev] for place in places)
    return min(free, default=0)


def _free_on_gpus(device: torch.device, comm: Comm) -> int | None:
    """What the rank with the least has free on its GPU: each asks its own. None where ranks compute on the host."""
    mine = device_memory(device)
    told = comm.gather_objects(None if mine is None else mine.free)
    return min((free for free in told if free is not None), default=None)


def _room(free_on_gpu: int | None, ranks_here: int, nodes: int, disk: int) -> Machine:
    """This machine by what is free on it for states. No rate is asked for where no step is timed."""
    names = ("matrix", "matrix_fp32", "device_stream", "slow", "stream", "pcie", "disk_read", "disk_write")
    rates = dict.fromkeys((*names, "link", "network"), 1.0)
    return Machine(
        name="this machine",
        gpus=ranks_here if free_on_gpu is not None else 0,
        gpu_memory=int(FOR_STATES * free_on_gpu) if free_on_gpu is not None else 0,
        host_memory=int((1.0 if free_on_gpu is not None else FOR_STATES) * host_memory().available),
        disk=disk,
        nodes=nodes,
        **rates,  # type: ignore[arg-type]
    )


class _Profiles(Protocol):
    """Profiles of micro-batches: exact ones, and quick ones to search with."""

    def exact(self, micro: int) -> Profile: ...

    def quick(self, micro: int) -> Profile: ...


class _ByWeights:
    """Nothing is known but the weights."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self._units = unit_sizes(model, config.wherry.unit_classes)

    def exact(self, micro: int) -> Profile:
        return Profile.of_sizes(self._units, micro)

    quick = exact


class _ByBatches:
    """Of micro-batches of the first sample, on copies of the model without values."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        data: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        recompute: Recompute | None,
    ) -> None:
        self._model = _apart(model)
        self._config = config
        self._sample = data[0]
        self._collate = collate
        self._recompute = recompute
        self._profiler = Profiler(known=False)
        self._made: dict[int, Profile] = {}

    def exact(self, micro: int) -> Profile:
        if micro not in self._made:
            dtype, classes = self._config.working_dtype(), tuple(self._config.wherry.unit_classes)
            self._made[micro] = self._profiler.make(self._build, micro, dtype, classes, self._recompute)
        return self._made[micro]

    def quick(self, micro: int) -> Profile:
        """On the line through two. Beyond them it may be below the truth: peaks grow faster where batches are large."""
        return self.exact(micro) if micro in (1, FAR) else Line(self.exact(1), self.exact(FAR)).at(micro)

    def _build(self, micro: int) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        assert isinstance(mode, FakeTensorMode)
        with FakeCopyMode(mode):
            mine = copy.deepcopy(self._model)
        batch = _faked(mode, self._collate([self._sample] * micro))
        if isinstance(batch, Mapping):
            return mine, (), batch
        return mine, tuple(batch) if isinstance(batch, list | tuple) else (batch,), {}


def _apart(model: nn.Module) -> nn.Module:
    """The model, or if it is on the meta device a copy of it: what has memory is shared, and what has none is not.

    Fake tensors keep weak references to what they stand for, and a parameter that has any cannot get memory.
    """
    held = (*model.parameters(), *model.buffers())
    if not any(tensor.is_meta for tensor in held):
        return model
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held if not tensor.is_meta})


def _faked(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if is_fake(value) else mode.from_tensor(value)
    if isinstance(value, Mapping):
        return {key: _faked(mode, item) for key, item in value.items()}
    return type(value)(_faked(mode, item) for item in value) if isinstance(value, list | tuple) else value
