"""What rests where: bytes of each state on each tier, as the placement promises and as they are."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from wherry.placement import Tier
from wherry.sharding.gradients import Gradients
from wherry.sharding.unit import Flat, Unit
from wherry.tiering import Tiering
from wherry.update.pipeline import Updater


class MemoryRow(NamedTuple):
    """Bytes of one state on one tier, on this rank: as the placement table promises, and as they are."""

    state: str
    tier: str
    bytes_expected: int
    bytes_actual: int


def rows(units: list[Unit], gradients: Gradients, updater: Updater | None, tiering: Tiering) -> list[MemoryRow]:
    """One row for each state and tier that it rests on."""
    flats = [flat for unit in units for flat in unit.flats]
    return [
        *_parameters(flats),
        _gathered(units, flats),
        *_gradients(gradients, tiering),
        *_optimizer(updater),
    ]


def _tier_of(flat: Flat) -> Tier:
    if flat.home is None:
        return Tier.DEVICE
    return Tier.DISK if flat.home.on_disk else Tier.HOST


def _parameters(flats: list[Flat]) -> list[MemoryRow]:
    owed: defaultdict[Tier, int] = defaultdict(int)
    held: defaultdict[Tier, int] = defaultdict(int)
    for flat in flats:
        tier = _tier_of(flat)
        owed[tier] += flat.nbytes if flat.resident else flat.shard_nbytes
        held[tier] += flat.shard_nbytes if tier is Tier.DISK else flat.resting_nbytes
        if flat.secondary is not None:
            owed[Tier.DEVICE] += flat.secondary.nbytes
            held[Tier.DEVICE] += flat.secondary.nbytes
    cached = sum(flat.resting_nbytes for flat in flats if _tier_of(flat) is Tier.DISK)
    found = [MemoryRow("parameters", str(tier), owed[tier], held[tier]) for tier in Tier if tier in owed]
    if Tier.DISK in owed:
        found.append(MemoryRow("parameters read", "host", cached, cached))
    return found


def _gathered(units: list[Unit], flats: list[Flat]) -> MemoryRow:
    largest = max((sum(f.nbytes for f in unit.travelling) for unit in units), default=0)
    whole = sum(flat.whole.untyped_storage().nbytes() for flat in flats if not flat.resident)
    return MemoryRow("gathered", "device", largest, whole)


def _gradients(gradients: Gradients, tiering: Tiering) -> list[MemoryRow]:
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
    if tiering.policy.when == "delayed":  # the copies that late updates read
        owed_host += sum(g.flat.layout.shard_numel * g.owned_dtype.itemsize for g in gradients.all)
    found = [MemoryRow("gradients", "device", owed_device, device)]
    if owed_host or host:
        found.append(MemoryRow("gradients", "host", owed_host, host))
    return found


def _optimizer(updater: Updater | None) -> list[MemoryRow]:
    if updater is None:
        return []
    held, owed = updater.nbytes(), updater.expected_nbytes()
    found = [MemoryRow("optimizer", str(tier), owed[tier], held[tier]) for tier in Tier if tier in held]
    if Tier.DISK in held:
        found.append(MemoryRow("optimizer read", "host", updater.host_bytes(), updater.host_bytes()))
    return found
