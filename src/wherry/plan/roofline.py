"""How long a step takes at best: each of the things that a step must move or compute, by the rate of what does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wherry.placement import Tier
from wherry.plan.machine import Machine
from wherry.plan.memory import Cost
from wherry.plan.profile import ATTENTION, TANH, Operations, Profile
from wherry.plan.setting import Setting

# Bytes up to which an operation is one core's: torch shares out 32,768 elements or more, here of a sum in fp32.
ONE_CORE = 3 * 4 * 32768

WORDS = {
    "compute": "computing",
    "bubble": "the pipeline filling",
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
    times = setting.accumulation
    together = machine.ranks_per_node(setting.ranks * setting.grid.size)
    # Ranks on a host share its rates; a GPU has its own.
    share = 1 if machine.gpus else together
    forward, backward = _compute(profile, setting, machine, share)
    work = _Work.of(profile, setting)
    cost = setting.cost
    terms = {
        "compute": times * (forward + backward),
        "bubble": (setting.grid.pipe - 1) * (forward + backward),
        "gradients": _gradient_bytes(setting, work) / (machine.device_stream / share),
        "collectives": _collective_seconds(profile, setting, machine, work, share),
        "up": 0.0,
        "down": 0.0,
        "update": _passes(machine) * work.updated(setting.staying_cost, work.staying) / (machine.device_stream / share),
        "disk": 0.0,
    }
    state, weights = _disk_travel(setting, machine, work, together)
    sent = times * profile.sent
    activations = _Travel.of(machine, sent * together, sent * together) if profile.on_disk else _Travel()
    terms["disk"] = state.seconds + weights.seconds + activations.seconds
    handled = machine.disk_work * (state.bytes + weights.bytes + activations.bytes) / machine.cores
    if machine.gpus and setting.placement.optimizer.tier is not Tier.DEVICE:
        offloaded = work.updated(cost, work.offloaded) / (machine.stream / together)
        terms["update"] = max(terms["update"], offloaded)  # the device's part goes on beside the host's
        terms["down"] = work.offloaded * cost.gradients / machine.pcie
        terms["up"] = work.offloaded * cost.parameters / machine.pcie
    else:
        terms["update"] += _passes(machine) * work.updated(cost, work.offloaded) / (machine.device_stream / share)
    if machine.gpus and setting.placement.parameters.tier is not Tier.DEVICE:
        terms["up"] += 2 * setting.passes * work.everything * cost.parameters / setting.shards / machine.pcie
    if machine.gpus:
        terms["down"] += sent / machine.pcie
        terms["up"] += sent / machine.pcie
    forward, backward = times * forward, times * backward
    total = _total(terms, forward, backward, weights.seconds + activations.seconds, handled, machine, setting)
    return StepTime(forward, backward, terms, total)


def _passes(machine: Machine) -> float:
    """torch's own optimizer on a device makes a few passes over memory; the host's kernel makes one."""
    return 2.0 if machine.gpus else 1.0


@dataclass(frozen=True)
class _Work:
    """Elements: trained, all of them, those gathered, those on disk, and those that a rank updates."""

    trained: int
    everything: int
    travelling: int
    on_disk: int
    staying: float
    offloaded: float

    @classmethod
    def of(cls, profile: Profile, setting: Setting) -> _Work:
        placed = [each for unit in setting.flats(profile) for each in unit]
        trained = [each for each in placed if each.flat.trainable]
        share = setting.shards if setting.placement.optimizer.partitioned else 1
        staying = sum(each.layout.numel for each in trained if each.resting is setting.staying) / share
        total = sum(each.layout.numel for each in trained)
        return cls(
            total,
            sum(each.layout.numel for each in placed),
            sum(each.layout.numel for each in placed if each.travels),
            sum(each.layout.numel for each in placed if each.home is Tier.DISK),
            staying,
            total / share - staying,
        )

    @staticmethod
    def updated(cost: Cost, elements: float) -> float:
        """Bytes that an update of so many elements reads and writes."""
        state = cost.parameters + cost.optimizer
        # A master that is apart is not read with the working weight, which is only written.
        read = state - cost.parameters if cost.master >= 4 else state
        return elements * (read + cost.gradients + state)


def _compute(profile: Profile, setting: Setting, machine: Machine, share: int) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward: each operation at the rate of what it waits for."""
    done = profile.operations
    seconds = np.maximum(
        done.flops / (_products(machine, setting, done) / share), done.bytes / (_stream(machine, done.bytes) / share)
    )
    times = np.where(done.kind == TANH, machine.by_tanh, 1.0)
    seconds = np.maximum(seconds, times * done.slow / (machine.slow / share))
    if machine.gpus:
        # A GPU is told what to do ahead of doing it: the longer of the two counts.
        total = max(float(seconds.sum()), machine.overhead * len(seconds))
        seconds = seconds * (total / max(float(seconds.sum()), 1e-12))
    else:
        seconds = seconds + machine.overhead
        if machine.cores > share:
            seconds = seconds + machine.sharing * ((done.flops > 0) | (done.bytes > ONE_CORE))
        seconds = seconds * (machine.block_fp32 if setting.cost.parameters == 4 else machine.block)
    backward = float(seconds[done.backward].sum())
    return float(seconds.sum()) - backward, backward


