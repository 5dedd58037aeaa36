"""One flat's gradient in an accumulation window: what has arrived, the sum so far, and where its update reads it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wherry.errors import WherryError
from wherry.fake import address_of
from wherry.parallel.partition import local_gradient
from wherry.sharding.autograd import accumulates
from wherry.sharding.unit import Flat
from wherry.tiers.buffers import untouched_zeros
from wherry.tiers.streams import Link
from wherry.tiers.tickets import DONE, Ticket


@dataclass(frozen=True)
class GradientPolicy:
    """How gradients are summed, and where the sums are. None means the dtype that autograd produced."""

    accumulation_dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None
    # Multiplied in before the sum over ranks, against overflow of half-precision sums.
    predivide: float = 1.0
    # Whether a window has more than one micro-batch.
    accumulates: bool = False
    # For flats whose gradients rest on the host: whether micro-batches are summed on the device before they leave it.
    sums_on_device: bool = False
    # Updated as soon as they have landed, gradients have memory only until then.
    brief: bool = False


class Landing(enum.Enum):
    """Where the update of a flat finds its gradient, and how that gets there."""

    STAYS = "where it was summed, on the device"
    COPIED = "on the host, after it was summed on the device"
    STREAMED = "on the host, where each micro-batch is added as it comes"


class FlatGradient:
    """The gradient of one trainable flat through an accumulation window.

    `accumulated` is the sum on the device: of the whole flat where gradients are replicated, of the shard where they
    are partitioned, and nothing where no sum is kept there. `owned` is the part that this rank updates, where the
    update finds it; it is complete once the boundary's reduction and `landing` are.
    """

    def __init__(
        self, index: int, flat: Flat, *, partitioned: bool, policy: GradientPolicy, way: Landing, link: Link
    ) -> None:
        # Its place among all of them.
        self.index = index
        self.flat = flat
        self.way = way
        self.link = link
        self.brief = policy.brief
        # Sums on the device; anything else is reduced with every micro-batch, and goes where `owned` is.
        self.keeps = not policy.brief and way is not Landing.STREAMED
        self.partitioned = partitioned or not self.keeps
        self.wire_dtype = policy.communication_dtype or flat.dtype
        self.dtype = policy.accumulation_dtype or flat.dtype
        layout = flat.layout
        numel = 0 if not self.keeps else layout.shard_numel if self.partitioned else layout.numel
        self.accumulated = untouched_zeros(numel, self.dtype, flat.whole.device)
        # This rank's part of it.
        self.own_sum = self.accumulated
        if self.keeps and not self.partitioned and layout.ranks > 1:
            self.own_sum = self.accumulated[slice(*layout.shard_range(flat.rank))]
        # A single micro-batch is kept as it came over the wire.
        self.owned_dtype = self.dtype if self.keeps or policy.accumulates else self.wire_dtype
        self._owned: torch.Tensor | None = None
        self._give: Callable[[], None] | None = None
        if not self.stays and not self.brief:
            self._borrow()
        self._aside: torch.Tensor | None = None
        # What still has to happen until `owned` is complete: a copy, and perhaps an addition.
        self.landing: Ticket = DONE
        # No micro-batch of the window has been added yet: the next one overwrites.
        self.fresh = True
        # `accumulated` holds sums over the ranks already: what still comes is reduced by itself and added to `owned`.
        self.reduced = False
        # None: to be taken from `owned`, once that is complete.
        self.sum_squares: float | torch.Tensor | None = 0.0
        self._parts: dict[int, list[torch.Tensor]] = {}
        # How often the gradient of each parameter arrives in one backward.
        self.expected = 1
        # How often one did in the last backward, by backwards within it: those of reentrant checkpoints.
        self.nested = 0
        # How often each parameter's gradient has arrived in this backward, and how many have yet to. Hooks count.
        self.arrived = [0] * len(flat.parameters)
        self.awaited = len(flat.parameters)
        # Whether there was one: what arrives may be undefined, as where a function gives None for a weight.
        self.defined = [False] * len(flat.parameters)
        self._every = range(len(flat.parameters))
        # The parameters that no backward of the window has brought a gradient for.
        self.absent: Sequence[int] = self._every
        self.collected = False

    # Where the sum is.

    @property
    def stays(self) -> bool:
        """Whether the update finds it on the device."""
        return self.way is Landing.STAYS

    def of_parameter(self, index: int) -> torch.Tensor:
        """One parameter's gradient, of a flat whose gradients this rank has whole."""
        slot = self.flat.layout.slots[index]
        return self.owned[slot.start : slot.stop].view(slot.shape)

    @property
    def owned(self) -> torch.Tensor:
        if self.keeps and self.stays:
            return self.own_sum
        if self._owned is None:
            raise WherryError(
                f"{self.flat.name}: its gradients are gone, as the update has used them in the backward already; set "
                '"wherry": {"update_policy": "before_use"} to keep them until the next step'
            )
        return self._owned

    @property
    def steady(self) -> bool:
        """Whether the update reads the same memory in every step."""
        return not self.brief

    def _borrow(self) -> None:
        nbytes = self.flat.layout.shard_numel * self.owned_dtype.itemsize
        memory = self.link.host.take(nbytes)
        self._owned = memory.view(self.owned_dtype)
        self._give = lambda: self.link.host.give(memory)

    def host_memory(self) -> torch.Tensor:
        """`owned` on the host, borrowed if there is none at the moment."""
        if self._owned is None:
            self._borrow()
        return self.owned

    def keep(self, memory: torch.Tensor, give: Callable[[], None]) -> None:
        """`memory` is `owned` from now on, until it is given back."""
        self.give_back()
        self._owned, self._give = memory, give

    def spent(self) -> None:
        """The update has read the gradients."""
        if self.brief:
            self.give_back()

    def give_back(self) -> None:
        give, self._give = self._give, None
        if give is not None:
            self._owned = None
            give()

    def set_aside(self) -> torch.Tensor:
        """A copy of `owned` for an update that still reads it while those of the next step come."""
        self.landing.wait()
        if self._aside is None:
            self._aside = torch.empty_like(self.owned)
        return self._aside.copy_(self.owned)

    # What arrives.

    def note_arrivals(self) -> None:
        """A backward has ended."""
        if all(self.defined):
            self.absent = ()
        elif self.absent:
            self.absent = [index for index in self.absent if not self.defined[index]]

    def comes(self) -> bool:
        """Whether the backward that runs has yet to bring some of it."""
        return any(
            not times and accumulates(parameter)
            for times, parameter in zip(self.arrived, self.flat.parameters, strict=True)
        )

    def begin(self) -> None:
        """A backward begins: nothing has arrived."""
        self.arrived = [0] * len(self.arrived)
        self.awaited = len(self.arrived)
        self.defined = [False] * len(self.arrived)
        self.nested = 0
        self.collected = False

    def collect(self) -> None:
        """What this backward brings has arrived."""
        self.collected = True
        if not self.partitioned:
            self.absorb()

    def absorb(self) -> None:
        """Add autograd's gradients to the replicated sum, while that is this rank's own."""
        if self.reduced:
            return
        if self.fresh or any(parameter.grad is not None for parameter in self.flat.parameters):
            self.take_into(self.accumulated, add=not self.fresh)
            self.fresh = False

    def take_into(self, buffer: torch.Tensor, *, add: bool) -> None:
        """Move autograd's gradients into a buffer shaped like the whole flat; missing ones count as zeros."""
        present, grads, missing = [], [], []
        for parameter, part in zip(self.flat.parameters, self._parts_of(buffer), strict=True):
            grad = parameter.grad
            if grad is None:
                missing.append(part)
            else:
                present.append(part)
                if self.flat.distributed:
                    grad = local_gradient(parameter, grad)
                grad = grad if grad.layout is torch.strided else grad.to_dense()
                grads.append(grad.detach() if grad.requires_grad else grad)
                parameter.grad = None
        if present:
            (torch._foreach_add_ if add else torch._foreach_copy_)(present, grads)
        if missing and not add:
            torch._foreach_zero_(missing)

    def _parts_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of `buffer`, one for each parameter. A step meets the same few buffers again and again."""
        parts = self._parts.get(address_of(buffer))
        if parts is None:
            if len(self._parts) >= 8:
                self._parts.clear()
            parts = [buffer[slot.start : slot.stop].view(slot.shape) for slot in self.flat.layout.slots]
            self._parts[address_of(buffer)] = parts
        return parts

    def forget(self) -> None:
        """Buffers are about to be freed: no views of them are kept."""
        self._parts.clear()

    def drop(self) -> None:
        self.spent()
        self.forget()
        for parameter in self.flat.parameters:
            parameter.grad = None
        self.end_window()
        self.begin()

    def end_window(self) -> None:
        self.fresh = True
        self.reduced = False
        self.expected = 1
        self.absent = self._every

    @property
    def device_nbytes(self) -> int:
        """Bytes that rest on the device."""
        return self.accumulated.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes that rest on the host, apart from those."""
        apart = 0 if self._owned is None or self.stays else self._owned.nbytes
        return apart + (0 if self._aside is None else self._aside.nbytes)

    def close(self) -> None:
        self.drop()
        self.give_back()
        self.accumulated = self.own_sum = torch.empty(0)
        self._aside = None
