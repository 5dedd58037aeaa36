""" "auto" in a config, settled where the model, the ranks and the machine are at hand: in `wherry.initialize`."""

from __future__ import annotations

import copy
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.observe.memory import device_memory
from wherry.parallel.comm import Comm
from wherry.parallel.partition import is_dtensor, part_of
from wherry.plan.choose import ACCUMULATION, MICRO, OPTIMIZER, PARAM, RATIO, STAGE, TRAIN, Choice, choose
from wherry.plan.estimate import Estimate, answer_of_count
from wherry.plan.forecaster import Forecaster
from wherry.plan.grid import Grid
from wherry.plan.machines import Machine, known
from wherry.plan.model_source import Inputs, ModelSource
from wherry.plan.probe import disk_folder, state_folders, this_machine
from wherry.tiers.host import free_host_memory

PLACING = (STAGE, OPTIMIZER, PARAM)
# What is chosen by the time of a step.
TIMED = (RATIO, MICRO, ACCUMULATION, TRAIN)
# What is left to activations where nobody knows them.
FOR_STATES = 0.6


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
    tensor_ranks = 1 if tensor is None else tensor.size
    grid = Grid(tensor_ranks) if pipe is None else Grid(tensor_ranks, pipe.size, pipe.rank)
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
    for key, value in values.items():
        settled.add_note(f"{key}: auto, chosen to be {value!r}" + (f": {reasons[key]}" if key in reasons else ""))
    return settled


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
    nodes, folders = -(-everywhere // ranks_here), state_folders(config)
    if data is None:
        free = free_host_memory(ranks_here, config.wherry.host_memory)
        room = _room(free_on_gpu, ranks_here, nodes, free, _free(config, folders))
        choice = _by_states(model, config, everywhere, grid, wanted, room)
    else:
        machine = replace(this_machine(disk_folder(config, next(iter(folders), None))), nodes=nodes)
        machine = machine.with_host_memory(config.wherry.host_memory)
        machine = replace(machine, disk=_free(config, folders)) if folders else machine
        machine = replace(machine, gpu_memory=free_on_gpu) if free_on_gpu is not None else machine
        source = _source(model, data, collate or default_collate)
        forecaster = Forecaster(source, machine, everywhere, grid=grid)
        choice = choose(config, forecaster.quick, ranks, free=wanted, confirm=forecaster.exact)
    return choice.values, choice.reasons


def _by_states(
    model: nn.Module, config: Config, ranks: int, grid: Grid, wanted: frozenset[str], machine: Machine
) -> Choice:
    """What is chosen where nothing is known but the weights: by the formulas of the placement table."""
    mine = sum((part_of(p) if is_dtensor(p) else p).numel() for p in model.parameters())

    def answer(candidate: Config) -> Estimate:
        return answer_of_count(mine * grid.size, candidate, machine, ranks, grid, name=type(model).__name__)

    return choose(config, answer, grid.data_ranks(ranks), free=wanted, confirm=answer)


def _source(model: nn.Module, data: Dataset[Any], collate: Callable[[list[Any]], Any]) -> ModelSource:
    """Micro-batches of the first sample, for copies of the model."""
    mine, sample = _apart(model), data[0]

    def make(micro_batch: int, _: int) -> tuple[nn.Module, Inputs]:
        return mine, Inputs.of(collate([sample] * micro_batch))

    source = ModelSource(type(model).__name__, make)
    # Where ranks share the model, it is this rank's part already.
    return replace(source, part=lambda *_: source)


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


def _room(free_on_gpu: int | None, ranks_here: int, nodes: int, host: int, disk: int) -> Machine:
    """This machine by what is free on it for states. Its rates are nobody's: no step is timed."""
    on_gpu = free_on_gpu is not None
    return replace(
        known("a100"),
        name="this machine",
        gpus=ranks_here if on_gpu else 0,
        gpu_memory=int(FOR_STATES * (free_on_gpu or 0)),
        host_memory=int((1.0 if on_gpu else FOR_STATES) * host),
        disk=disk,
        nodes=nodes,
    )


def _apart(model: nn.Module) -> nn.Module:
    """The model, or if it is on the meta device a copy of it: what has memory is shared, and what has none is not.

    Fake tensors keep weak references to what they stand for, and a parameter that has any cannot get memory.
    """
    held = (*model.parameters(), *model.buffers())
    if not any(tensor.is_meta for tensor in held):
        return model
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held if not tensor.is_meta})
