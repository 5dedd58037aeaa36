"""What rests where: bytes of each state on each tier, as they are promised and as they are, and whether that fits."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from wherry.observe.memory import format_bytes, free_on_gpu, out_of_memory
from wherry.offload import Offload
from wherry.parallel.partition import local
from wherry.placement import Placement, Tier, place_name
from wherry.sharding.flat_gradient import Landing
from wherry.sharding.gradients import Gradients
from wherry.sharding.grouping import UnitPlan
from wherry.sharding.layout import lay_out
from wherry.sharding.quantized import flat_kind
from wherry.sharding.unit import Unit
from wherry.tier_choice import TierChoice
from wherry.tiers.disk import DiskStore
from wherry.tiers.host import check_host, free_host_memory
from wherry.update.optimizer_states import StateTier, record_fields
from wherry.update.streamed import ROOMS
from wherry.update.updater import Updater

# Bytes by state and by the tier that they rest on.
Account = Counter[tuple[str, Tier]]


class MemoryRow(NamedTuple):
    """Bytes of one state on one tier, on this rank: as the placement table promises, and as they are.

    What comes and goes within a step ("gathered", what is "read" of a state on disk, and what is "streamed" through the
    device) has the most that may be there as its promise.
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
    gpu = device.type != "cpu"
    place = "device" if gpu else "host"
    free = free_on_gpu(device) if gpu else free_host_memory()
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


# What is promised: of flats that are made, and of those that are to be.


@dataclass(frozen=True)
class Extent:
    """A flat, and where its states rest."""

    unit: str
    # Of the whole flat, and of a rank's shard.
    numel: int
    shard: int
    dtype: torch.dtype
    resident: bool
    weights: Tier
    trainable: bool
    # Of its optimizer state, if it has one.
    kept: StateTier | None
    # Whether the unit stays gathered through a step.
    shared: bool
    # Bytes of the part that ranks of one node share among themselves.
    secondary: int = 0
    # Bytes of what codes have beside them.
    scales: int = 0


@dataclass(frozen=True)
class RecordSize:
    """Of the optimizer's state of a bucket: bytes where it rests, in memory during its update, and of what of it is on
    the device at a time, if it is updated there without resting there."""

    tier: Tier
    nbytes: int
    in_memory: int
    room: int = 0


def promised(
    offload: Offload, choice: TierChoice, flats: Sequence[Extent], records: Iterable[RecordSize], accumulation: int
) -> Account:
    """The most that may rest on each tier, padding included, with windows of so many micro-batches."""
    account: Account = Counter()
    for flat in flats:
        whole = flat.numel if flat.resident else flat.shard
        account["parameters", flat.weights] += whole * flat.dtype.itemsize
        if flat.secondary or flat.scales:
            account["parameters", Tier.DEVICE] += flat.secondary + flat.scales
    on_disk = [flat for flat in flats if flat.weights is Tier.DISK]
    if on_disk:
        account["parameters read", Tier.HOST] = _weights_read(offload, choice, on_disk)
    account["gathered", Tier.DEVICE] = _gathered(offload, [flat for flat in flats if not flat.resident])
    account.update(_gradients(choice, [flat for flat in flats if flat.trainable], accumulation))
    read = []
    for record in records:
        account["optimizer", record.tier] += record.nbytes
        if record.room:
            account["optimizer streamed", Tier.DEVICE] = max(
                ROOMS * record.room, account["optimizer streamed", Tier.DEVICE]
            )
        if record.tier is Tier.DISK:
            read.append(record.in_memory)
    if read:
        account["optimizer read", Tier.HOST] = sum(sorted(read)[-choice.policy.depth :])
        late = [flat for flat in flats if flat.kept is not None and flat.kept.tier is Tier.DISK]
        if choice.policy.when == "delayed":
            account["parameters to come", Tier.HOST] = sum(flat.shard * flat.dtype.itemsize for flat in late)
    return account


