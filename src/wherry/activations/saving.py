"""What happens to a tensor that autograd saves: kept, or put away by a store and brought back in time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from wherry.activations.partition import CheckpointPartition
from wherry.activations.stores import Held, OnDevice, Store
from wherry.fake import is_fake
from wherry.parallel.partition import is_dtensor

# Bytes that are brought back ahead of their use, and the part of all that is away; one tensor is always.
AHEAD = 64 << 20
SHARE_AHEAD = 4


class Beneath(Protocol):
    """The engine's own way with what autograd saves: views of gathered weights."""

    def pack(self, tensor: torch.Tensor) -> Any: ...

    def unpack(self, saved: Any) -> torch.Tensor: ...


class Chain:
    """What one forward has put away, in its order. The backward wants it in reverse."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Parked]] = []
        self._nbytes = 0

    def append(self, member: Parked) -> int:
        self._nbytes += member.held.nbytes
        self._members.append(weakref.ref(member))
        return len(self._members) - 1

    def bring(self, before: int) -> None:
        """Set going what comes before a member, as far as the budget goes."""
        ahead, budget = 0, min(AHEAD, self._nbytes // SHARE_AHEAD)
        for place in range(before - 1, -1, -1):
            member = self._members[place]()
            # An operation takes what it has saved in its order, and lets go of none of it before it ends.
            if member is None or member.taken:
                continue
            if ahead and ahead + member.held.nbytes > budget:
                return
            ahead += member.held.nbytes
            member.held.start()
            if ahead >= budget:
                return


class Parked:
    """The memory of one storage, put away. Several saved tensors may be views of it."""

    __slots__ = ("__weakref__", "chain", "data", "held", "place", "shares", "taken", "uses")

    def __init__(self, held: Held, chain: Chain) -> None:
        self.held = held
        self.chain = chain
        self.place = chain.append(self)
        # Saved tensors of this memory; those not unpacked since it came back; and the memory, while there are any.
        self.shares = 0
        self.uses = 0
        self.data: torch.Tensor | None = None
        # Whether a backward has had it: another through the same graph asks for it when it wants it.
        self.taken = False

    def take(self) -> torch.Tensor:
        if self.data is None:
            self.data = self.held.take()
            self.uses = self.shares
            self.taken = True
            self.chain.bring(self.place)
        data = self.data
        self.uses -= 1
        if self.uses <= 0:
            self.data = None
        return data


class Saved:
    """A saved tensor: a view of what was parked."""

    __slots__ = ("dtype", "offset", "parked", "part", "shape", "stride", "wrapper")

    def __init__(
        self, parked: Parked, tensor: torch.Tensor, offset: int = 0, *, part: CheckpointPartition | None = None
    ) -> None:
        parked.shares += 1
        self.parked = parked
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = offset
        # What gathers the tensor, where this is one tensor-parallel rank's part of it.
        self.part = part
        # Makes a DTensor of the local tensor again.
        self.wrapper: Callable[[torch.Tensor], torch.Tensor] | None = None

    def unpack(self) -> torch.Tensor:
        data = self.parked.take()
        if self.part is not None:
            tensor = self.part.gather(data.view(self.dtype), self.shape)
        else:
            whole = data[: data.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
            tensor = whole.as_strided(self.shape, self.stride, self.offset)
        return tensor if self.wrapper is None else self.wrapper(tensor)


class Saver:
    """Packs and unpacks for autograd: weights go the engine's way, large activations to the store, the rest stays.

    Inputs of checkpoints are divided by `partition`; without a store the part stays.

    One object may serve several forwards whose backwards have not come yet; `begin` separates them.
    """

    def __init__(
        self,
        store: Store | None,
        beneath: Beneath,
        *,
        smallest: int,
        partition: CheckpointPartition | None = None,
        weights: Callable[[], Iterable[torch.Tensor]] = tuple,
        device: torch.device | None = None,
    ) -> None:
        self.store = store
        self.beneath = beneath
        self.smallest = smallest
        self.partition = partition
        # Where what is put away comes from, and where it comes back to; None: from wherever it is.
        self.device = device
        self._weights = weights
        self._keep: set[int] | None = None
        self._chain = Chain()
        # By storage and version, so that what two operations save is put away once.
        self._seen: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[Parked]]] = {}
        # Memories put away so far, for tests.
        self.put_away = 0

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self._chain = Chain()
        self._seen.clear()
        self._keep = None

    def hooks(self, checkpoint: str = "") -> torch.autograd.graph.saved_tensors_hooks:
        """Around operations whose saved tensors are to be put away: the inputs of a checkpoint, or all of a unit's."""
        if not checkpoint:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        place = itertools.count()
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.pack(tensor, f"{checkpoint}: input {next(place)}"), self.unpack
        )

    def pack(self, tensor: torch.Tensor, checkpointed: str = "") -> Any:
        below = self.beneath.pack(tensor)
        if not isinstance(below, torch.Tensor):
            return below
        wrapper = None
        inner = tensor
        if is_dtensor(tensor):
            inner, wrapper = tensor._local_tensor, _wrapper(tensor)  # type: ignore[attr-defined]
        if not self._goes(inner):
            return below
        if checkpointed and self.partition is not None and self.partition.divides(inner, tensor):
            part = self.partition.part_of(inner.detach(), checkpointed)
            saved = Saved(self._park(part.view(torch.uint8)), inner, part=self.partition)
        elif self.store is not None:
            saved = self._pack_whole(inner)
        else:
            return below
        saved.wrapper = wrapper
        return saved

    def unpack(self, saved: Any) -> torch.Tensor:
        return saved.unpack() if isinstance(saved, Saved) else self.beneath.unpack(saved)

    def _goes(self, tensor: torch.Tensor) -> bool:
        known = type(tensor) is torch.Tensor or is_fake(tensor)
        if not known or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.numel() * tensor.element_size() < self.smallest:
            return False
        if self.device is not None and tensor.device.type != self.device.type:
            return False  # of the host's, which a model beside a GPU may hold as well
        if self._keep is None:
            self._keep = {weight.untyped_storage()._cdata for weight in self._weights()}
        return tensor.untyped_storage()._cdata not in self._keep

    def _pack_whole(self, tensor: torch.Tensor) -> Saved:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 4 * tensor.numel() * tensor.element_size():
            # A small part of a large storage: the part alone.
            part = tensor.detach().contiguous()
            return Saved(self._park(part.view(-1).view(torch.uint8)), part)
        key = storage._cdata, tensor._version
        seen = self._seen.get(key)
        # Another storage may have got the address of one that is gone.
        parked = seen[1]() if seen is not None and seen[0]() is storage else None
        if parked is None:
            elements = storage.nbytes() // tensor.element_size()
            parked = self._park(tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8))
            self._seen[key] = weakref.ref(storage), weakref.ref(parked)
        return Saved(parked, tensor, int(tensor.storage_offset()))

    def _park(self, data: torch.Tensor) -> Parked:
        self.put_away += 1
        return Parked(OnDevice(data) if self.store is None else self.store.put(data), self._chain)


def _wrapper(tensor: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def wrap(local: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return wrap
