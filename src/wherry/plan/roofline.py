"""How long a step takes at best: what a dry run has counted, by the rates of what computes and moves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wherry.plan.counts import TENSOR, Counts
from wherry.plan.grid import Grid
from wherry.plan.machines import Machine

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.plan.operations import Operation

WORDS = {
    "compute": "computing",
    "bubble": "the pipeline filling",
    "collectives": "collectives",
    "up": "host to device",
    "down": "device to host",
    "update": "the update",
    "disk": "the disk",
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update: each term by itself, and all of them as the engine overlaps them."""

    forward: float
    backward: float
    terms: dict[str, float]
    total: float

    @property
    def limit(self) -> str:
        """The term that takes longest."""
        return max(self.terms, key=self.terms.__getitem__)

    @property
    def limited_by(self) -> str:
        return WORDS[self.limit]


class Computing(NamedTuple):
    """Seconds of all forwards and backwards of a window."""

    forward: float
    backward: float


def computing(operations: Mapping[Operation, float], machine: Machine, *, fp32: bool, share: int = 1) -> Computing:
    """Each operation at the rate of what it waits for. `share` ranks have a host's rates together."""
    if not operations:
        return Computing(0.0, 0.0)
    flops, nbytes, slow, backward, attention = np.array(list(operations), dtype=float).T
    times = np.array(list(operations.values()), dtype=float)
    matrix, parts = (machine.matrix_fp32, machine.attention_fp32) if fp32 else (machine.matrix, machine.attention)
    reached = np.where(attention > 0, np.where(backward > 0, parts[1], parts[0]), 1.0)
    seconds = np.maximum(flops / (matrix * reached), nbytes / machine.device_stream)
    seconds = np.maximum(seconds, slow / machine.slow) * share
    if machine.gpus:
        # A GPU is told what to do ahead of doing it: the longer of the two counts.
        busy = float((times * seconds).sum())
        seconds = seconds * (max(busy, machine.overhead * float(times.sum())) / max(busy, 1e-12))
    else:
        seconds = (seconds + machine.overhead) * (machine.block_fp32 if fp32 else machine.block)
    seconds = times * seconds
    later = float(seconds[backward > 0].sum())
    return Computing(float(seconds.sum()) - later, later)


def step_time(counts: Counts, work: Computing, config: Config, machine: Machine, ranks: int, grid: Grid) -> StepTime:
    """The time of one window and its update on one rank of `ranks`, the others doing the same beside it."""
    together = machine.ranks_per_node(ranks)
    # Ranks on a host share its rates; a GPU has its own.
    share = 1 if machine.gpus else together
    accumulation = config.batch(grid.data_ranks(ranks)).accumulation
    updated, on_device = _updated(counts, config, grid.data_ranks(ranks))
    update = (2.0 if machine.gpus else 1.0) * on_device / (machine.device_stream / share)
    state, others = _disk_travel(counts, machine, together)
    moved = counts.moved if machine.gpus else {}
    terms = {
        "compute": work.forward + work.backward,
        "bubble": (grid.pipe - 1) * (work.forward + work.backward) / accumulation,
        "collectives": _collective_seconds(counts.bytes, config, machine, ranks, grid) * share,
        "up": moved.get("up", 0.0) / machine.pcie,
        "down": moved.get("down", 0.0) / machine.pcie,
        # The device's part goes on beside the host's.
        "update": max(update, updated / (machine.stream / together)),
        "disk": state + others,
    }
    total = _total(terms, work, state, config, machine)
    return StepTime(work.forward, work.backward, terms, total)


def _updated(counts: Counts, config: Config, data_ranks: int) -> tuple[float, float]:
    """Bytes that a rank's updates read and write: of states off the device, and on it.

    Each state is read and written, gradients are read, and working weights are read and written. torch's own optimizer
    on a GPU makes a few passes over memory; the host's kernel makes one.
    """
    states = {tier: nbytes for (state, tier), nbytes in counts.states.items() if state == "optimizer" and nbytes}
    partitioned = config.placement().optimizer.partitioned
    elements = counts.trained / (config.shard_ranks(data_ranks) if partitioned else 1)
    width = 4 if is_fp32(config) else 2
    whole = sum(states.values())
    moved = {tier: 2 * nbytes + 3 * width * elements * nbytes / whole for tier, nbytes in states.items()}
    return moved.get("host", 0.0) + moved.get("disk", 0.0), moved.get("device", 0.0)


def is_fp32(config: Config) -> bool:
    return config.working_precision() in (None, "fp32")


def _collective_seconds(nbytes: Mapping[str, float], config: Config, machine: Machine, ranks: int, grid: Grid) -> float:
    """What a rank sends over the slowest link on the way, in each group of ranks that it is in."""
    data, tensor = grid.data_ranks(ranks), grid.tensor
    # Ranks that cut matrices are neighbours; those that share the data come after them.
    inside = machine.nodes == 1
    far = machine.link if inside else min(machine.link, machine.network)

    def near(group: int) -> float:
        """The rate among so many ranks that follow each other."""
        return machine.link if inside or group <= max(1, machine.gpus) else far

    seconds = 0.0
    for name, sent in nbytes.items():
        operation, _, among = name.partition(" ")
        words = among.split()
        if f" {among}" == TENSOR:
            group, rate = tensor, near(tensor)
        elif words and words[0] == "across":
            group, rate = data // config.shard_ranks(data), far
        else:
            group = int(words[-1]) if words else data
            rate = near(group * tensor)
        seconds += (2 if operation == "all_reduce" else 1) * (group - 1) / max(1, group) * sent / rate
    return seconds


def _disk_travel(counts: Counts, machine: Machine, together: int) -> tuple[float, float]:
    """Seconds of a node's disk for optimizer state, which is read and written once, and for all else."""
    state = counts.states.get(("optimizer", "disk"), 0.0)
    read, written = (max(0.0, counts.moved[way] - state) for way in ("read", "written"))

    def seconds(read: float, written: float) -> float:
        """Reads and writes go on at the same time."""
        apart = max(read / machine.disk_read, written / machine.disk_write)
        return together * max(apart, (read + written) / machine.disk_both if machine.disk_both else 0.0)

    return seconds(state, state), seconds(read, written)


def _hidden(work: Computing, config: Config) -> float:
    """Seconds that an update may go on beside: it ends before the unit's next forward, and begins in the backward at
    best."""
    policy = config.wherry.update_policy
    if policy == "auto":
        policy = "before_use" if config.gradient_clipping > 0 or config.scales_loss() else "in_backward"
    beside = {"at_step": 0.0, "before_use": work.forward}
    return beside.get(policy, work.forward + work.backward)


def _total(terms: dict[str, float], work: Computing, state: float, config: Config, machine: Machine) -> float:
    """The terms as the engine overlaps them. `state` is the disk's time for the update."""
    on_device = config.placement().optimizer.tier.value == "device"
    hidden = 0.0 if on_device else _hidden(work, config)
    if not machine.gpus:
        # The cores that compute are those that copy and update, and the disk works beside them.
        busy = sum(value for name, value in terms.items() if name not in ("disk", "up", "down"))
        return busy + max(0.0, state - hidden - terms["update"], terms["disk"] - busy)
    device = max(terms["compute"], terms["collectives"], terms["up"], terms["down"]) + terms["bubble"]
    if on_device:
        return max(device + terms["update"], terms["disk"])
    return max(device + max(0.0, max(terms["update"], state) - hidden), terms["disk"])