def _products(machine: Machine, setting: Setting, done: Operations) -> np.ndarray:
    """The rate of each operation's products."""
    fp32 = setting.cost.parameters == 4
    matrix, parts = (machine.matrix_fp32, machine.attention_fp32) if fp32 else (machine.matrix, machine.attention)
    tokens, forward, backward = (np.array(column) for column in zip(*parts, strict=True))
    # A token's queries meet the keys of all others: flops for a byte tell how many they are. Of what is read and
    # written, four tensors of their size in the forward and eight in the backward, where they meet 2.5 times.
    size = setting.cost.parameters
    others = done.flops / np.maximum(done.bytes, 1.0) * np.where(done.backward, 0.8, 1.0) * size
    place, places = np.log(np.maximum(others, 1.0)), np.log(tokens)
    part = np.where(done.backward, np.interp(place, places, backward), np.interp(place, places, forward))
    return matrix * np.where(done.kind == ATTENTION, part, 1.0)


def _stream(machine: Machine, nbytes: np.ndarray) -> np.ndarray | float:
    """The rate of operations that read and write so many bytes: what fits in a cache was left there by the last one."""
    if not machine.cached:
        return machine.device_stream
    sizes, rates = zip(*machine.cached, strict=True)
    return np.interp(np.log(np.maximum(nbytes, 1.0)), np.log(sizes), rates)


def _gradient_bytes(setting: Setting, work: _Work) -> float:
    """Read and written where gradients go from autograd's tensors to the flat, and read for their norm."""
    copied = 2 * work.trained * setting.cost.gradients * setting.accumulation
    summed = work.trained * setting.cost.gradients / (setting.shards if setting.placement.optimizer.partitioned else 1)
    return copied + summed


def _collective_seconds(profile: Profile, setting: Setting, machine: Machine, work: _Work, share: int) -> float:
    """What a rank sends over the slowest link on the way: for its data-parallel group, and for the tensor's."""
    tensor = setting.grid.tensor
    # Ranks that cut matrices are neighbours; those that share the data come after them.
    inside = machine.nodes == 1
    link = machine.link if inside else min(machine.link, machine.network)
    near = machine.link if inside or tensor <= max(1, machine.gpus) else link
    seconds = 0.0

    def rate(ranks: int) -> float:
        return (machine.link if inside or ranks * tensor <= max(1, machine.gpus) else link) / share

    if setting.ranks > 1:
        sent = collective_bytes(setting, work.trained, work.everything, work.travelling)
        seconds += sent.within / rate(setting.shards) + sent.across / (link / share) + sent.near / rate(setting.node)
    if tensor > 1:
        seconds += 2 * (tensor - 1) / tensor * profile.joined * setting.accumulation / (near / share)
    return seconds


