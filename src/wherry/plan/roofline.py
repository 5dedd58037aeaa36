"""How long a step takes at best: each of the things that a step must move or compute, by the rate of what does it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wherry.placement import Tier
from wherry.plan.machine import Machine
from wherry.plan.peaks import Setting
from wherry.plan.profile import Profile

WORDS = {
    "compute": "computing",
    "gradients": "moving gradients",
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


def step_time(profile: Profile, setting: Setting, machine: Machine) -> StepTime:
    """The time of one accumulation window and its update on one rank, the others doing the same beside it."""
    together = machine.ranks_per_node(setting.ranks)
    # Ranks on a host share its rates; a GPU has its own.
    share = 1 if machine.gpus else together
    forward, backward = _compute(profile, setting, machine, share)
    times = setting.accumulation
    trained, everything, travelling = _elements(profile, setting)
    moved = _collective_bytes(profile, setting, trained, everything, travelling)
    link = machine.link if machine.nodes == 1 else min(machine.link, machine.network)
    terms = {
        "compute": times * (forward + backward),
        "gradients": _gradient_bytes(setting, trained) / (machine.device_stream / share),
        "collectives": moved / (link / share) if setting.ranks > 1 else 0.0,
        "up": 0.0,
        "down": 0.0,
        "update": 0.0,
        "disk": 0.0,
    }
    placement, cost, ranks = setting.placement, setting.cost, setting.ranks
    owned = trained / (ranks if placement.optimizer.partitioned else 1)
    state = cost.parameters + cost.optimizer
    # A master that is apart is not read with the working weight, which is only written.
    apart = cost.master >= 4
    touched = (state - cost.parameters if apart else state) + cost.gradients + state
    off = placement.optimizer.tier is not Tier.DEVICE
    if machine.gpus and off:
        terms["update"] = owned * touched / (machine.stream / together)
        terms["down"] = owned * cost.gradients / machine.pcie
        terms["up"] = owned * cost.parameters / machine.pcie
    else:
        # torch's own optimizer on a device makes a few passes; the host's kernel makes one.
        passes = 2.0 if machine.gpus else 1.0
        terms["update"] = passes * owned * touched / (machine.device_stream / share)
    if machine.gpus and placement.parameters.tier is not Tier.DEVICE:
        terms["up"] += 2 * times * everything * cost.parameters / ranks / machine.pcie
    terms["disk"] = _disk_seconds(setting, machine, owned, everything, together)
    return StepTime(times * forward, times * backward, terms, _overlapped(terms, times * forward, machine, off))


def _compute(profile: Profile, setting: Setting, machine: Machine, share: int) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward: each operation at the rate of what it waits for."""
    matrix = machine.matrix_fp32 if setting.cost.parameters == 4 else machine.matrix
    done = profile.operations
    seconds = np.maximum(done.flops / (matrix / share), done.bytes / (machine.device_stream / share))
    seconds = np.maximum(seconds, done.slow / (machine.slow / share))
    if machine.gpus:
        # A GPU is told what to do ahead of doing it: the longer of the two counts.
        total = max(float(seconds.sum()), machine.overhead * len(seconds))
        seconds = seconds * (total / max(float(seconds.sum()), 1e-12))
    else:
        seconds = seconds + machine.overhead
    backward = float(seconds[done.backward].sum())
    return float(seconds.sum()) - backward, backward


def _elements(profile: Profile, setting: Setting) -> tuple[int, int, int]:
    """Elements that are trained, all of them, and those that are gathered."""
    flats = [flat for unit in setting.flats(profile) for flat in unit]
    return (
        sum(flat.layout.numel for flat in flats if flat.trainable),
        sum(flat.layout.numel for flat in flats),
        sum(flat.layout.numel for flat in flats if not flat.resident),
    )


def _gradient_bytes(setting: Setting, trained: int) -> float:
    """Read and written where gradients go from autograd's tensors to the flat, and read for their norm."""
    copied = 2 * trained * setting.cost.gradients * setting.accumulation
    summed = trained * setting.cost.gradients / (setting.ranks if setting.placement.optimizer.partitioned else 1)
    return copied + summed


def _collective_bytes(profile: Profile, setting: Setting, trained: int, everything: int, travelling: int) -> float:
    """Bytes that a rank sends: gathers in forward and backward, reductions, and the gather after an update."""
    ranks, placement, cost, times = setting.ranks, setting.placement, setting.cost, setting.accumulation
    part = (ranks - 1) / ranks
    gathers = 2 * times * travelling * cost.parameters
    reductions = trained * setting.wire * (times if placement.gradients.partitioned else 1)
    if not placement.optimizer.partitioned:
        return part * (gathers + 2 * reductions)
    refresh = (everything - travelling) * cost.parameters
    return part * (gathers + reductions + refresh)


def _disk_seconds(setting: Setting, machine: Machine, owned: float, everything: int, together: int) -> float:
    """Reads and writes go on at the same time; weights are read twice for each micro-batch and written once."""
    read = written = 0.0
    if setting.placement.optimizer.tier is Tier.DISK:
        read = written = owned * setting.cost.optimizer * together
    if setting.placement.parameters.tier is Tier.DISK:
        share = everything * setting.cost.parameters / setting.ranks * together
        read += 2 * setting.accumulation * share
        written += share
    return max(read / machine.disk_read, written / machine.disk_write)


def _overlapped(terms: dict[str, float], forward: float, machine: Machine, update_off_device: bool) -> float:
    if not machine.gpus:
        # The cores that compute are those that copy and update; only the disk works beside them.
        busy = sum(value for name, value in terms.items() if name not in ("disk", "up", "down"))
        return max(busy, terms["disk"])
    device = max(terms["compute"] + terms["gradients"], terms["collectives"], terms["up"], terms["down"])
    if not update_off_device:
        return max(device + terms["update"], terms["disk"])
    # The update of a unit ends before its next forward: what the forward does not cover is waited for.
    return device + max(0.0, max(terms["update"], terms["disk"]) - forward)
