"""One flat's gradient in an accumulation window: what has arrived, the sum so far, and where its update reads it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from wherry import native
from wherry.errors import WherryError
from wherry.parallel.partition import local_gradient
from wherry.sharding.autograd import Backward, accumulates, backward_task
from wherry.sharding.unit import Flat
from wherry.tickets import DONE, Ticket
from wherry.tiers.buffers import untouched_zeros
from wherry.tiers.streams import CopiesDown

# Off the host, squares are summed by blocks of this many elements and then in float64: the sum then does not depend on
# how a flat is cut into shards.
BLOCK = 128

Squares = float | torch.Tensor


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


class Arrivals(Protocol):
    """Told of the gradients that a backward brings."""

    backward: Backward

    def inside_backward(self) -> bool:
        """A hook has been called. False inside a backward that runs within another."""

    def arrived_nested(self) -> None:
        """It was such a backward that has brought a gradient."""

    def all_arrived(self, gradient: FlatGradient) -> None:
        """All gradients of a flat have come."""


def sum_squares(tensor: torch.Tensor) -> Squares:
    """The sum of squares in float64. On a device the result stays there: nothing waits for it."""
    if tensor.dtype == torch.float64:
        return tensor.square().sum()
    if tensor.device.type == "cpu":
        return native.sum_squares(tensor)
    return torch.linalg.vector_norm(tensor.view(-1, BLOCK), dim=1, dtype=torch.float32).double().square().sum()


class FlatGradient:
    """The gradient of one trainable flat through an accumulation window.

    `accumulated` is the sum on the device: of the whole flat where gradients are replicated, of the shard where they
    are partitioned, and nothing where no sum is kept there. `owned` is the part that this rank updates, where the
    update finds it; it is complete once the boundary's reduction and `landing` are.

    `counted` are the ranges of this rank's part that count for the norm; None: all of it counts.
    """

    def __init__(
        self,
        index: int,
        flat: Flat,
        *,
        partitioned: bool,
        policy: GradientPolicy,
        way: Landing,
        copies: CopiesDown,
        counted: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        # Its place among all of them.
        self.index = index
        self.flat = flat
        self.way = way
        self._copies = copies
        self._host = copies.link.host
        self._counted = counted
        # Updated in the backward, it has memory only until then, and not the same in every step.
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
            self.own_sum = self.accumulated[flat.own]
        self._sum_parts: list[torch.Tensor] = []
        if self.keeps and not self.partitioned:
            self._sum_parts = [self.accumulated[slot.start : slot.stop].view(slot.shape) for slot in layout.slots]
        # A single micro-batch is kept as it came over the wire.
        self.owned_dtype = self.dtype if self.keeps or policy.accumulates else self.wire_dtype
        self._owned: torch.Tensor | None = None
        self._give: Callable[[], None] | None = None
        if not self.stays and not self.brief:
            self._borrow()
        # On the host a second buffer takes turns with `owned`; elsewhere it is what the update has a copy in.
        self._spare: tuple[torch.Tensor, Callable[[], None]] | None = None
        # Whether an update reads `owned` that may not have ended when the next window's gradients come.
        self._lent = False
        # What still has to happen until `owned` is complete: a copy, and perhaps an addition.
        self.landing: Ticket = DONE
        # No micro-batch of the window has been added yet: the next one overwrites.
        self.fresh = True
        # `accumulated` holds sums over the ranks already: what still comes is reduced by itself and added to `owned`.
        self.reduced = False
        # None: to be taken from `owned`, once that is complete.
        self.sum_squares: Squares | None = 0.0
        self._parts: dict[int, list[torch.Tensor]] = {}
        self._gaps = layout.gaps()
        # How often the gradient of each parameter arrives in one backward.
        self._expected = 1
        # How often one did in the last backward, by backwards within it: those of reentrant checkpoints.
        self.nested = 0
        # How often each parameter's gradient has arrived in this backward, and how many have yet to.
        self._arrived = [0] * len(flat.parameters)
        self._awaited = len(flat.parameters)
        # Whether there was one: what arrives may be undefined, as where a function gives None for a weight.
        self._defined = [False] * len(flat.parameters)
        self._every = range(len(flat.parameters))
        # The parameters that no backward of the window has brought a gradient for.
        self.absent: Sequence[int] = self._every
        self.collected = False
        # Whether one came after that, as of a module that two reentrant checkpoints share.
        self.late = False

    # What arrives.

    def begin(self) -> None:
        """A backward begins: nothing has arrived."""
        self._arrived = [0] * len(self._arrived)
        self._awaited = len(self._arrived)
        self._defined = [False] * len(self._arrived)
        self.nested = 0
        self.collected = False
        self.late = False

    def expect(self, times: int) -> None:
        """How often the gradient of each parameter is to arrive in the next backward."""
        self._expected = times

    def arrival(self, index: int, told: weakref.ref[Arrivals]) -> Callable[[nn.Parameter], None]:
        """The hook of one parameter. It runs as often as there are parameters: every call in it counts.

        A parameter holds it in C++, where the garbage collector sees no cycle: it may refer to nothing else.
        """
        mine = weakref.ref(self)

        def arrived(parameter: nn.Parameter) -> None:
            gradient, hooks = mine(), told()
            if gradient is None or hooks is None:
                return
            backward = hooks.backward
            # What `inside_backward` would find, without its call.
            known = backward.running and backward_task() == backward.task and not torch.is_grad_enabled()
            nested = not (known or hooks.inside_backward())
            times = gradient._arrived
            times[index] += 1
            if parameter.grad is not None:
                gradient._defined[index] = True
            if nested:
                gradient.nested = max(gradient.nested, times[index])
                hooks.arrived_nested()
            if gradient.collected:
                gradient.late = True
            elif times[index] == gradient._expected:
                gradient._awaited -= 1
                if not gradient._awaited:
                    hooks.all_arrived(gradient)

        return arrived

    def put(self, given: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Gradients that no backward brings."""
        for index, parameter in enumerate(self.flat.parameters):
            if parameter in given:
                parameter.grad, self._defined[index] = given[parameter], True

    @property
    def has_arrived(self) -> bool:
        """Whether this backward has brought any of it."""
        return any(self._arrived)

    def comes(self) -> bool:
        """Whether the backward that runs has yet to bring some of it."""
        return any(
            not times and accumulates(parameter)
            for times, parameter in zip(self._arrived, self.flat.parameters, strict=True)
        )

    def note_arrivals(self) -> None:
        """A backward has ended."""
        if all(self._defined):
            self.absent = ()
        elif self.absent:
            self.absent = [index for index in self.absent if not self._defined[index]]

    def collect(self) -> None:
        """What autograd has brought is added to the replicated sum, as long as that is this rank's own."""
        self.collected = True
        if self.partitioned or self.reduced:
            return
        if self.fresh or any([parameter.grad is not None for parameter in self.flat.parameters]):
            self._take_into(self._sum_parts, add=not self.fresh)
            self.fresh = False

    def fill(self, buffer: torch.Tensor) -> None:
        """Move autograd's gradients into a buffer of the whole flat, whose other values are zeros."""
        self._take_into(self._parts_of(buffer), add=False)
        for start, stop in self._gaps:
            buffer[start:stop].zero_()

    def _take_into(self, parts: Sequence[torch.Tensor], *, add: bool) -> None:
        """Move autograd's gradients to the parts of a flat; missing ones count as zeros."""
        present, grads, missing = [], [], []
        with DisableTorchFunctionSubclass():  # the weights may be released by now
            for parameter, part in zip(self.flat.parameters, parts, strict=True):
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
        memory = buffer.untyped_storage()._cdata
        if memory not in self._parts:
            if len(self._parts) >= 8:
                self._parts.clear()
            self._parts[memory] = [buffer[slot.start : slot.stop].view(slot.shape) for slot in self.flat.layout.slots]
        return self._parts[memory]

    # What is reduced, and where it lands.

    @property
    def stays(self) -> bool:
        """Whether the update finds it on the device."""
        return self.way is Landing.STAYS

    @property
    def takes_directly(self) -> bool:
        """Whether the next reduction may write where the sum is kept."""
        return self.keeps and self.fresh and self.dtype == self.wire_dtype

    def add(self, shard: torch.Tensor, give: Callable[[], None]) -> None:
        """Add a reduced micro-batch; the window's first overwrites. `give` gives `shard` back to its pool."""
        fresh, self.fresh = self.fresh, False
        if self.keeps:
            if shard is not self.accumulated:  # else it was reduced to where it belongs
                (self.own_sum.copy_ if fresh else self.own_sum.add_)(shard)
                give()
        elif not self.stays:
            # Measured on its way out: if it is the only one, nobody need read it again for the norm.
            self.sum_squares = self._measure(shard) if fresh else None
            self._send_down(shard, give, fresh=fresh)
        elif fresh:
            self.release()
            self._owned, self._give = shard, give
        else:
            self.owned.add_(shard)
            give()

    def _send_down(self, shard: torch.Tensor, give: Callable[[], None], *, fresh: bool) -> None:
        """`landing` says when it is added on the host; `give` is called when `shard` may be written."""
        if self._owned is None:
            self._borrow()
        before, owned = self.landing, self._writable()
        if fresh and owned.dtype == shard.dtype:
            before.wait()
            self.landing = self._copies.begin(owned, shard, give)
            return
        staging = self._host.take(shard.nbytes)
        copied = self._copies.begin(staging.view(shard.dtype), shard, give)

        def land() -> None:
            try:
                before.wait()
                copied.wait()
                (native.cast_copy if fresh else native.accumulate)(owned, staging.view(shard.dtype))
            finally:
                self._host.give(staging)

        self.landing = self._copies.then(land)

    def land(self) -> None:
        """The window's sum over the ranks is there: measure it, and send it to where its update reads it."""
        if self.keeps:
            self.sum_squares = self._measure(self.own_sum)
            if self.way is Landing.COPIED:
                self.landing = self._copies.link.down(self._writable(), self.own_sum)
        elif self.stays:
            self.sum_squares = self._measure(self.owned)

    def note_reduced(self) -> None:
        """The window's sum is one over the ranks, or about to be."""
        self.reduced = True

    def squares(self) -> Squares:
        """The sum of squares of what counts for the norm of this rank's part, measured unless it has been."""
        if self.sum_squares is None:
            self.landing.wait()
            self.sum_squares = self._measure(self.owned)
        return self.sum_squares

    def all_squares(self) -> Squares:
        """The squares of all of this rank's part, with what counts for the norm on another tensor-parallel rank."""
        return self.squares() if self._counted is None else sum_squares(self.owned)

    def _measure(self, part: torch.Tensor) -> Squares:
        if self._counted is None:
            return sum_squares(part)
        return sum((sum_squares(part[start:stop]) for start, stop in self._counted), start=0.0)

    @property
    def owned(self) -> torch.Tensor:
        if self.keeps and self.stays:
            return self.own_sum
        if self._owned is None:
            raise self.gone()
        return self._owned

    def gone(self) -> WherryError:
        """The error of who looks for what has memory no longer."""
        return WherryError(
            f"{self.flat.name}: its gradients are gone, as the update uses them in the backward already; set "
            '"wherry": {"update_policy": "before_use"} to keep them until the next step'
        )

    def part(self, index: int) -> torch.Tensor:
        """What this rank has of one parameter's gradient, flat; empty if that is another rank's."""
        self.landing.wait()
        layout = self.flat.layout
        start, stop, place = layout.overlap(layout.slots[index], self.flat.rank) or (0, 0, 0)
        return self.owned[place : place + stop - start]

    @property
    def own_so_far(self) -> torch.Tensor:
        """This rank's part of the sum, before it has landed where the update reads it."""
        return self.own_sum if self.keeps else self.owned

    def sum_of(self, index: int) -> torch.Tensor:
        """One parameter's part of a sum that is replicated."""
        return self._sum_parts[index]

    def part_so_far(self, index: int) -> torch.Tensor:
        """As `part`, of that."""
        self.landing.wait()
        layout = self.flat.layout
        start, stop, place = layout.overlap(layout.slots[index], self.flat.rank) or (0, 0, 0)
        return self.own_so_far[place : place + stop - start]

    def replace(self, index: int, value: torch.Tensor) -> None:
        """Put what this rank has of `value` in the place of one parameter's gradient."""
        layout = self.flat.layout
        start, stop, _ = layout.overlap(layout.slots[index], self.flat.rank) or (0, 0, 0)
        self.part(index).copy_(value.flatten()[start:stop])
        self.sum_squares = None

    def lend(self) -> tuple[torch.Tensor, Ticket]:
        """For an update that still reads it while those of the next step come: `owned`, and what completes it."""
        if not self.stays:
            self._lent = True
            return self.owned, self.landing
        if self._spare is None:
            self._spare = torch.empty_like(self.owned), _keep
        return self._spare[0].copy_(self.owned), DONE

    def _writable(self) -> torch.Tensor:
        """`owned`, for the next window: what an update has been lent stays as it is."""
        if self._lent:
            spare, mine = self._spare, (self.owned, self._give or _keep)
            if spare is None:
                self._borrow()
            else:
                self._owned, self._give = spare
            self._spare, self._lent = mine, False
        return self.owned

    def _borrow(self) -> None:
        memory = self._host.take(self.flat.layout.shard_numel * self.owned_dtype.itemsize)
        self._owned = memory.view(self.owned_dtype)
        self._give = lambda: self._host.give(memory)

    def spent(self) -> None:
        """The update has read the gradients."""
        if self.brief:
            self.release()

    def release(self) -> None:
        give, self._give = self._give, None
        if give is not None:
            self._owned = None
            give()

    # The end of a window.

    def end_window(self) -> None:
        self.fresh = True
        self.reduced = False
        self._expected = 1
        self.absent = self._every

    def drop(self) -> None:
        """Its landing has been waited for."""
        self.landing = DONE
        self.spent()
        self.forget()
        for parameter in self.flat.parameters:
            parameter.grad = None
        self.end_window()
        self.begin()

    def forget(self) -> None:
        """Buffers are about to be freed: no views of them are kept."""
        self._parts.clear()

    @property
    def device_nbytes(self) -> int:
        """Bytes that rest on the device."""
        return self.accumulated.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes that rest on the host, apart from those."""
        apart = 0 if self._owned is None or self.stays else self._owned.nbytes
        return apart + (0 if self._spare is None else self._spare[0].nbytes)

    def close(self) -> None:
        self.drop()
        self.release()
        self.accumulated = self.own_sum = torch.empty(0)
        self._sum_parts.clear()
        spare, self._spare, self._lent = self._spare, None, False
        if spare is not None:
            spare[1]()


def _keep() -> None:
    """What gives back memory that is nobody else's."""