class Sent(NamedTuple):
    """Bytes that a rank sends within its group of data-parallel ranks, across the groups, and to those of its node."""

    within: float
    across: float = 0.0
    near: float = 0.0


def collective_bytes(setting: Setting, trained: int, everything: int, travelling: int) -> Sent:
    """What a rank sends for gathers in forward and backward, reductions, and the gather after an update.

    Across groups go sums of gradients; near, the gathers in backward of weights that a node has a second time.
    """
    placement, cost, times = setting.placement, setting.cost, setting.passes
    ranks = setting.shards if placement.optimizer.partitioned else setting.ranks
    replicas = setting.ranks // ranks
    part = (ranks - 1) / ranks
    gather, beside = times * travelling * cost.parameters, setting.node > 1
    gathers = gather if beside else 2 * gather
    reductions = trained * setting.wire * (times if placement.gradients.partitioned else 1)
    if not placement.optimizer.partitioned:
        return Sent(part * (gathers + 2 * reductions))
    refresh = (everything - travelling) * cost.parameters
    crossing = trained / ranks * setting.wire * (1 if setting.resting.sums_on_device else times)
    near = (setting.node - 1) / setting.node * gather if beside else 0.0
    return Sent(part * (gathers + reductions + refresh), 2 * (replicas - 1) / replicas * crossing, near)


class _Travel(NamedTuple):
    """What the disk does for the ranks of a node."""

    seconds: float = 0.0
    bytes: float = 0.0

    @classmethod
    def of(cls, machine: Machine, read: float, written: float) -> _Travel:
        """Reads and writes, which go on at the same time."""
        apart = max(read / machine.disk_read, written / machine.disk_write)
        both = (read + written) / machine.disk_both if machine.disk_both else 0.0
        return cls(max(apart, both), read + written)


def _disk_travel(setting: Setting, machine: Machine, work: _Work, together: int) -> tuple[_Travel, _Travel]:
    """Of optimizer state, and of weights, which are read twice for each pass of a window and written once."""
    state = weights = _Travel()
    if setting.placement.optimizer.tier is Tier.DISK:
        nbytes = work.offloaded * setting.cost.optimizer * together
        state = _Travel.of(machine, nbytes, nbytes)
    if work.on_disk:
        nbytes = work.on_disk * setting.cost.parameters / setting.shards * together
        weights = _Travel.of(machine, 2 * setting.passes * nbytes, nbytes)
    return state, weights


def _total(
    terms: dict[str, float],
    forward: float,
    backward: float,
    others: float,
    handled: float,
    machine: Machine,
    setting: Setting,
) -> float:
    """The terms as the engine overlaps them.

    `others` is what of the disk's time is not the update's; `handled` what it takes of the host's cores.
    """
    policy = setting.resting.policy
    # What an update may go on beside: it ends before the unit's next forward, and begins in the backward at best.
    beside = {"at_step": 0.0, "before_use": forward, "in_backward": forward + backward, "delayed": forward + backward}
    hidden = beside[policy]
    state = terms["disk"] - others
    if not machine.gpus:
        # The cores that compute are those that copy and update. The disk works beside them, and asks a little of them.
        busy = handled + sum(value for name, value in terms.items() if name not in ("disk", "up", "down"))
        late = max(state - hidden - terms["update"], terms["disk"] - busy)
        return busy + max(0.0, late)
    device = max(terms["compute"] + terms["gradients"], terms["collectives"], terms["up"], terms["down"])
    device += terms["bubble"]
    if setting.placement.optimizer.tier is Tier.DEVICE:
        return max(device + terms["update"], terms["disk"])
    return max(device + max(0.0, max(terms["update"], state) - hidden), terms["disk"])
