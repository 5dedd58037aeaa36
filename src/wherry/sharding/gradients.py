"""From autograd's gradients to the part of them that this rank updates: arrival, accumulation, reduction."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from wherry.errors import WherryError
from wherry.observe.spans import span
from wherry.parallel import merged
from wherry.parallel.comm import SoloComm
from wherry.parallel.merged import Merging
from wherry.parallel.topology import Topology
from wherry.placement import Resting
from wherry.sharding.descent import Descent
from wherry.sharding.flat_gradient import FlatGradient, GradientPolicy, Landing
from wherry.sharding.named_gradients import NamedGradients
from wherry.sharding.norm import Norm, SumSquares
from wherry.sharding.replicas import IN_FLIGHT, Crossings, Reduction, Travelling
from wherry.sharding.unit import Flat
from wherry.tiers.buffers import DevicePool
from wherry.tiers.streams import Link


class Updates(Protocol):
    """What the updates of the next step are told while gradients still come."""

    # Whether they begin in the backward, and whether what they need is read from disk meanwhile.
    in_backward: bool
    reads_ahead: bool

    def landed(self, gradient: FlatGradient) -> None:
        """At the boundary: a flat's gradient is complete, `landing` apart."""

    def read_ahead(self) -> None:
        """At the boundary: half of all flats have their gradients."""

    def forget(self) -> None:
        """Buffers that nobody uses are about to be freed."""


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
        sum_squares: SumSquares,
        link: Link,
        way_of: Callable[[Flat], Landing],
        merging: Merging | None = None,
        *,
        updates: Updates | None = None,
    ) -> None:
        self.comm = topology.data
        # The ranks that share out one sum, and those that hold the same part of it.
        self._shards = topology.shards
        self._replicas = topology.replicas if optimizer.partitioned else SoloComm()
        self._merging = merging or Merging(0)
        self._crossings = Crossings(self._replicas, self._merging)
        self._descent = Descent(link)
        self.norm = Norm(topology, self._replicas, sum_squares, partitioned=optimizer.partitioned)
        # Small reductions whose turn has come, and which wait to travel together.
        self._waiting: list[Reduction] = []
        self.policy = policy
        self._optimizer_partitioned = optimizer.partitioned
        # Whether the sums tell what is missing; shared out, they leave a norm to be added up, which does.
        self._tells = self.comm.size > 1 and not optimizer.partitioned
        self._partitioned = gradients.partitioned and self._shards.size > 1
        self.link = link
        self.all = [
            FlatGradient(flat, partitioned=self._partitioned, policy=policy, way=way_of(flat), link=link)
            for flat in flats
            if flat.trainable
        ]
        self.named = NamedGradients(self.all, self._shards, topology.tensor)
        self._updates = updates
        self._updates_in_backward = updates is not None and updates.in_backward
        self._told: set[FlatGradient] = set()
        # Those that more may come for in this backward: they are complete when it ends.
        self._held: dict[FlatGradient, None] = {}
        # The flats that backwards within a backward have brought late gradients for; None before the first of these.
        self._late_before: set[FlatGradient] | None = None
        self._trims = False
        # Until the first backward has shown better: as built, backwards. The root unit, built first, comes last.
        self._order = list(reversed(range(len(self.all))))
        self._completed: list[int] = []
        self._order_agreed = self.comm.size == 1
        self._next = 0
        self._index = {gradient: i for i, gradient in enumerate(self.all)}
        self._travelling: deque[Travelling] = deque()
        self._pools: dict[torch.device, DevicePool] = {}
        self._late: set[int] = set()
        self.nested = False
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
        half = len(self._completed) == (len(self.all) + 1) // 2
        if half and self.boundary and self._updates is not None and self._updates.reads_ahead:
            self._updates.read_ahead()
        if not gradient.partitioned:
            gradient.absorb()
        self._launch_in_order()

    def arrived_nested(self, gradient: FlatGradient, times: int) -> None:
        """A backward within the backward has brought a parameter's gradient, for the so manieth time."""
        self.nested = True
        gradient.nested = max(gradient.nested, times)

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
            if not gradient.waits:  # else it travels nowhere, and is measured with all others in one pass
                self._launch(gradient)
        self._next = len(self._order)
        for gradient in self.all:
            if not gradient.waits:  # else who was absent is known since they were taken
                gradient.note_arrivals()
        if self.boundary and self._tells:
            self._tell_of_missing()
        self._send_waiting()
        self._drain(0)
        self._agree()
        self._collect_late()
        if self._held:
            self._tell_of_held()

    def complete_window(self) -> None:
        """Reduce what the last backward has not, because it was not known to be the window's last."""
        if self.boundary:
            return
        self.boundary = True
        for index in self._order:
            gradient = self.all[index]
            if self._replicas.size > 1 and gradient.partitioned:
                self._conclude(gradient)
                if self._crossings.waiting:
                    self._crossings.set_out()
            elif gradient.partitioned or gradient.reduced:
                self._summed(gradient)
            else:
                self._reduce_accumulated(gradient)
        if self._tells:
            self._tell_of_missing()
        self._send_waiting()
        self._drain(0)
        self._tell_of_held()

    def in_order(self) -> list[FlatGradient]:
        """In the order in which the backward completes them, which ranks have agreed on."""
        order = self._order if self.comm.size > 1 else dict.fromkeys([*self._completed, *self._order])
        return [self.all[index] for index in order]

    def finite(self, gradient: FlatGradient) -> bool:
        """Whether this rank's part has neither inf nor NaN, once it has landed where the host updates it."""
        return math.isfinite(self.link.read(self.norm.squares_of_all(gradient)))

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
        self._descent.rest()
        for gradient in self.all:
            gradient.landing.wait()
        self._trim()

    def _trim(self) -> None:
        self._trims = False
        if self._updates is not None:
            self._updates.forget()
        for gradient in self.all:
            gradient.forget()
        for pool in self._pools.values():
            pool.trim()
        self.link.host.trim()

    def drop(self) -> None:
        """Forget the window's gradients, those on their way included."""
        self._travelling_wait_quietly()
        self._held.clear()
        self.norm.missing = None
        for gradient in self.all:
            gradient.drop()

    def end_window(self) -> None:
        """The update has used the gradients; the next micro-batch starts a new window."""
        self.norm.missing = None
        for gradient in self.all:
            gradient.end_window()

    def resume(self, *, boundary: bool) -> None:
        """The sums of a window have been put back from a checkpoint; `boundary`: no micro-batch of it is to come."""
        self.boundary = boundary
        self.norm.missing = None
        for gradient in self.all:
            gradient.absent = ()  # which were missing is not in a checkpoint: their zeros count
            if boundary:
                gradient.reduced = gradient.reduced or gradient.partitioned
                self._summed(gradient)
        self._tell_of_held()

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
            if self._replicas.size > 1 and Crossings.alone(gradient):
                self._crossings.add(gradient, shard, add)
            else:
                add()

        self._send(Reduction(gradient.flat.name, shard, whole, finish))

    def _send(self, reduction: Reduction) -> None:
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

    def _tell_of_missing(self) -> None:
        """One number more travels with a window's last sums, however full the buffer is that they share."""
        last = self._waiting[-1] if self._waiting else None
        told = self.norm.to_tell(self.all, last.whole.dtype if last else torch.float32)
        if told is None:
            return
        if last:
            self._waiting.append(Reduction(last.name, told, told, _nothing))
        else:
            ticket = self.comm.all_reduce(told, label="missing gradients")
            self._travelling.append(Travelling(ticket, _nothing))

    def _travel(self, reductions: list[Reduction]) -> None:
        label = merged.name_of(reductions)
        wholes = [reduction.whole for reduction in reductions]
        with span("reduce", label):
            if self._optimizer_partitioned:
                owned = [reduction.owned for reduction in reductions]
                ticket = merged.reduce_scatter(self._shards, owned, wholes, label)
            else:
                ticket = merged.all_reduce(self.comm, wholes, label)
        self._travelling += [Travelling(ticket, reduction.finish) for reduction in reductions]

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
            # Measured on its way out: if it is the only one, nobody need read it again for the norm.
            gradient.sum_squares = self.norm.measure(gradient, shard) if fresh else None
            self._descent.send(gradient, shard, give, fresh=fresh)

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
        cast = gradient.dtype != gradient.wire_dtype
        received = self.comm.buffers(whole) if self._optimizer_partitioned else self.comm.swaps(whole)
        buffered = cast or self._merging.takes(whole) or received
        if buffered or self._replicas.size > 1 or self._updates_in_backward:
            # Buffers are to be few, and what follows a sum is to begin soon. Else nothing is gained by waiting here.
            self._drain(IN_FLIGHT - 1)
        if self.policy.predivide != 1.0:
            whole.div_(self.policy.predivide)
        conclude = self._summed if self._replicas.size == 1 else self._conclude
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

        self._send(Reduction(gradient.flat.name, owned, whole, finish))

    def _drain(self, keep: int) -> None:
        while len(self._travelling) > keep:
            self._travelling.popleft().arrive()
        if self._crossings.waiting:
            self._crossings.set_out()
        if keep == 0 and self._crossings.under_way:
            self._crossings.drain(0)

    def _conclude(self, gradient: FlatGradient) -> None:
        """The window's reductions are added up within the group: the sum crosses to the replicas, once."""
        if Crossings.alone(gradient):
            self._summed(gradient)
        else:
            self._crossings.add_sum(gradient, self._pool(gradient), partial(self._summed, gradient))
        gradient.reduced = True

    def _summed(self, gradient: FlatGradient) -> None:
        """The window's sum is complete: measure it, and send it to where its update reads it."""
        if gradient.way is Landing.LOOSE:
            gradient.sum_squares = None  # taken of all in one pass
        elif gradient.keeps:
            gradient.sum_squares = self.norm.measure(gradient, gradient.own_sum)
            if gradient.way is Landing.COPIED:
                gradient.landing = self.link.down(gradient.owned, gradient.own_sum)
        elif gradient.stays:
            gradient.sum_squares = self.norm.measure(gradient, gradient.owned)
        if self._updates is None or not self._updates_in_backward:
            return
        if not gradient.waits:
            gradient.note_arrivals()  # what is absent now is so for the whole window
        if self.nested and (self._late_before is None or gradient in self._late_before):
            self._held[gradient] = None
        else:
            self._told.add(gradient)
            self._updates.landed(gradient)

    def _tell_of_held(self) -> None:
        """Nothing comes late any more."""
        held, self._held = self._held, {}
        for gradient in held:
            assert self._updates is not None
            self.norm.squares_of(gradient)  # afterwards there may be nothing left to measure
            self._updates.landed(gradient)

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
            if self._replicas.size > 1 and Crossings.alone(gradient):
                self._replicas.all_reduce(owned, label=gradient.flat.name).wait()
        else:
            self.comm.all_reduce(whole, label=gradient.flat.name).wait()
        shard = pool.take(owned.numel(), owned.dtype)
        shard.copy_(owned)
        pool.give(whole)
        self._add(gradient, shard, fresh=False)
        if self.boundary:
            self._summed(gradient)

    def _agree(self) -> None:
        """After the first backward: the order in which rank 0 saw flats complete is everybody's from now on.

        And where a backward within a backward was one rank's alone, all look for late gradients together.
        """
        if self._order_agreed:
            return
        self._order_agreed = True
        told = self.comm.gather_objects((self._completed, self.nested))
        self.nested = any(nested for _, nested in told)
        agreed, _ = told[0]
        known = set(agreed)
        self._order = agreed + [index for index in self._order if index not in known]

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
        while self._travelling:
            with suppress(Exception):
                self._travelling.popleft().arrive()
        self._crossings.give_up()
        self._descent.give_up()
        for gradient in self.all:
            with suppress(Exception):
                gradient.landing.wait()


def _nothing() -> None:
    """What is done with a sum that is read where it lies."""
