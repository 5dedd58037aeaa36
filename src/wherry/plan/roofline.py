"""How long a step takes at best: what a dry run has counted, by the rates of what computes and moves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wherry.placement import Tier
from wherry.plan.counts import TENSOR, Counts
from wherry.plan.grid import Grid
from wherry.plan.machines import Machine
from wherry.update.policy import update_policy

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.plan.operations import Operation

# The parts of the rate of matrix products that attention's reach.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.6, 0.5
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
    """Seconds of all forwards and backwards of a window, and of the products of matrices that its update makes."""

    forward: float
    backward: float
    update: float = 0.0


def computing(operations: Mapping[Operation, float], machine: Machine, *, fp32: bool, share: int = 1) -> Computing:
    """Each operation at the rate of what it waits for. `share` ranks have a host's rates together."""
    if not operations:
        return Computing(0.0, 0.0)
    flops, nbytes, backward, attention, update = np.array(list(operations), dtype=float).T
    times = np.array(list(operations.values()), dtype=float)
    reached = np.where(attention > 0, np.where(backward > 0, ATTENTION_BACKWARD, ATTENTION_FORWARD), 1.0)
    # Those of updates are in bf16, as Muon's are.
    matrix = reached * np.where((update == 0) & fp32, machine.matrix_fp32, machine.matrix)
    seconds = np.maximum(flops / matrix, nbytes / machine.device_stream) * share
    if machine.gpus:
        # A GPU is told what to do ahead of doing it: the longer of the two counts.
        busy = float((times * seconds).sum())
        seconds = seconds * (max(busy, machine.overhead * float(times.sum())) / max(busy, 1e-12))
    else:
        seconds = seconds + machine.overhead
    seconds = times * seconds
    later, last = (float(seconds[part > 0].sum()) for part in (backward, update))
    return Computing(float(seconds.sum()) - later - last, later, last)


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
        "update": max(update, updated / (machine.stream / together)) + work.update,
        "disk": state + others,
    }
    total = _total(terms, work, state, config, machine)
    return StepTime(terms, total)


def _updated(counts: Counts, config: Config, data_ranks: int) -> tuple[float, float]:
    """Bytes that a rank's updates read and write: on the host, and on the device.

    Each state is read and written, gradients are read, and working weights are read and written. torch's own optimizer
    on a GPU makes a few passes over memory; the host's kernel makes one.
    """
    states = {tier: nbytes for (state, tier), nbytes in counts.states.items() if state == "optimizer" and nbytes}
    partitioned = config.placement().optimizer.partitioned
    elements = counts.trained / (config.shard_ranks(data_ranks) if partitioned else 1)
    width = 4 if is_fp32(config) else 2
    whole = sum(states.values())
    moved = {tier: 2 * nbytes + 3 * width * elements * nbytes / whole for tier, nbytes in states.items()}
    elsewhere = moved.get("host", 0.0) + moved.get("disk", 0.0)
    resting = states.get("host", 0.0) + states.get("disk", 0.0)
    streamed = min(1.0, counts.moved.get("streamed", 0.0) / max(1.0, resting)) * elsewhere
    return elsewhere - streamed, moved.get("device", 0.0) + streamed


def is_fp32(config: Config) -> bool:
    return config.working_precision() in (None, "fp32")


def _collective_seconds(nbytes: Mapping[str, float], config: Config, machine: Machine, ranks: int, grid: Grid) -> float:
    """What a rank sends over the slowest link on the way, in each group of ranks that it is in."""
    data, tensor = grid.data_ranks(ranks), grid.tensor
    # Ranks that cut matrices are neighbors; those that share the data come after them.
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
        return together * max(read / machine.disk_read, written / machine.disk_write)

    return seconds(state, state), seconds(read, written)


def _total(terms: dict[str, float], work: Computing, state: float, config: Config, machine: Machine) -> float:
    """The terms as the engine overlaps them. `state` is the disk's time for the update."""
    placement = config.placement()
    # An update ends before the unit's next forward; at best it begins in the backward.
    when = update_policy(config, placement, shared=not machine.gpus).when
    hidden = {"at_step": 0.0, "before_use": work.forward}.get(when, work.forward + work.backward)
    if not machine.gpus:
        # The cores that compute are those that copy and update, and the disk works beside them.
        busy = sum(value for name, value in terms.items() if name not in ("disk", "up", "down"))
        return busy + max(0.0, state - hidden - terms["update"], terms["disk"] - busy)
    device = max(terms["compute"], terms["collectives"], terms["up"], terms["down"]) + terms["bubble"]
    if placement.optimizer.tier is Tier.DEVICE:
        return max(device + terms["update"], terms["disk"])
    return max(device + max(0.0, max(terms["update"], state) - hidden), terms["disk"])
