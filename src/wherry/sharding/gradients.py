"""From autograd's gradients to the part of them that this rank updates: arrival, accumulation, reduction, norm."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from wherry import native
from wherry.errors import DivergenceError, WherryError
from wherry.fake import host_value, is_fake
from wherry.observe.spans import span
from wherry.parallel import merged
from wherry.parallel.comm import SoloComm
from wherry.parallel.merged import Merging
from wherry.parallel.topology import Topology
from wherry.placement import Resting
from wherry.sharding.flat_gradient import FlatGradient, GradientPolicy, Landing
from wherry.sharding.layout import Slot
from wherry.sharding.unit import Flat
from wherry.tiers.buffers import DevicePool
from wherry.tiers.streams import Link
from wherry.tiers.tickets import CallbackTicket, Ticket

# Reductions under way at once: one travels while the next is filled.
IN_FLIGHT = 2


@dataclass
class _Reduction:
    """What is to be reduced, where this rank's part of the sum goes, and what is done with it then."""

    gradient: FlatGradient
    owned: torch.Tensor
    whole: torch.Tensor
    finish: Callable[[], None]


@dataclass
class _Crossing:
    """What is to be summed over the replicas as well, in place, and what is done with it then."""

    gradient: FlatGradient
    part: torch.Tensor
    finish: Callable[[], None]


@dataclass
class _Travelling:
    ticket: Ticket
    finish: Callable[[], None]


