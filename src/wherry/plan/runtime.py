""" "auto" in a config, settled where the model, the ranks and the machine are at hand: in `wherry.initialize`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
from wherry.plan.choose import ACCUMULATION, MICRO, OPTIMIZER, PARAM, STAGE, TRAIN, choose
from wherry.plan.estimate import Estimate, Subject, estimate
from wherry.plan.machine import Machine
from wherry.plan.probe import this_machine
from wherry.plan.profile import Line, Profile, Recompute
from wherry.plan.trace import Profiler
from wherry.plan.units import unit_sizes

PLACING = (STAGE, OPTIMIZER, PARAM)
SIZES = (MICRO, ACCUMULATION, TRAIN)
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
) -> Config:
    """The config with its "auto" stage, tiers and batch sizes chosen, by rank 0 for all.

    With `data` a micro-batch is profiled on fake tensors, and the micro-batch is chosen too. Without it the states are
    placed so that they leave room for activations, and batch sizes keep their defaults.
    """
    wanted = frozenset(key for key in (*PLACING, *(SIZES if data is not None else ())) if key in config.auto)
    if not wanted:
        return config
    chosen: tuple[dict[str, Any], dict[str, str]] | str = "rank 0 chooses"
    if comm.rank == 0:
        try:
            chosen = _choose(model, config, comm.size, device, wanted, ranks_here, data, collate)
        except WherryError as error:
            chosen = str(error)
    told = comm.gather_objects(chosen)[0]
    if isinstance(told, str):
        raise WherryError(told)
    values, reasons = told
    settled = configs.load(config, overrides=values)
    settled._notes += [
        f"{key}: auto, chosen to be {value!r}" + (f": {reasons[key]}" if key in reasons else "")
        for key, value in values.items()
    ]
    return settled


def _choose(
    model: nn.Module,
    config: Config,
    ranks: int,
    device: torch.device,
    wanted: frozenset[str],
    ranks_here: int,
    data: Dataset[Any] | None,
    collate: Callable[[list[Any]], Any] | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    nodes = max(1, ranks // ranks_here)
    if data is None:
        machine, profiles = _room(device, ranks_here, nodes), _by_weights(model, config)
    else:
        machine = replace(this_machine(), nodes=nodes)
        profiles = _by_batches(model, config, data, collate or default_collate)

    def answer(candidate: Config) -> Estimate:
        found = profiles(candidate.batch(ranks).micro)
        return estimate(Subject(type(model).__name__), found, candidate, machine, ranks)

    choice = choose(config, answer, ranks, free=wanted)
    return choice.values, choice.reasons


def _room(device: torch.device, ranks_here: int, nodes: int) -> Machine:
    """This machine by what is free on it for states. No rate is asked for where no step is timed."""
    on_device = device_memory(device)
    names = ("matrix", "matrix_fp32", "device_stream", "slow", "stream", "pcie", "disk_read", "disk_write")
    rates = dict.fromkeys((*names, "link", "network"), 1.0)
    return Machine(
        name="this machine",
        gpus=ranks_here if on_device is not None else 0,
        gpu_memory=int(FOR_STATES * on_device.free) if on_device is not None else 0,
        host_memory=int((1.0 if on_device is not None else FOR_STATES) * host_memory().available),
        disk=0,
        nodes=nodes,
        **rates,  # type: ignore[arg-type]
    )


def _by_weights(model: nn.Module, config: Config) -> Callable[[int], Profile]:
    units = unit_sizes(model, config.wherry.unit_classes)
    return lambda micro: Profile.of_sizes(units, micro)


def _by_batches(
    model: nn.Module, config: Config, data: Dataset[Any], collate: Callable[[list[Any]], Any]
) -> Callable[[int], Profile]:
    """Profiles of micro-batches of the first sample, on copies of the model without values."""
    sample = data[0]

    def build(micro: int) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        assert isinstance(mode, FakeTensorMode)
        with FakeCopyMode(mode):
            mine = copy.deepcopy(model)
        batch = _faked(mode, collate([sample] * micro))
        if isinstance(batch, Mapping):
            return mine, (), batch
        return mine, tuple(batch) if isinstance(batch, list | tuple) else (batch,), {}

    made: dict[int, Profile] = {}
    profiler = Profiler(known=False)

    def of(micro: int) -> Profile:
        if micro not in made:
            made[micro] = profiler.make(
                build, micro, config.working_dtype(), tuple(config.wherry.unit_classes), Recompute.of(config)
            )
        return made[micro]

    return lambda micro: of(micro) if micro in (1, FAR) else Line(of(1), of(FAR)).at(micro)


def _faked(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if is_fake(value) else mode.from_tensor(value)
    if isinstance(value, Mapping):
        return {key: _faked(mode, item) for key, item in value.items()}
    return type(value)(_faked(mode, item) for item in value) if isinstance(value, list | tuple) else value
