"""What rests where: bytes of each state on each tier, as the placement promises and as they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from wherry.observe.memory import format_bytes, free_on_gpu, host_memory, out_of_memory
from wherry.offload import Offload
from wherry.placement import Tier, place_name
from wherry.sharding.gradients import Gradients
from wherry.sharding.unit import Flat, Unit
from wherry.sharding.weights import Gatherer
from wherry.update.pipeline import Updater


class MemoryRow(NamedTuple):
    """Bytes of one state on one tier, on this rank: as the placement table promises, and as they are.

    What comes and goes within a step ("gathered", and what is "read" of a state on disk) has the most that may be there
    as its promise.
    """

    state: str
    tier: str
    bytes_expected: int
    bytes_actual: int


def explain_shortage(
    error: BaseException,
    phase: str,
    device: torch.device,
    held: Callable[[], list[MemoryRow]],
    policy: str,
    micro_batch: int,
) -> None:
    """Add to an error of memory that a forward or backward ran out of what takes it, and what to do.

    `policy` is that of the activations.
    """
    if not out_of_memory(error):
        return
    gpu = device.type == "cuda"
    place = "device" if gpu else "host"
    free = free_on_gpu(device) if gpu else host_memory().available
    asked = re.search(r"tried to allocate ([\d.]+) ?(\w+)", str(error), re.IGNORECASE)
    wanted = f"asked for {_size(*asked.groups())} more" if asked is not None else "needs more"
    states = ", ".join(
        f"{row.state} {format_bytes(row.bytes_actual)} on {place_name(row.tier, gpu=gpu)}"
        for row in held()
        if row.bytes_actual
    )
    away = '"cpu_checkpointing": true' if gpu else '"nvme_path": "/a/folder"'
    recompute = '"policy": "recompute"' + (f", {away}" if policy != "none" else "")
    smaller = f"train_micro_batch_size_per_gpu {max(1, micro_batch // 2)} with more gradient_accumulation_steps"
    error.add_note(
        f"wherry: {phase} {wanted}, and {format_bytes(free)} are free on this {place}. States of the engine take: "
        f"{states}; the rest are activations and what the model makes. What takes less, in the config: "
        f'"activation_checkpointing": {{{recompute}}} (now {policy}; "offload" puts activations away until backward, '
        f'with "nvme_path" on a disk)'
        + (f"; {smaller} (now {micro_batch})" if micro_batch > 1 else "; shorter samples")
        + "; or states elsewhere, with a higher zero_optimization.stage, offload_optimizer and offload_param. "
        "`wherry plan` tells what fits"
    )


def _size(number: str, unit: str) -> str:
    return format_bytes(float(number)) if unit == "bytes" else f"{number} {unit}"


def rows(
    units: list[Unit],
    gatherer: Gatherer,
    gradients: Gradients,
    updater: Updater | None,
    offload: Offload,
    away: Mapping[str, int],
) -> list[MemoryRow]:
    """One row for each state and tier that it rests on. `away`: bytes of states that were sent from the device."""
    flats = [flat for unit in units for flat in unit.flats]
    found = [
        *_parameters(flats, offload),
        _gathered(units, gatherer),
        *_gradients(gradients, offload),
        *_optimizer(updater),
    ]
    return list(_without(found, away)) if away else found


def _without(found: list[MemoryRow], away: Mapping[str, int]) -> Iterator[MemoryRow]:
    for row in found:
        if row.tier != str(Tier.DEVICE) or row.state not in away:
            yield row
            continue
        yield row._replace(bytes_actual=max(0, row.bytes_actual - away[row.state]))
        yield MemoryRow(f"{row.state} away", str(Tier.HOST), away[row.state], away[row.state])


def _tier_of(flat: Flat) -> Tier:
    if flat.home is None:
        return Tier.DEVICE
    return Tier.DISK if flat.home.on_disk else Tier.HOST


def _parameters(flats: list[Flat], offload: Offload) -> list[MemoryRow]:
    owed: defaultdict[Tier, int] = defaultdict(int)
    held: defaultdict[Tier, int] = defaultdict(int)
    for flat in flats:
        tier = _tier_of(flat)
        owed[tier] += flat.nbytes if flat.resident else flat.shard_nbytes
        held[tier] += flat.shard_nbytes if tier is Tier.DISK else flat.resting_nbytes
        if flat.secondary is not None:
            owed[Tier.DEVICE] += flat.secondary.nbytes
            held[Tier.DEVICE] += flat.secondary.nbytes
    found = [MemoryRow("parameters", str(tier), owed[tier], held[tier]) for tier in Tier if tier in owed]
    if Tier.DISK in owed:
        on_disk = [flat for flat in flats if _tier_of(flat) is Tier.DISK]
        cached = sum(flat.resting_nbytes for flat in on_disk)
        found.append(MemoryRow("parameters read", str(Tier.HOST), offload.weights_read(on_disk), cached))
    return found


def _gathered(units: list[Unit], gatherer: Gatherer) -> MemoryRow:
    """Units that others use too stay through a step; beside them is the unit at work, and what is gathered ahead."""
    travelling = [flat for unit in units for flat in unit.travelling]
    stay = sum(flat.layout.numel for unit in units if unit.shared for flat in unit.travelling)
    largest = max((sum(f.layout.numel for f in unit.travelling) for unit in units if not unit.shared), default=0)
    room = max(0, gatherer.live_limit - stay - largest)
    ahead = min(room, max(largest, gatherer.look_ahead))
    most = min(stay + largest + ahead, sum(flat.layout.numel for flat in travelling))
    width = max((flat.dtype.itemsize for flat in travelling), default=0)
    whole = sum(flat.elastic.nbytes for flat in travelling)
    return MemoryRow("gathered", str(Tier.DEVICE), most * width, whole)


def _gradients(gradients: Gradients, offload: Offload) -> list[MemoryRow]:
    device = sum(g.device_nbytes for g in gradients.all)
    host = sum(g.host_nbytes for g in gradients.all)
    owed_device = sum(
        (g.flat.layout.shard_numel if g.partitioned else g.flat.layout.numel) * g.dtype.itemsize
        for g in gradients.all
        if g.keeps
    )
    owed_host = sum(
        g.flat.layout.shard_numel * g.owned_dtype.itemsize for g in gradients.all if not g.stays and not g.brief
    )
    if offload.policy.when == "delayed":  # the copies that late updates read
        owed_host += sum(g.flat.layout.shard_numel * g.owned_dtype.itemsize for g in gradients.all)
    found = [MemoryRow("gradients", str(Tier.DEVICE), owed_device, device)]
    if owed_host or host:
        found.append(MemoryRow("gradients", str(Tier.HOST), owed_host, host))
    return found


def _optimizer(updater: Updater | None) -> list[MemoryRow]:
    if updater is None:
        return []
    states, policy = updater.states, updater.policy
    held, owed = states.nbytes(), states.expected_nbytes()
    found = [MemoryRow("optimizer", str(tier), owed[tier], held[tier]) for tier in Tier if tier in held]
    if Tier.DISK in held:
        host, read = str(Tier.HOST), states.host_bytes()
        found.append(MemoryRow("optimizer read", host, states.expected_host_bytes(policy.depth), read))
        waiting = states.expected_waiting_bytes() if policy.when == "delayed" else 0
        if waiting:
            found.append(MemoryRow("parameters to come", host, waiting, states.waiting_bytes()))
    return found
