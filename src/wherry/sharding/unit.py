"""Units and their flats at run time: what they hold, and in which state they are."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from wherry.parallel.partition import is_dtensor
from wherry.placement import Tier
from wherry.sharding.layout import FlatLayout
from wherry.sharding.quantized import Attribute, placeholder, places
from wherry.sharding.released import classes_of
from wherry.tickets import DONE, Ticket
from wherry.tiers.elastic import Elastic
from wherry.tiers.storage import Storage, opened


class Weights(enum.Enum):
    """Where a flat's working weights are. `GATHERING` needs a wait; `WHOLE` can be computed with."""

    RELEASED = "released"
    GATHERING = "gathering"
    WHOLE = "whole"


class Flat:
    """A unit's parameters of one dtype and trainability in one buffer.

    `whole` is the buffer that the parameters are views of; this rank's part of it rests on the device, or in
    `storage`. A `resident` flat is whole for ever and its shard lies inside it; any other is gathered into `whole` and
    released again, which frees the memory of `whole` and keeps the tensor, because autograd has saved views of it.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype,
        rank: int,
        device: torch.device,
        resident: bool,
        storage: Storage | None = None,
        held_by: Mapping[nn.Parameter, nn.Module] | None = None,
    ) -> None:
        """`held_by`: the modules that hold a parameter's values in attributes of their own as well."""
        assert len(layout.slots) == len(parameters), (name, len(layout.slots), len(parameters))
        self.name = name
        self.layout = layout
        self.parameters = list(parameters)
        self.rank = rank
        self.resident = resident
        self.dtype = dtype
        self.trainable = parameters[0].requires_grad
        # Whether there are DTensors among the parameters.
        self.distributed = any(is_dtensor(parameter) for parameter in parameters)
        # Where each parameter has its values.
        self.places: list[list[Attribute]] = [
            places(parameter, (held_by or {}).get(parameter)) for parameter in parameters
        ]
        self._own = Elastic(layout.numel, self.dtype, device, mapped=not resident)
        self._own_views = self._lie_in(self._own)
        # This rank's part of `whole`.
        self.own = slice(*layout.shard_range(rank))
        self.shard_nbytes = layout.shard_numel * dtype.itemsize
        # Where the shard rests, if that is not the device's memory.
        self.storage = storage
        assert storage is None or not resident, name
        self._shard = None
        if storage is None:
            self._shard = self.whole[self.own] if resident else torch.empty_like(self.whole[self.own])
        # What a released parameter reads as, where it does not raise: a stray read is loud, never stale. A view that
        # somebody made of it while it was whole, and kept, is none of these: on Linux's host it reads as NaN too,
        # elsewhere its memory is gone.
        blank = placeholder(self.dtype, device)
        self.blanks = [blank.expand(slot.shape) for slot in layout.slots]
        self.note_classes()
        self.weights = Weights.WHOLE
        self.ticket: Ticket = DONE
        # What still reads its shard, or its optimizer state, on the device: whoever changes these waits for it first.
        self.reader: Ticket = DONE
        # How many readers keep it whole.
        self.pins = 0
        # An update of it is under way: whoever wants its weights settles that first.
        self.pending = False
        # Bytes of what stays beside codes, whole on the device.
        self.scales_nbytes = 0
        # An update of it was begun after it was last gathered. `pending` ends when this rank looks at its weights,
        # perhaps alone; this ends by a gather, which all ranks make: what decides about collectives may ask it.
        self.ungathered = False
        # This rank's part of what its node shares, and whether it is that of the weights as they are. All ranks say so
        # or none: whoever changes weights on all of them takes it back.
        self.secondary: torch.Tensor | None = None
        self.secondary_fresh = False

    # Its working weights: released, gathering, whole.

    def begin_gather(self, ticket: Ticket) -> None:
        """`ticket` waits for the gather into `whole`."""
        assert self.weights is Weights.RELEASED, self
        self.ticket = ticket
        self.weights = Weights.GATHERING
        self.ungathered = False

    def end_gather(self) -> None:
        assert self.weights is Weights.GATHERING, self
        self.ticket.wait()
        self.show_whole()
        self.weights = Weights.WHOLE

    def release(self) -> None:
        """Free the memory of `whole`. The parameters keep shape and dtype, and read as NaN."""
        assert not self.resident, self
        if self.weights is Weights.GATHERING:
            self.ticket.wait()
        self.show_blanks()
        self.shrink()
        self.weights = Weights.RELEASED

    def give_up_gather(self) -> None:
        """Its gather has failed, and may still write to the memory: that goes with the tensor."""
        assert self.weights is Weights.GATHERING, self
        self.show_blanks()
        self.weights = Weights.RELEASED

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Inside it is not released."""
        self.pins += 1
        try:
            yield
        finally:
            self.pins = max(0, self.pins - 1)

    def unpin(self) -> None:
        """Whoever is inside `pinned` has whole weights no longer."""
        self.pins = 0

    def begin_update(self) -> None:
        """An update of it is under way until `end_update`."""
        self.pending = self.ungathered = True

    def end_update(self) -> None:
        """Its weights are those after the update, everywhere."""
        if self.pending:
            if self.resident:
                self.show_whole()
            self.pending = False  # last: who is interrupted before it shows them again

    # Where ranks of one node share the weights among themselves as well.

    def share_again(self, ranks: int) -> None:
        """This rank keeps one of so many parts of what it has gathered."""
        self.secondary = torch.empty(self.layout.numel // ranks, dtype=self.dtype, device=self.whole.device)

    def keep_secondary(self, rank: int) -> None:
        """The weights are whole: this rank's part of them is kept."""
        if self.secondary is not None and not self.secondary_fresh:
            size = self.secondary.numel()
            self.secondary.copy_(self.whole[rank * size : (rank + 1) * size])
            self.secondary_fresh = True

    def forget_secondary(self) -> None:
        """The weights change."""
        self.secondary_fresh = False

    # Its memory.

    def _lie_in(self, elastic: Elastic, views: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Let this be the memory of `whole`. Of none no views can be made."""
        self.elastic = elastic
        self.whole = elastic.tensor
        self.views = views or self.layout.views(self.whole)
        return self.views

    def lend(self) -> None:
        """Until it is released again, a flat lies in memory that whoever keeps a view of it keeps as well."""
        assert self.weights is Weights.RELEASED, self
        with torch.inference_mode(False):
            self._lie_in(Elastic(self.layout.numel, self.dtype, self.whole.device, mapped=False))

    @property
    def lent(self) -> bool:
        return self.elastic is not self._own

    def shrink(self) -> None:
        """Let go of the memory of a flat that is whole. Nobody but those that it is lent to may still read it."""
        if self.elastic is not self._own:
            self._lie_in(self._own, self._own_views)
        else:
            self.elastic.shrink()

    @property
    def shard_memory(self) -> torch.Tensor:
        """This rank's shard where it is in memory: always, or while it is fetched if it rests on disk."""
        if self._shard is not None:
            return self._shard
        assert self.storage is not None, f"{self.name}: closed"
        return self.storage.memory[: self.shard_nbytes].view(self.dtype)

    @property
    def tier(self) -> Tier:
        """Where this rank's shard rests."""
        if self.storage is None:
            return Tier.DEVICE
        return Tier.DISK if self.storage.on_disk else Tier.HOST

    @property
    def at_rest_on_disk(self) -> bool:
        return self.storage is not None and self.storage.on_disk

    @contextmanager
    def opened(self, *, write: bool = False) -> Iterator[torch.Tensor]:
        """This rank's shard of the working weights, wherever it rests; valid inside only.

        What is changed inside is kept if `write` is given. A resident flat's other parts are not touched.
        """
        if write and self.reader is not DONE:
            self.quiet()
        if self.storage is None:
            yield self.shard_memory
            return
        with opened(self.storage, write=write):
            yield self.shard_memory

    def read_by(self, reader: Ticket) -> None:
        """Whoever next writes this rank's part on the device waits for `reader` first."""
        self.reader = reader

    def quiet(self) -> None:
        """What the current stream does from here on comes after whatever reads this rank's part on the device."""
        reader, self.reader = self.reader, DONE
        reader.wait()

    def is_whole_of(self, parameter: nn.Parameter) -> bool:
        """Whether it is whole, and this one of its parameters."""
        return self.weights is Weights.WHOLE and any(each is parameter for each in self.parameters)

    def show_whole(self) -> None:
        """Let the parameters be views of the whole buffer."""
        for parameter, whole, _ in self._classes:
            parameter.__class__ = whole
        self.show(self.views)

    def show_blanks(self) -> None:
        """Let the parameters be placeholders, which keep shape and dtype, and read as NaN or raise (`released`)."""
        self.show(self.blanks)
        for parameter, _, released in self._classes:
            parameter.__class__ = released

    def note_classes(self) -> None:
        """Look up the classes that the parameters have: whole, and released. Some kinds have one only."""
        self._classes = [
            (parameter, *classes)
            for parameter, places in zip(self.parameters, self.places, strict=True)
            if places[0][1] == "data" and (classes := classes_of(parameter)) is not None
        ]

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let these be the values of the parameters."""
        for found, tensor in zip(self.places, tensors, strict=True):
            for holder, attribute in found:
                setattr(holder, attribute, tensor)

    @property
    def resting_nbytes(self) -> int:
        """Bytes of memory that the weights at rest take at the moment, on whatever tier."""
        if self.resident:
            return self.nbytes
        if self.storage is not None:
            return self.storage.in_memory
        return 0 if self._shard is None else self._shard.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat, padding included."""
        return self.layout.numel * self.dtype.itemsize

    def close(self) -> None:
        """Free the weights of a flat that travels; its parameters stay placeholders."""
        assert not self.resident and self.weights is Weights.RELEASED, self
        if self.storage is not None:
            self.storage.close()
        self._shard = self.storage = None
        self.secondary = None

    def __repr__(self) -> str:
        return f"Flat({self.name}, {self.layout.payload:,} parameters, {self.weights.value})"


@dataclass(eq=False)
class Unit:
    """Flats that travel together, and the modules whose forward needs them."""

    index: int
    name: str
    modules: list[nn.Module]
    flats: list[Flat]
    root: bool = False
    # Kept gathered from its first use in a step to the end of the backward, because other units use it too.
    shared: bool = False
    travelling: list[Flat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = self.shared or self.root
        self.hold(self.flats)

    def hold(self, flats: list[Flat]) -> None:
        """Let these be the flats of its parameters."""
        self.flats = flats
        self.travelling = [flat for flat in flats if not flat.resident]

    def share(self) -> None:
        """Another unit uses its weights: from now on they stay gathered through the step."""
        self.shared = True

    def __repr__(self) -> str:
        return f"Unit({self.name})"  # that of its modules would read their weights

    @property
    def pending(self) -> bool:
        """Whether an update of it is under way."""
        return any(flat.pending for flat in self.flats)

    @property
    def on_disk(self) -> bool:
        return any(flat.at_rest_on_disk for flat in self.travelling)

    @property
    def whole(self) -> bool:
        return all(flat.weights is Weights.WHOLE for flat in self.travelling)