def _weights_read(offload: Offload, choice: TierChoice, on_disk: Sequence[Extent]) -> int:
    """There is room for some of the largest: what is read ahead, in use, or kept.

    What is updated at a time is in use whatever the room is; where updates run beside a forward, all of the room may be
    read ahead by then.
    """
    shards = [flat.shard * flat.dtype.itemsize for flat in on_disk]
    buffers = offload.config.zero_optimization.offload_param.buffer_count
    updated = sum(flat.kept is not None and not flat.kept.apart for flat in on_disk)
    updated = min(choice.policy.depth, updated)
    count = buffers - 1 + max(1, updated) if choice.policy.beside else max(buffers, updated)
    return min(sum(shards), count * max(shards))


def _gathered(offload: Offload, travelling: Sequence[Extent]) -> int:
    """Units that others use too stay through a step; beside them is the unit at work, and what is gathered ahead."""
    zero = offload.config.zero_optimization
    stay = sum(flat.numel for flat in travelling if flat.shared)
    units: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for flat in travelling:
        nbytes["" if flat.shared else flat.unit] += flat.numel * flat.dtype.itemsize
        if not flat.shared:
            units[flat.unit] += flat.numel
    largest = max(units.values(), default=0)
    room = max(0, zero.stage3_max_live_parameters - stay - largest)
    ahead = min(room, max(largest, zero.stage3_prefetch_bucket_size))
    # Elements of a unit are of one width about: codes, with small adapters beside them that are wider.
    width = max((nbytes[unit] / max(1, numel) for unit, numel in units.items()), default=0)
    return min(nbytes[""] + math.ceil((largest + ahead) * width), nbytes.total())


def _gradients(choice: TierChoice, flats: Sequence[Extent], accumulation: int) -> Account:
    account: Account = Counter()
    policy, when = choice.gradient_policy(accumulation), choice.policy.when
    brief: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: []}
    for flat in flats:
        way = choice.way_of(policy, flat.kept)
        summed = (policy.accumulation_dtype or flat.dtype).itemsize
        sent = (policy.communication_dtype or flat.dtype).itemsize
        landed = flat.shard * (sent if way is Landing.STREAMED and not policy.accumulates else summed)
        held = flat.shard if choice.placement.gradients.partitioned else flat.numel
        account["gradients", Tier.DEVICE] += 0 if policy.brief or way is Landing.STREAMED else held * summed
        if policy.brief:
            brief[Tier.DEVICE if way is Landing.STAYS and not choice.shared else Tier.HOST].append(flat.shard * sent)
        elif way is not Landing.STAYS:
            account["gradients", Tier.HOST] += landed
        if when == "delayed":  # the copies that late updates read
            account["gradients", Tier.HOST] += landed
    for tier, sizes in brief.items():
        # They have memory from their arrival to their update: the backward waits with the next one's in hand.
        place = Tier.DEVICE if choice.shared else tier
        account["gradients", place] += sum(sorted(sizes)[-(2 * choice.policy.depth + 1) :])
    return account


# Whether it fits.


def check_room(offload: Offload, plans: Sequence[UnitPlan]) -> None:
    """Raise an error with what is missing and what takes less, before any state is made."""
    needs = promised_of(offload, plans)
    _check_disk(offload, needs)
    # What of the model is in host memory already.
    parameters = [local(p) for plan in plans for _, p in plan.parameters if p.device.type == "cpu"]
    held = sum(parameter.untyped_storage().nbytes() for parameter in parameters)
    limit = offload.config.wherry.host_memory
    check_host(_on_host(offload, needs), offload.topology.local_ranks, limit, held, _less_on_host(offload))