class Gradients:
    """The gradients of all trainable flats.

    Reductions are launched in one order on every rank, whatever order gradients arrive in: a flat waits for its turn,
    and what has not arrived by the end of the backward counts as zeros.
    """

    def __init__(
        self,
        flats: Iterable[Flat],
        topology: Topology,
        gradients: Resting,
        optimizer: Resting,
        policy: GradientPolicy,
        sum_squares: Callable[[torch.Tensor], float | torch.Tensor],
        link: Link,
        way_of: Callable[[Flat], Landing],
        merging: Merging | None = None,
    ) -> None:
        self.comm = topology.data
        # The ranks that share out one sum, and those that hold the same part of it.
        self._shards = topology.shards
        self._replicas = topology.replicas if optimizer.partitioned else SoloComm()
        self._merging = merging or Merging(0)
        # Small reductions whose turn has come, and which wait to travel together.
        self._waiting: list[_Reduction] = []
        self._tensor, self._pipe = topology.tensor, topology.pipe
        self.policy = policy
        self._optimizer_partitioned = optimizer.partitioned
        self._sum_squares = sum_squares
        self._partitioned = gradients.partitioned and self._shards.size > 1
        self.link = link
        self.all = [
            FlatGradient(flat, partitioned=self._partitioned, policy=policy, way=way_of(flat), link=link)
            for flat in flats
            if flat.trainable
        ]
        # Told of every flat whose gradient is complete at the boundary, `landing` apart.
        self.on_complete: Callable[[FlatGradient], None] | None = None
        # Told before buffers that nobody uses are freed.
        self.on_trim: Callable[[], None] = lambda: None
        self._told: set[FlatGradient] = set()
        # Those that more may come for in this backward: they are complete when it ends.
        self._held: dict[FlatGradient, None] = {}
        # The flats that backwards within a backward have brought late gradients for; None before the first of these.
        self._late_before: set[FlatGradient] | None = None
        self._trims = False
        # Copies down whose sources have not been given back: one travels while the next is filled.
        self._descending: deque[Callable[[], None]] = deque()
        # Until the first backward has shown better: as built, backwards. The root unit, built first, comes last.
        self._order = list(reversed(range(len(self.all))))
        self._completed: list[int] = []
        self._order_agreed = self.comm.size == 1
        self._next = 0
        self._index = {gradient: i for i, gradient in enumerate(self.all)}
        self._travelling: deque[_Travelling] = deque()
        # On their way to be summed over the replicas, and those that set out next.
        self._between: deque[_Travelling] = deque()
        self._crossing: list[_Crossing] = []
        self._pools: dict[torch.device, DevicePool] = {}
        self._late: set[int] = set()
        self.nested = False
        self.one_path = True
        self._any_absent = False
        self.boundary = False
        # How many micro-batches the last backward was of.
        self.micro_batches = 1
        # Gradients of parameters that this backward has brought.
        self.arrivals = 0

    def let_go(self) -> None:
        """A window begins: what is left of the one before is not needed any more."""
        for gradient in self.all:
            if gradient.fresh:
                gradient.loose = None

    # A backward, from begin to finish.

    def begin(self, *, boundary: bool, micro_batches: int = 1) -> None:
        self.boundary = boundary
        self.micro_batches = micro_batches
        self._next = 0
        self._completed = []
        self._late = set()
        self._told.clear()
        self.arrivals = 0
        if self._trims:
            self._trim()
        for gradient in self.all:
            if gradient.way is Landing.COPIED:
                self.link.order(gradient.landing)  # what was copied down may now be overwritten
            gradient.begin()

    def complete(self, gradient: FlatGradient) -> None:
        """All gradients of a flat have arrived."""
        index = self._index[gradient]
        self._completed.append(index)
        gradient.collected = True
        if not gradient.partitioned:
            gradient.absorb()
        self._launch_in_order()

    def arrived_late(self, gradient: FlatGradient) -> None:
        """A gradient came after its flat was collected, as of a module that two reentrant checkpoints share."""
        self._late.add(self._index[gradient])

    def finish(self) -> None:
        """The backward is over: collect what is incomplete, and wait for every reduction."""
        for index in self._order[self._next :]:
            gradient = self.all[index]
            if not gradient.collected:
                gradient.collected = True
                if not gradient.partitioned:
                    gradient.absorb()
            self._launch(gradient)
        self._next = len(self._order)
        self._send_waiting()
        self._drain(0)
        self._collect_late()
        if self._held:
            self._tell_of_held()
        for gradient in self.all:
            gradient.note_arrivals()
        self._agree_on_order()

    def complete_window(self) -> None:
        """Reduce what the last backward has not, because it was not known to be the window's last."""
        if self.boundary:
            return
        self.boundary = True
        for index in self._order:
            gradient = self.all[index]
            if self._replicas.size > 1 and gradient.partitioned:
                self._conclude(gradient)
                if self._crossing:
                    self._cross()
            elif gradient.partitioned or gradient.reduced:
                self._summed(gradient)
            else:
                self._drain(IN_FLIGHT - 1)
                self._reduce_accumulated(gradient)
        self._send_waiting()
        self._drain(0)
        self._tell_of_held()

    def choose(self, policy: GradientPolicy, way_of: Callable[[Flat], Landing]) -> None:
        """Sum and land gradients in another way from here on, between two windows."""
        self.drop()
        self.policy = policy
        flats = [gradient.flat for gradient in self.all]
        # The sums so far are given back before there is memory for others. Hooks know the list: it stays.
        self._forget()
        self._trim()
        self.all += [
            FlatGradient(flat, partitioned=self._partitioned, policy=policy, way=way_of(flat), link=self.link)
            for flat in flats
        ]
        self._index = {gradient: i for i, gradient in enumerate(self.all)}
        self._late_before = None

    def rest(self) -> None:
        """Nothing is on its way any more, and no memory is kept for what is to come."""
        while self._descending:
            self._descending.popleft()()
        for gradient in self.all:
            gradient.landing.wait()
        self._trim()

    def _trim(self) -> None:
        self._trims = False
        self.on_trim()
        for gradient in self.all:
            gradient.forget()
        for pool in self._pools.values():
            pool.trim()
        self.link.host.trim()

    def drop(self) -> None:
        """Forget the window's gradients, those on their way included."""
        self._travelling_wait_quietly()
        self._held.clear()
        for gradient in self.all:
            gradient.drop()

    def end_window(self) -> None:
        """The update has used the gradients; the next micro-batch starts a new window."""
        for gradient in self.all:
            gradient.end_window()

    def resume(self, *, boundary: bool) -> None:
        """The sums of a window have been put back from a checkpoint; `boundary`: no micro-batch of it is to come."""
        self.boundary = boundary
        for gradient in self.all:
            gradient.absent = ()  # which were missing is not in a checkpoint: their zeros count
            if boundary:
                gradient.reduced = gradient.reduced or gradient.partitioned
                self._summed(gradient)
        self._tell_of_held()

    def sum_squares(self, journal: int = 0, path: int = 0) -> float | torch.Tensor:
        """The squared norm of the window's gradients as they are: not unscaled, not averaged.

        `journal` is a digest of what this rank has gathered; ranks whose digests differ have mixed up their weights.
        `path` is one of the units that it ran, which may differ: `one_path` says afterwards whether it did.
        """
        self.one_path = True
        self._any_absent = False
        total: float | torch.Tensor = 0.0
        loose: list[native.Bundle] = []
        for gradient in self.all:
            self._any_absent = self._any_absent or bool(gradient.absent)
            if gradient.sum_squares is not None:
                total = total + gradient.sum_squares
            elif (pieces := gradient.pieces()) is not None:
                loose.append(pieces)
            else:
                total = total + self._squares(gradient)
        if loose:
            total = total + native.sum_squares_of(loose)
        partitioned = self._optimizer_partitioned and self.comm.size > 1
        if not partitioned and self._tensor.size == self._pipe.size == 1:
            return total
        device = self.all[0].flat.whole.device if self.all else torch.device("cpu")
        digests = (journal, path) if journal else ()
        powers = [power for value in digests for power in (float(value), float(value) ** 2)]
        # Replicas hold the same sums: those of the first of them count.
        counted = host_value(total) if self._replicas.rank == 0 else 0.0
        mine = [counted, float(self._any_absent), *powers]
        sums = torch.tensor(mine, dtype=torch.float64, device=device)
        if partitioned:
            self.comm.all_reduce(sums, label="the gradients' norm").wait()
        for axis in (self._tensor, self._pipe):
            axis.all_reduce(sums[:1], label="the gradients' norm").wait()
        if is_fake(sums):
            return sums[0]
        values = self.comm.read(sums)
        if journal and partitioned:
            # The squares sum to the square of the sum only if all ranks have the same.
            if values[2] ** 2 != values[3] * self.comm.size:
                raise DivergenceError(
                    f"the ranks gathered different units in this step (rank {self.comm.rank} has digest {journal}), so "
                    "their weights are mixed up and the step is not made. A rank may skip units that others run, but "
                    "not run them in another order, or oftener, or after many steps in which all ranks ran the same: "
                    'put what differs into a larger unit, by "wherry": {"unit_classes": [...]}'
                )
            self.one_path = values[4] ** 2 == values[5] * self.comm.size
        self._any_absent = values[1] > 0
        return values[0]

    def absent(self) -> dict[Flat, list[int]]:
        """The parameters, by flat and place, that no rank has a gradient for in this window. After `sum_squares`."""
        if self.comm.size > 1 and not self._optimizer_partitioned:
            seen = torch.tensor([float(self._any_absent)], device=self.all[0].flat.whole.device)
            self.comm.all_reduce(seen, "max", "missing gradients").wait()
            self._any_absent = self.comm.read(seen)[0] > 0
        if not self._any_absent:
            return {}
        there = torch.ones(sum(len(gradient.flat.parameters) for gradient in self.all))
        first = 0
        for gradient in self.all:
            for index in gradient.absent:
                there[first + index] = 0
            first += len(gradient.flat.parameters)
        there = there.to(self.all[0].flat.whole.device)
        self.comm.all_reduce(there, "max", "missing gradients").wait()
        flags, first = self.comm.read(there), 0
        missing: dict[Flat, list[int]] = {}
        for gradient in self.all:
            gone = [index for index in gradient.absent if not flags[first + index]]
            if gone:
                missing[gradient.flat] = gone
            first += len(gradient.flat.parameters)
        return missing

    def squares_by_flat(self) -> dict[Flat, float]:
        """The squared norm by flat, over the ranks that share it out."""
        device = self.all[0].flat.whole.device if self.all else torch.device("cpu")
        values = torch.tensor([float(self._squares(g)) for g in self.all], dtype=torch.float64, device=device)
        if self._optimizer_partitioned:
            self._shards.all_reduce(values).wait()
        self._tensor.all_reduce(values).wait()
        return {gradient.flat: value for gradient, value in zip(self.all, values.tolist(), strict=True)}

    def whole(self, name: str) -> torch.Tensor:
        """The window's summed gradient of one parameter, from all ranks' parts."""
        gradient, slot = self._place_of(name)
        gradient.landing.wait()
        layout, device = gradient.flat.layout, gradient.flat.whole.device
        if layout.ranks == 1:
            return self._join(gradient.of_parameter(layout.slots.index(slot)).to(device), slot)
        owned = gradient.owned.to(device)
        whole = torch.empty(layout.numel, dtype=owned.dtype, device=device)
        self._shards.all_gather(whole, owned.contiguous()).wait()
        return self._join(whole[slot.start : slot.stop].view(slot.shape), slot)

    def _join(self, local: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The logical gradient, from the parts of all tensor-parallel ranks."""
        if slot.part is None or slot.part.global_shape is None or slot.part.offsets is None:
            return local
        joined = local.new_empty(slot.part.global_shape)
        for offsets, part in self._tensor.gather_objects((slot.part.offsets, local.cpu())):
            joined[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part.to(local.device)
        return joined

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Put `value` in the place of the window's summed gradient of one parameter, once it is reduced."""
        gradient, slot = self._place_of(name)
        layout = gradient.flat.layout
        part = layout.overlap(slot, gradient.flat.rank)
        gradient.landing.wait()
        if part is not None:
            start, stop, place = part
            gradient.owned[place : place + stop - start].copy_(value.flatten()[start:stop])
        gradient.sum_squares = None

    def _place_of(self, name: str) -> tuple[FlatGradient, Slot]:
        slots = {slot.name: (gradient, slot) for gradient in self.all for slot in gradient.flat.layout.slots}
        if name not in slots:
            close = difflib.get_close_matches(name, slots, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise WherryError(f"gradients: no trainable parameter is named {name!r}{hint}")
        return slots[name]

    def _forget(self) -> None:
        for gradient in self.all:
            gradient.close()
        self.all.clear()
        self._index.clear()
        self._told.clear()

    def close(self) -> None:
        self.drop()
        self._forget()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    # Reduction.

    def _launch_in_order(self) -> None:
        while self._next < len(self._order):
            gradient = self.all[self._order[self._next]]
            if not gradient.collected:
                return
            self._launch(gradient)
            self._next += 1

    def _launch(self, gradient: FlatGradient) -> None:
        if gradient.partitioned:
            self._drain(IN_FLIGHT - 1)
            self._reduce_shard(gradient)
        elif gradient.reduced:
            self._reduce_more(gradient)
        elif self.boundary:
            self._drain(IN_FLIGHT - 1)
            self._reduce_accumulated(gradient)

    def _reduce_shard(self, gradient: FlatGradient) -> None:
        """One micro-batch's gradient, reduced, is added to this rank's part."""
        pool = self._pool(gradient)
        whole = self._filled(gradient, pool)
        fresh, gradient.fresh = gradient.fresh, False
        direct = gradient.keeps and fresh and gradient.dtype == gradient.wire_dtype
        if direct:
            shard = gradient.accumulated
        elif self._shards.size == 1:
            shard = whole
        else:
            shard = pool.take(gradient.flat.layout.shard_numel, gradient.wire_dtype)

        conclude = self._summed if self._replicas.size == 1 else self._conclude

        def add() -> None:
            if not direct:
                self._add(gradient, shard, fresh=fresh)
            if self.boundary:
                conclude(gradient)

        def finish() -> None:
            if shard is not whole:
                pool.give(whole)
            if self._replicas.size > 1 and self._crosses_alone(gradient):
                self._crossing.append(_Crossing(gradient, shard, add))
            else:
                add()

        self._send(_Reduction(gradient, shard, whole, finish))

    def _send(self, reduction: _Reduction) -> None:
        """Set a reduction going; a small one may wait for others."""
        if self.comm.size == 1 or not self._merging.takes(reduction.whole):
            self._travel([reduction])
            return
        if not self._merging.fits([other.whole for other in self._waiting], reduction.whole):
            self._send_waiting()
        self._waiting.append(reduction)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._travel(waiting)

    def _travel(self, reductions: list[_Reduction]) -> None:
        label = merged.name_of([reduction.gradient.flat for reduction in reductions])
        wholes = [reduction.whole for reduction in reductions]
        with span("reduce", label):
            if self._optimizer_partitioned:
                owned = [reduction.owned for reduction in reductions]
                ticket = merged.reduce_scatter(self._shards, owned, wholes, label)
            else:
                ticket = merged.all_reduce(self.comm, wholes, label)
        self._travelling += [_Travelling(ticket, reduction.finish) for reduction in reductions]

    # Over the replicas.

    def _crosses_alone(self, gradient: FlatGradient) -> bool:
        """Whether a micro-batch is summed over the replicas before it is added: the sum it joins is, or is not here."""
        return gradient.reduced or not gradient.keeps

    def _conclude(self, gradient: FlatGradient) -> None:
        """The window's reductions are added up within the group: the sum crosses to the replicas, once."""
        if gradient.keeps and not gradient.reduced:
            self._crossing.append(self._crossing_of(gradient))
        else:
            self._summed(gradient)
        gradient.reduced = True

    def _crossing_of(self, gradient: FlatGradient) -> _Crossing:
        own = gradient.own_sum
        if gradient.dtype == gradient.wire_dtype:
            return _Crossing(gradient, own, partial(self._summed, gradient))
        pool = self._pool(gradient)
        part = pool.take(own.numel(), gradient.wire_dtype).copy_(own)

        def finish() -> None:
            own.copy_(part)
            pool.give(part)
            self._summed(gradient)

        return _Crossing(gradient, part, finish)

    def _cross(self) -> None:
        """Set going what waits to be summed over the replicas, small ones together."""
        waiting, self._crossing = self._crossing, []
        together: list[_Crossing] = []
        for crossing in waiting:
            small = self._merging.takes(crossing.part)
            fits = small and self._merging.fits([other.part for other in together], crossing.part)
            if together and not fits:
                self._launch_crossing(together)
                together = []
            together.append(crossing)
        self._launch_crossing(together)

    def _launch_crossing(self, crossing: list[_Crossing]) -> None:
        self._drain_between(IN_FLIGHT - 1)
        label = merged.name_of([each.gradient.flat for each in crossing])
        with span("reduce", label):
            ticket = merged.all_reduce(self._replicas, [each.part for each in crossing], label)
        self._between += [_Travelling(ticket, each.finish) for each in crossing]

    def _drain_between(self, keep: int) -> None:
        while len(self._between) > keep:
            self._arrive(self._between.popleft())

    @staticmethod
    def _arrive(travelling: _Travelling) -> None:
        travelling.ticket.wait()
        travelling.finish()

    # The sum.

    def _add(self, gradient: FlatGradient, shard: torch.Tensor, *, fresh: bool) -> None:
        """Add a reduced micro-batch to where this rank's sum is; `shard` goes back to its pool."""
        give = partial(self._pool(gradient).give, shard)
        if gradient.keeps:
            (gradient.own_sum.copy_ if fresh else gradient.own_sum.add_)(shard)
            give()
        elif gradient.stays:
            if fresh:
                gradient.keep(shard, give)
            else:
                gradient.owned.add_(shard)
                give()
        else:
            self._stream(gradient, shard, give, fresh=fresh)

    def _stream(self, gradient: FlatGradient, shard: torch.Tensor, give: Callable[[], None], *, fresh: bool) -> None:
        """Send a reduced micro-batch to the host; it is added there when it has come."""
        # Measured on its way out: if it is the only one, nobody need read it again for the norm.
        gradient.sum_squares = self._measure(gradient, shard) if fresh else None
        owned = gradient.host_memory()
        gradient.landing.wait()
        if fresh and owned.dtype == shard.dtype:
            gradient.landing = copied = self.link.down(owned, shard)
        else:
            staging = self.link.host.take(shard.nbytes)
            copied = self.link.down(staging.view(shard.dtype), shard)

            def land() -> None:
                copied.wait()
                if fresh:
                    native.cast_copy(owned, staging.view(shard.dtype))
                else:
                    native.accumulate(owned, staging.view(shard.dtype))
                self.link.host.give(staging)

            gradient.landing = CallbackTicket(land, copied.done)

        def let_go() -> None:
            self.link.order(copied)
            give()

        self._descending.append(let_go)
        while len(self._descending) > IN_FLIGHT:
            self._descending.popleft()()

    def _filled(self, gradient: FlatGradient, pool: DevicePool) -> torch.Tensor:
        """A buffer with autograd's gradients of the whole flat, ready for the wire."""
        whole = pool.take(gradient.flat.layout.numel, gradient.wire_dtype)
        gradient.take_into(whole, add=False)
        for start, stop in gradient.flat.layout.gaps():
            whole[start:stop].zero_()
        if self.policy.predivide != 1.0:
            whole.div_(self.policy.predivide)
        return whole

    def _reduce_accumulated(self, gradient: FlatGradient) -> None:
        """The window's replicated sum is reduced where it lies, in the wire's dtype if that is another."""
        if self.comm.size == 1:
            self._summed(gradient)
            return
        whole, owned = gradient.accumulated, gradient.own_sum
        if self.policy.predivide != 1.0:
            whole.div_(self.policy.predivide)
        conclude = self._summed if self._replicas.size == 1 else self._conclude
        cast = gradient.dtype != gradient.wire_dtype
        if cast:
            whole = self._pool(gradient).take(whole.numel(), gradient.wire_dtype).copy_(whole)
            owned = whole[slice(*gradient.flat.layout.shard_range(gradient.flat.rank))]

        def finish() -> None:
            if cast:
                gradient.own_sum.copy_(owned)
                self._pool(gradient).give(whole)
            if self.boundary:
                gradient.reduced = self._replicas.size == 1
                conclude(gradient)

        self._send(_Reduction(gradient, owned, whole, finish))

    def _drain(self, keep: int) -> None:
        while len(self._travelling) > keep:
            self._arrive(self._travelling.popleft())
        if self._crossing:
            self._cross()
        if keep == 0 and self._between:
            self._drain_between(0)

    def _summed(self, gradient: FlatGradient) -> None:
        """The window's sum is complete: measure it, and send it to where its update reads it."""
        if gradient.way is Landing.LOOSE:
            gradient.sum_squares = None  # taken of all in one pass
        elif gradient.keeps:
            gradient.sum_squares = self._measure(gradient, gradient.own_sum)
            if gradient.way is Landing.COPIED:
                gradient.landing = self.link.down(gradient.owned, gradient.own_sum)
        elif gradient.stays:
            gradient.sum_squares = self._measure(gradient, gradient.owned)
        if self.on_complete is None:
            return
        if self.nested and (self._late_before is None or gradient in self._late_before):
            self._held[gradient] = None
        else:
            self._told.add(gradient)
            self.on_complete(gradient)

    def _tell_of_held(self) -> None:
        """Nothing comes late any more."""
        held, self._held = self._held, {}
        for gradient in held:
            assert self.on_complete is not None
            self._squares(gradient)  # afterwards there may be nothing left to measure
            self.on_complete(gradient)

    def _squares(self, gradient: FlatGradient) -> float | torch.Tensor:
        if gradient.sum_squares is not None:
            return gradient.sum_squares
        pieces = gradient.pieces()
        if pieces is not None:
            return native.sum_squares_of([pieces])  # not kept: the norm's one pass over all adds in another order
        gradient.landing.wait()
        gradient.sum_squares = self._measure(gradient, gradient.owned)
        return gradient.sum_squares

    def _measure(self, gradient: FlatGradient, owned: torch.Tensor) -> float | torch.Tensor:
        """The sum of squares of what counts for the norm: all of it, or what tensor-parallel ranks have cut.

        Parameters that every tensor-parallel rank holds whole are counted by the first of them.
        """
        if self._tensor.rank == 0:
            return self._sum_squares(owned)
        layout = gradient.flat.layout
        return sum((self._sum_squares(owned[a:b]) for a, b in layout.cut_ranges(gradient.flat.rank)), start=0.0)

    def _collect_late(self) -> None:
        """A second collection for the flats that any rank got late gradients for."""
        if not self.nested:
            assert not self._late, [self.all[i].flat for i in self._late]
            return
        late = torch.tensor([float(i in self._late) for i in range(len(self.all))])
        late = late.to(self.all[0].flat.whole.device)
        self.comm.all_reduce(late, "max").wait()
        # All were held back in the first of these backwards, which takes memory for all of them.
        self._trims = self._late_before is None and bool(self._held)
        self._late_before = self._late_before or set()
        for index in torch.nonzero(late.cpu()).flatten().tolist():
            gradient = self.all[index]
            if gradient in self._told:
                raise WherryError(
                    f"{gradient.flat.name}: a gradient came after the backward had updated its weights already, from a "
                    "reentrant checkpoint that uses a weight which is used elsewhere too; set "
                    '"wherry": {"update_policy": "before_use"}'
                )
            self._late_before.add(gradient)
            if gradient.partitioned or gradient.reduced:
                self._reduce_more(gradient)
            else:
                gradient.absorb()
                if self.boundary:
                    self._summed(gradient)

    def _reduce_more(self, gradient: FlatGradient) -> None:
        """Reduce what has come after the flat's reduction, and add it to what this rank owns."""
        pool = self._pool(gradient)
        whole = self._filled(gradient, pool)
        owned = whole[slice(*gradient.flat.layout.shard_range(gradient.flat.rank))]
        if self._optimizer_partitioned:
            self._shards.reduce_scatter(owned, whole, gradient.flat.name).wait()
            if self._replicas.size > 1 and self._crosses_alone(gradient):
                self._replicas.all_reduce(owned, label=gradient.flat.name).wait()
        else:
            self.comm.all_reduce(whole, label=gradient.flat.name).wait()
        shard = pool.take(owned.numel(), owned.dtype)
        shard.copy_(owned)
        pool.give(whole)
        self._add(gradient, shard, fresh=False)
        if self.boundary:
            self._summed(gradient)

    def _agree_on_order(self) -> None:
        """After the first backward: the order in which rank 0 saw flats complete is everybody's from now on."""
        if self._order_agreed:
            return
        self._order_agreed = True
        seen = self._completed
        agreed = self.comm.gather_objects(seen)[0]
        self._order = agreed + [index for index in self._order if index not in set(agreed)]

    def _pool(self, gradient: FlatGradient) -> DevicePool:
        device = gradient.flat.whole.device
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = DevicePool(device)
        return pool

    def _travelling_wait_quietly(self) -> None:
        """Wait for reductions whose results nobody wants any more; their errors have been raised elsewhere."""
        self.boundary = False  # no sum is complete, whatever still arrives
        for waiting in self._waiting:
            waiting.finish()
        self._waiting = []
        while self._travelling or self._between:
            with suppress(Exception):
                self._arrive((self._travelling or self._between).popleft())
        for crossing in self._crossing:
            with suppress(Exception):
                crossing.finish()
        self._crossing = []
        while self._descending:
            with suppress(Exception):
                self._descending.popleft()()
        for gradient in self.all:
            with suppress(Exception):
                gradient.landing.wait()
