"""What of an engine goes into a checkpoint: its parts, and the numbers that say how far training has come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.slices import Box
from wherry.observe.log import get_logger
from wherry.parallel.comm import Comm
from wherry.sharding.gradients import FlatGradient, Gradients
from wherry.sharding.layout import SegmentSpan, Slot
from wherry.sharding.places import Place, tile_places
from wherry.sharding.unit import Flat, Unit
from wherry.sharding.weights import Gatherer
from wherry.tiers.streams import Link
from wherry.update.loss_scale import LossScaler
from wherry.update.optimizer import ShardedOptimizer
from wherry.update.pipeline import Updater
from wherry.update.state import FlatState


@dataclass
class Window:
    """The accumulation window under way. `backwards` is 0 between two updates."""

    backwards: int = 0
    steps: int = 0
    averaged: bool | None = None
    scaled: bool | None = None
    boundary: bool = False
    # Of the run that wrote it: micro-batches in a window, ranks, and what gradients were divided by before their sum.
    accumulation: int = 1
    ranks: int = 1
    predivide: float = 1.0


@dataclass
class Counts:
    """How far training has come."""

    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    samples: int = 0
    norm: float | None = None
    applied: bool = False


@dataclass(frozen=True)
class Logical:
    """What a slot is of the parameter that people know: its name, the box that the slot holds, and the whole shape.

    A tile is a box of the linear layer that was tiled, and what a tensor-parallel rank holds is a box of what it cut.
    """

    name: str
    box: Box
    shape: tuple[int, ...]


@dataclass
class Session:
    """The parts of one engine, as checkpoints see them."""

    module: nn.Module
    units: list[Unit]
    # All ranks, and those of the data and tensor axes.
    comm: Comm
    data: Comm
    # Of the data axis, those that hold the same shards as this one.
    replicas: Comm
    tensor: Comm
    device: torch.device
    link: Link
    gatherer: Gatherer
    gradients: Gradients
    updater: Updater | None
    optimizer: ShardedOptimizer | None
    scaler: LossScaler
    lr_scheduler: Any
    dataloader: Any
    config: dict[str, Any]
    placement: list[list[str]]
    counts: Counts
    window: Window
    places: dict[str, Place] = field(init=False)

    def __post_init__(self) -> None:
        self.log = get_logger(self.comm.rank)
        self.places = tile_places(self.module)
        self.states: dict[Flat, FlatState] = dict(self.updater.holdings.state_of) if self.updater else {}
        self.gradient_of: dict[Flat, FlatGradient] = {g.flat: g for g in self.gradients.all}

    @property
    def flats(self) -> Iterator[Flat]:
        return (flat for unit in self.units for flat in unit.flats)

    @property
    def groups(self) -> int:
        return len(self.optimizer.param_groups) if self.optimizer is not None else 0

    def logical(self, slot: Slot) -> Logical:
        return logical_of(slot, self.places.get(slot.name))

    def whole_name(self, name: str) -> str:
        """The name of a parameter; of a tile's, that of the layer which was tiled."""
        place = self.places.get(name)
        return place.whole if place is not None else name

    def spans(self, flat: Flat) -> list[SegmentSpan]:
        """The stretches of this rank's shard that `FlatState.opened` gives the state of."""
        return [span for span in flat.layout.segments(flat.rank) if span.group < self.groups]

    def without_state(self, flat: Flat) -> list[Slot]:
        """The parameters that have no master: frozen ones, and those that the optimizer was not given."""
        if flat not in self.states:
            return list(flat.layout.slots)
        return [slot for slot in flat.layout.slots if slot.group >= self.groups]

    def behind(self, flat: Flat) -> bool:
        """Whether a flat's working weights do not follow from its master, as its last update is a delayed one."""
        return self.updater is not None and self.updater.behind(flat)

    def shares(self) -> dict[Flat, tuple[int, int]]:
        """The part of its shard of each flat that this rank writes. Data-parallel ranks with one shard divide it."""
        flats = list(self.flats)
        places = self.data.gather_objects([flat.rank for flat in flats])
        shares = {}
        for index, flat in enumerate(flats):
            alike = [rank for rank, theirs in enumerate(places) if theirs[index] == flat.rank]
            number, numel = alike.index(self.data.rank), flat.layout.shard_numel
            shares[flat] = (numel * number // len(alike), numel * (number + 1) // len(alike))
        return shares

    def writes(self, slot: Slot) -> bool:
        """Whether this rank writes its share of a parameter: of what no tensor-parallel rank cut, the first alone."""
        return slot.part is not None or self.tensor.rank == 0

    def without_gradient(self) -> list[str]:
        """The parameters that no rank has had a gradient for in the window under way, which its update leaves alone."""
        if not self.window.backwards:
            return []
        mine = {g.flat.layout.slots[index].name for g in self.gradients.all for index in g.absent}
        return sorted(set.intersection(*self.data.gather_objects(mine)))

    def optimizer_steps(self) -> tuple[int, dict[str, int]]:
        """Updates made so far, which bias corrections count; and of the parameters that have had fewer, by name."""
        made: dict[str, int] = {}
        for flat, state in self.states.items():
            for slot, steps in zip(flat.layout.slots, state.steps, strict=True):
                if slot.group < self.groups:
                    name = self.whole_name(slot.name)
                    made[name] = max(steps, made.get(name, 0))
        most = max(self.comm.gather_objects(max(made.values(), default=0)))
        fewer: dict[str, int] = {}
        for found in self.comm.gather_objects({name: steps for name, steps in made.items() if steps < most}):
            fewer |= found
        return most, fewer


def logical_of(slot: Slot, place: Place | None) -> Logical:
    """`place` is that of a tile in its layer."""
    part = slot.part
    if part is None:
        if place is None:
            return Logical(slot.name, Box.whole(slot.shape), slot.shape)
        return Logical(place.whole, Box(place.offsets, slot.shape), place.whole_shape)
    if part.global_shape is None or part.offsets is None:
        raise CheckpointError(
            f"{slot.name}: it is marked as cut by tensor parallelism and does not say along which dim, so it has no "
            "place in a checkpoint; set its attribute `partition_dim`"
        )
    if place is None:
        return Logical(slot.name, Box(tuple(part.offsets), slot.shape), tuple(part.global_shape))
    # The layer was cut first: this tile is one of those that this rank's part of it was tiled into.
    offsets, shape = [], []
    for size, whole, offset, tile, own in zip(
        slot.shape, part.global_shape, part.offsets, place.offsets, place.whole_shape, strict=True
    ):
        if whole % size or offset % size:
            raise CheckpointError(
                f"{slot.name}: a tile of a layer that tensor-parallel ranks have cut into unequal parts has no place "
                "in a checkpoint; tile the layer before it is cut, or let the ranks divide it"
            )
        offsets.append(offset // size * own + tile)
        shape.append(whole // size * own)
    return Logical(place.whole, Box(tuple(offsets), slot.shape), tuple(shape))


def within(flat: Flat, slot: Slot, low: int, high: int) -> tuple[int, int, int] | None:
    """What of a slot lies in positions `low` to `high` of this rank's shard: start, stop, and where in the shard."""
    place = flat.layout.overlap(slot, flat.rank)
    if place is None:
        return None
    start, stop, at = place
    first, last = max(at, low), min(at + stop - start, high)
    return (start + first - at, start + last - at, first) if first < last else None


def own_sum(gradient: FlatGradient) -> torch.Tensor:
    """This rank's part of the window's sum: on the device if kept there, else where it was streamed to."""
    if gradient.keeps:
        return gradient.own_sum
    gradient.landing.wait()
    return gradient.owned


def addend_of(session: Session, gradient: FlatGradient) -> tuple[int, int] | None:
    """Which of how many sums this rank's is, while they have not met: each rank has one, or each group of ranks.

    None where the sum is over all ranks.
    """
    if gradient.reduced or not gradient.keeps or session.data.size == 1:
        return None
    if not gradient.partitioned:
        return session.data.rank, session.data.size
    return (session.replicas.rank, session.replicas.size) if session.replicas.size > 1 else None


def aliases(module: nn.Module) -> dict[str, list[str]]:
    """The other names of tied parameters and shared buffers, by the first name; of tiles those of their layers."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    places = tile_places(module)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for own_name, tensor in tensors:
        name = places[own_name].whole if own_name in places else own_name
        known = first.setdefault(id(tensor), name)
        if known != name and name not in others.get(known, ()):
            others.setdefault(known, []).append(name)
    return others


def plain_tensors(session: Session) -> dict[str, torch.Tensor]:
    """What a module's state has beside the flats: persistent buffers, and weights that are no floating point."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    in_flats = {id(parameter) for flat in session.flats for parameter in flat.parameters}
    for prefix, module in session.module.named_modules():
        members: dict[str, torch.Tensor | None] = {
            **{name: p for name, p in module._parameters.items() if p is not None and id(p) not in in_flats},
            **{n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set},
        }
        for name, tensor in members.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """The modules with a state of their own (`get_extra_state`), by the name it has in a state_dict."""
    return {
        f"{prefix}.{nn.modules.module._EXTRA_STATE_KEY_SUFFIX}".lstrip("."): found
        for prefix, found in module.named_modules()
        if type(found).get_extra_state is not nn.Module.get_extra_state
    }