def promised_of(offload: Offload, plans: Sequence[UnitPlan]) -> Account:
    """What flats will take that are yet to be made."""
    choice, placement = offload.new_choice(), offload.placement
    flats, records = [], []
    numel: dict[torch.Tensor, int] = {}
    for plan in plans:
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in plan.parameters:
            dtype, numel[parameter] = flat_kind(parameter, offload.config.working_dtype())
            kinds.setdefault((dtype, parameter.requires_grad), []).append((name, parameter))
        for (dtype, trainable), members in kinds.items():
            cut = placement.parameters.partitioned or (trainable and placement.optimizer.partitioned)
            ranks = offload.topology.shards.size if cut else 1
            padding = _padding(offload, members, ranks) if trainable else 1.0
            size = math.ceil(sum(numel[parameter] for _, parameter in members) * padding)
            shard, whole = -(-size // ranks), not placement.parameters.partitioned
            weights = Tier.DEVICE if whole else choice.of_weights(shard * dtype.itemsize)
            resident = whole or (ranks == 1 and weights is Tier.DEVICE)
            kept = None
            mine = [parameter for _, parameter in members if trainable and parameter in offload.trained]
            if mine:
                kept = choice.of_state(plan.name, sum(local(p).numel() for p in mine), dtype, weights)
                records.append(_record_size(offload, kept, dtype, mine, ranks / padding))
            flats.append(Extent(plan.name, size, shard, dtype, resident, weights, trainable, kept, shared=plan.root))
    accumulation = offload.config.batch(offload.topology.data.size).accumulation
    return promised(offload, choice, flats, records, accumulation)


def _padding(offload: Offload, members: Sequence[tuple[str, torch.Tensor]], ranks: int) -> float:
    """How much longer shards are where an optimizer has whole parameters in them."""
    spec = offload.spec
    if spec is None or not spec.whole or ranks == 1:
        return 1.0
    number = {p: index for index, group in enumerate(spec.groups) for p in group["params"]}
    described = [(name, tuple(local(p).shape), number.get(p, len(spec.groups))) for name, p in members]
    layout = lay_out(described, ranks, whole=spec.whole)
    return layout.numel / max(1, layout.payload) if any(group in spec.whole for *_, group in described) else 1.0


def _record_size(
    offload: Offload, kept: StateTier, dtype: torch.dtype, parameters: Sequence[torch.Tensor], ranks: float
) -> RecordSize:
    """Of one rank's part of what is updated."""
    rule, total = offload.make_rule(kept), 0
    for parameter in parameters:
        group, mine = offload.trained[parameter], local(parameter)
        total += sum(field.payload for field in record_fields(kept, rule, group, dtype, tuple(mine.shape)))
        if rule.keeps_state:  # a guess
            total += 2 * mine.numel() * max(dtype.itemsize, torch.float32.itemsize if kept.masters else 0)
    nbytes = math.ceil(total / ranks)
    return RecordSize(kept.tier, nbytes, nbytes)


def _on_host(offload: Offload, account: Account) -> int:
    """Bytes of host memory; without a device of its own, those of the device as well."""
    here = {Tier.HOST, Tier.DEVICE} if offload.link.shared else {Tier.HOST}
    return sum(nbytes for (_, tier), nbytes in account.items() if tier in here)


def _check_disk(offload: Offload, account: Account) -> None:
    wanted: Counter[DiskStore] = Counter()
    for state, cache_of in (("optimizer", offload.for_records), ("parameters", offload.for_weights)):
        nbytes = account[state, Tier.DISK]
        if nbytes:
            wanted[cache_of().store] += nbytes * offload.topology.local_ranks
    for store, nbytes in wanted.items():
        store.check_free(nbytes)


def _less_on_host(offload: Offload) -> list[str]:
    """The keys that put on disk what is in memory now."""
    placement, where = offload.placement, '{"device": "nvme", "nvme_path": ...'
    keys = []
    # State on disk is for optimizers whose state is known.
    known = offload.spec is not None and offload.spec.recorded
    if known and placement.optimizer.tier is not Tier.DISK:
        keys.append(f'"offload_optimizer": {where}}}')
    if placement.parameters.partitioned and placement.parameters.tier is not Tier.DISK:
        keys.append(f'"offload_param": {where}, "max_in_cpu": 0}}')
    return keys


# What is held.


def rows(
    units: list[Unit], gradients: Gradients, updater: Updater | None, offload: Offload, away: Mapping[str, int]
) -> list[MemoryRow]:
    """One row for each state and tier that it rests on. `away`: bytes of states that were sent from the device."""
    state_of = updater.states.state_of if updater is not None else {}
    flats = [
        Extent(
            unit=unit.name,
            numel=flat.layout.numel,
            shard=flat.layout.shard_numel,
            dtype=flat.dtype,
            resident=flat.resident,
            weights=flat.tier,
            trainable=flat.trainable,
            kept=offload.state_tier(flat) if flat in state_of else None,
            shared=unit.shared,
            secondary=0 if flat.secondary is None else flat.secondary.nbytes,
            scales=flat.scales_nbytes,
        )
        for unit in units
        for flat in unit.flats
    ]
    records = []
    for bucket in updater.buckets if updater is not None else ():
        shards = sum(state.flat.layout.shard_numel for state in bucket.states)
        padded = math.ceil(bucket.nbytes * max(1.0, shards / max(1, bucket.numel)))
        records.append(RecordSize(bucket.tier, padded, bucket.record_nbytes, bucket.room_nbytes))
    owed = promised(offload, offload.choice, flats, records, 2 if gradients.policy.accumulates else 1)
    held = _held(units, gradients, updater)
    if offload.link.shared:
        owed, held = (_as_placed(account, offload.placement) for account in (owed, held))
    found = [MemoryRow(state, str(tier), owed[state, tier], held[state, tier]) for state, tier in {**owed, **held}]
    return list(_without(found, away)) if away else found


def _as_placed(account: Account, placement: Placement) -> Account:
    """Where device and host have one memory, what is asked to rest on the host is told of there."""
    asked = {state: tier for state, _, tier in placement.rows()}
    found: Account = Counter()
    for (state, tier), nbytes in account.items():
        on_host = tier is Tier.DEVICE and asked.get(state) == str(Tier.HOST)
        found[state, Tier.HOST if on_host else tier] += nbytes
    return found


def _held(units: list[Unit], gradients: Gradients, updater: Updater | None) -> Account:
    account: Account = Counter()
    for flat in (flat for unit in units for flat in unit.flats):
        on_disk = flat.tier is Tier.DISK
        account["parameters", flat.tier] += flat.shard_nbytes if on_disk else flat.resting_nbytes
        if on_disk:
            account["parameters read", Tier.HOST] += flat.resting_nbytes
        if flat.secondary is not None:
            account["parameters", Tier.DEVICE] += flat.secondary.nbytes
        if flat.scales_nbytes:
            account["parameters", Tier.DEVICE] += flat.scales_nbytes
        if not flat.resident:
            account["gathered", Tier.DEVICE] += flat.elastic.nbytes
    for gradient in gradients.all:
        account["gradients", Tier.DEVICE] += gradient.device_nbytes
        if gradient.host_nbytes:
            account["gradients", Tier.HOST] += gradient.host_nbytes
    for bucket in updater.buckets if updater is not None else ():
        account["optimizer", bucket.tier] += bucket.nbytes
        if bucket.streamed is not None:  # one for all
            account["optimizer streamed", Tier.DEVICE] = bucket.streamed.nbytes
        if bucket.on_disk:
            account["optimizer read", Tier.HOST] += bucket.in_memory
        if bucket.held_nbytes:
            account["parameters to come", Tier.HOST] += bucket.held_nbytes
    return account


def in_buffers_too(units: list[Unit], gradients: Gradients, updater: Updater | None, offload: Offload) -> Account:
    """What is held of each state, with the buffers that gradients are reduced in, and those of host memory besides."""
    account = _held(units, gradients, updater)
    account["gradients", Tier.DEVICE] += gradients.pool.counters.allocated
    pooled = sum(pool.counters.allocated for pool in offload.host_pools)
    account["buffers", Tier.HOST] = max(0, pooled - sum(n for (_, tier), n in account.items() if tier is Tier.HOST))
    return account


def tensors_of(units: list[Unit], gradients: Gradients, updater: Updater | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that states lie in, as far as they are in memory, by their unit."""
    for unit in units:
        yield from ((unit.name, flat.whole) for flat in unit.flats)
    for bucket in updater.buckets if updater is not None else ():
        yield from ((bucket.name, tensor) for tensor in bucket.memory())
    yield from (("", buffer) for buffer in gradients.pool.buffers())


def _without(found: list[MemoryRow], away: Mapping[str, int]) -> Iterator[MemoryRow]:
    for row in found:
        if row.tier != str(Tier.DEVICE) or row.state not in away:
            yield row
            continue
        yield row._replace(bytes_actual=max(0, row.bytes_actual - away[row.state]))
        yield MemoryRow(f"{row.state} away", str(Tier.HOST), away[row.state], away[row.state])
