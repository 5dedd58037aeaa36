"""An engine as its checkpoints see it: its parts, the calls on them, and the names that its tensors go by."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.checkpoint.errors import CheckpointError, on_first, together
from wherry.checkpoint.reshard import Box, Run
from wherry.errors import WherryError
from wherry.observe.log import get_logger
from wherry.parallel.comm import Comm
from wherry.sharding.layout import Place, SegmentSpan, Slot, tile_places
from wherry.sharding.quantized import scales
from wherry.sharding.unit import Flat, Unit
from wherry.sharding.weights import Gatherer
from wherry.tiers.streams import Link
from wherry.update.loss_scale import LossScaler
from wherry.update.optimizer import ShardedOptimizer
from wherry.update.optimizer_states import FlatState
from wherry.update.updater import Updater

if TYPE_CHECKING:  # imported with the first save or load
    from wherry.checkpoint.load import LoadedCheckpoint, LoadOptions
    from wherry.checkpoint.save import Save
    from wherry.config import Config


@dataclass
class StepCounts:
    """How far training has come, by its last update."""

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
    tensor: Comm
    device: torch.device
    link: Link
    gatherer: Gatherer
    updater: Updater | None
    optimizer: ShardedOptimizer | None
    scaler: LossScaler
    lr_scheduler: Any
    dataloader: Any
    config: dict[str, Any]
    placement: list[list[str]]
    counts: StepCounts
    # The accumulation window under way: micro-batches so far, of how many, and whether its last backward has run.
    micro_batches: int
    accumulation: int
    complete: bool
    places: dict[str, Place] = field(init=False)

    def __post_init__(self) -> None:
        self.log = get_logger(self.comm.rank)
        self.places = tile_places(self.module)
        self.states: dict[Flat, FlatState] = dict(self.updater.states.state_of) if self.updater else {}

    @property
    def flats(self) -> Iterator[Flat]:
        return (flat for unit in self.units for flat in unit.flats)

    @property
    def groups(self) -> int:
        return len(self.optimizer.param_groups) if self.optimizer is not None else 0

    def logical(self, slot: Slot) -> Logical:
        part, place = slot.part, self.places.get(slot.name)
        if part is None:
            if place is None:
                return Logical(slot.name, Box.whole(slot.shape), slot.shape)
            return Logical(place.whole, Box(place.offsets, slot.shape), place.whole_shape)
        if part.global_shape is None or part.offsets is None:
            raise CheckpointError(
                f"{slot.name}: it is marked as cut by tensor parallelism and does not say along which dim, so it has "
                "no place in a checkpoint; set its attribute `partition_dim`"
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
                    f"{slot.name}: a tile of a layer that tensor-parallel ranks have cut into unequal parts has no "
                    "place in a checkpoint; tile the layer before it is cut, or let the ranks divide it"
                )
            offsets.append(offset // size * own + tile)
            shape.append(whole // size * own)
        return Logical(place.whole, Box(tuple(offsets), slot.shape), tuple(shape))

    def whole_name(self, name: str) -> str:
        """The name of a parameter; of a tile's, that of the layer which was tiled."""
        place = self.places.get(name)
        return place.whole if place is not None else name

    def run(self, flat: Flat, slot: Slot, low: int, high: int) -> tuple[Run, int] | None:
        """What of a slot lies in positions `low` to `high` of this rank's shard, and where in the shard it begins."""
        place = flat.layout.overlap(slot, flat.rank)
        if place is None:
            return None
        start, stop, at = place
        first, last = max(at, low), min(at + stop - start, high)
        if first >= last:
            return None
        return Run(self.logical(slot).box, start + first - at, start + last - at), first

    def spans(self, flat: Flat) -> list[SegmentSpan]:
        """The stretches of this rank's shard that `FlatState.opened` gives the state of."""
        return [span for span in flat.layout.segments(flat.rank) if span.group < self.groups]

    def without_state(self, flat: Flat) -> list[Slot]:
        """The parameters that have no master: frozen ones, and those that the optimizer was not given."""
        if flat not in self.states:
            return list(flat.layout.slots)
        return [slot for slot in flat.layout.slots if slot.group >= self.groups]

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


class Checkpoints:
    """Saves and loads one engine, one save in flight at most. `session` gives its parts as they are at the moment."""

    def __init__(self, session: Callable[[], Session], config: Config) -> None:
        self._session = session
        self._config = config
        # The save that was left to be written behind training, until somebody has waited for it.
        self._last: Save | None = None

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: Any,
        client_state: dict[str, Any] | None,
        *,
        latest: bool,
        exclude_frozen: bool,
    ) -> None:
        from wherry.checkpoint.save import save

        self.wait()
        state = {} if client_state is None else client_state
        tag = None if tag is None else str(tag)

        def keep(job: Save) -> None:
            self._last = job

        save(
            self._session(), self._config, Path(folder), tag, state, keep, latest=latest, exclude_frozen=exclude_frozen
        )

    def load(self, folder: str | os.PathLike[str], tag: Any, options: LoadOptions) -> LoadedCheckpoint | None:
        from wherry.checkpoint.load import load

        self.wait()
        with torch.inference_mode(False):  # what a load makes is trained on
            return load(self._session(), Path(folder), None if tag is None else str(tag), options)

    def save_model(self, folder: Path, file: str, dtype: torch.dtype | None = None, *, exclude_frozen: bool) -> None:
        from wherry.checkpoint import export

        if file == "model.safetensors":
            export.write_model(self._session(), folder, dtype, exclude_frozen=exclude_frozen)
            return
        if not file.endswith((".bin", ".pt", ".pth")) or "/" in file:
            raise WherryError(
                f"save_16bit_model: expected model.safetensors, or a name that ends in .bin, .pt or .pth, got {file!r}"
            )
        weights = self.consolidated(dtype, exclude_frozen=exclude_frozen)
        on_first(self._session().comm, f"writing {folder / file}", lambda: export.write_torch(weights, folder / file))

    def consolidated(self, dtype: torch.dtype | None, *, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        from wherry.checkpoint import export

        return export.consolidated(self._session(), dtype=dtype, exclude_frozen=exclude_frozen)

    @property
    def behind(self) -> bool:
        """Whether a save was left to be written behind training, and nobody has waited for it."""
        return self._last is not None

    def wait(self) -> None:
        """Return when no save is under way any more; raises what went wrong with the last one, on every rank."""
        last, self._last = self._last, None
        if last is not None:
            together(self._session().comm, f"saving {last.path}", last.wait)

    def close(self) -> None:
        """Wait for what this rank still writes. Other ranks are not asked: they may be gone."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()


# By the names that people know.


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


def plain_tensors(session: Session, *, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """What a module's state has beside the flats: persistent buffers, and what frozen codes have beside them."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in session.module.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is None or name in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            found[f"{prefix}.{name}" if prefix else name] = tensor
    return found if exclude_frozen else found | {scale.name: scale.tensor for scale in scales(session.module)}


def extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """The modules with a state of their own (`get_extra_state`), by the name it has in a state_dict."""
    return {
        f"{prefix}.{nn.modules.module._EXTRA_STATE_KEY_SUFFIX}".lstrip("."): found
        for prefix, found in module.named_modules()
        if type(found).get_extra_state is not nn.Module.get_extra_state
    }
