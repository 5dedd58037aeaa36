"""The second phase of a gradient: what ranks have is summed over them, and each gets the part that it updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from wherry.observe.spans import span
from wherry.parallel import merged
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.merged import Merging
from wherry.parallel.topology import Topology
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.land import Sums
from wherry.sharding.norm import Norm
from wherry.tiers.buffers import DevicePool
from wherry.tiers.tickets import Ticket

# Reductions under way at once: one travels while the next is filled.
IN_FLIGHT = 2


@dataclass
class Reduction:
    """What is summed over ranks, where this rank's part of the sum goes, and what is done with it then."""

    name: str
    owned: torch.Tensor
    whole: torch.Tensor
    finish: Callable[[], None]


class Lane:
    """Sums over one group of ranks, all of them or scattered. Small ones wait for others to travel with."""

    def __init__(self, comm: Comm, merging: Merging, *, scatters: bool) -> None:
        self.comm = comm
        self._merging = merging
        self._scatters = scatters
        self._waiting: list[Reduction] = []
        self._under_way: deque[tuple[Ticket, Callable[[], None]]] = deque()

    def send(self, reduction: Reduction) -> None:
        if self.comm.size == 1 or not self._merging.takes(reduction.whole):
            self._launch([reduction])
            return
        if not self._merging.fits([other.whole for other in self._waiting], reduction.whole):
            self.flush()
        self._waiting.append(reduction)

    def send_number(self, make: Callable[[torch.dtype], torch.Tensor | None], label: str) -> None:
        """Sum a number where it lies, together with what waits, however full the buffer is that they share."""
        last = self._waiting[-1] if self._waiting else None
        number = make(last.whole.dtype if last is not None else torch.float32)
        if number is None:
            return
        if last is not None:
            self._waiting.append(Reduction(last.name, number, number, _nothing))
        else:
            self._under_way.append((self.comm.all_reduce(number, label=label), _nothing))

    def flush(self) -> None:
        """Set going what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._launch(waiting)

    def wait(self, keep: int = 0) -> None:
        """Until so many are left under way."""
        while len(self._under_way) > keep:
            ticket, finish = self._under_way.popleft()
            ticket.wait()
            finish()

    def drop(self) -> None:
        """Nobody wants the results; buffers go back to their pools. Errors have been raised elsewhere."""
        while self._under_way:
            with suppress(Exception):
                self.wait(len(self._under_way) - 1)
        waiting, self._waiting = self._waiting, []
        for reduction in waiting:
            with suppress(Exception):
                reduction.finish()

    def _launch(self, reductions: Sequence[Reduction]) -> None:
        label = merged.name_of(reductions)
        wholes = [reduction.whole for reduction in reductions]
        with span("reduce", label):
            if self._scatters:
                owned = [reduction.owned for reduction in reductions]
                ticket = merged.reduce_scatter(self.comm, owned, wholes, label)
            else:
                ticket = merged.all_reduce(self.comm, wholes, label)
        self._under_way += [(ticket, reduction.finish) for reduction in reductions]


class Reducer:
    """Reduces the gradients of flats, one after another in the order in which it is asked to.

    A partitioned gradient is reduced with every micro-batch; a replicated one once, at the window's boundary, and what
    comes after that by itself. Where groups of ranks share out copies of the states, each group sums for itself, and
    the window's sum crosses to the other groups once. A micro-batch crosses by itself where the sum that it joins has
    crossed already, or is not here.
    """

    def __init__(
        self,
        topology: Topology,
        merging: Merging,
        sums: Sums,
        summed: Callable[[FlatGradient], None],
        *,
        scatters: bool,
        predivide: float,
        eager: bool,
    ) -> None:
        self.comm = topology.data
        # The ranks that share out one sum, and those that hold the same part of it.
        self._shards = topology.shards
        self._replicas = topology.replicas if scatters else SoloComm()
        self._scatters = scatters
        self._predivide = predivide
        # Whether updates follow in the backward.
        self._eager = eager
        self._merging = merging
        self._lane = Lane(self._shards if scatters else self.comm, merging, scatters=scatters)
        self._across = Lane(self._replicas, merging, scatters=False)
        self._sums = sums
        # Told of each gradient that is summed over the window and the ranks.
        self._summed = summed
        self.pool = DevicePool(topology.device)
        # Whether the micro-batch at hand is the window's last.
        self.boundary = False

    def reduce(self, gradient: FlatGradient) -> None:
        """What a backward has brought of it."""
        if gradient.partitioned:
            self._wait(IN_FLIGHT - 1)
            self._reduce_micro_batch(gradient)
        elif gradient.reduced:
            self.reduce_late(gradient)
        elif self.boundary:
            self._reduce_sum(gradient)

    def reduce_rest(self, gradient: FlatGradient) -> None:
        """What is left to reduce of a window whose last backward was not known to be that."""
        if self._replicas.size > 1 and gradient.partitioned:
            self._cross(gradient)
            self._across.flush()
        elif gradient.partitioned or gradient.reduced:
            self._summed(gradient)
        else:
            self._reduce_sum(gradient)

    def reduce_late(self, gradient: FlatGradient) -> None:
        """What has come after the flat's reduction is added to what this rank owns."""
        whole = self._filled(gradient)
        owned = whole[slice(*gradient.flat.layout.shard_range(gradient.flat.rank))]
        if self._scatters:
            self._shards.reduce_scatter(owned, whole, gradient.flat.name).wait()
            if self._replicas.size > 1 and _crosses_alone(gradient):
                self._replicas.all_reduce(owned, label=gradient.flat.name).wait()
        else:
            self.comm.all_reduce(whole, label=gradient.flat.name).wait()
        shard = self.pool.take(owned.numel(), owned.dtype).copy_(owned)
        self.pool.give(whole)
        self._sums.add(gradient, shard, partial(self.pool.give, shard), fresh=False)
        if self.boundary:
            self._summed(gradient)

    def tell_of_missing(self, norm: Norm, gradients: Sequence[FlatGradient]) -> None:
        """One number more travels with a window's last sums: whether this rank misses any gradient."""
        self._lane.send_number(partial(norm.to_tell, gradients), "missing gradients")

    def finish(self) -> None:
        """Wait for all of them."""
        self._lane.flush()
        self._wait(0)

    def drop(self) -> None:
        self.boundary = False  # no sum is complete, whatever still arrives
        self._lane.drop()
        self._across.drop()

    def _wait(self, keep: int) -> None:
        self._lane.wait(keep)
        self._across.flush()
        if keep == 0:
            self._across.wait()

    def _reduce_micro_batch(self, gradient: FlatGradient) -> None:
        """One micro-batch's gradient is added to this rank's part."""
        whole = self._filled(gradient)
        fresh, gradient.fresh = gradient.fresh, False
        direct = gradient.keeps and fresh and gradient.dtype == gradient.wire_dtype
        if direct:
            shard = gradient.accumulated
        elif self._shards.size == 1:
            shard = whole
        else:
            shard = self.pool.take(gradient.flat.layout.shard_numel, gradient.wire_dtype)

        def add() -> None:
            if not direct:
                self._sums.add(gradient, shard, partial(self.pool.give, shard), fresh=fresh)
            if self.boundary:
                self._cross(gradient)

        def finish() -> None:
            if shard is not whole:
                self.pool.give(whole)
            if self._replicas.size > 1 and _crosses_alone(gradient):
                self._send_across(gradient, shard, add)
            else:
                add()

        self._lane.send(Reduction(gradient.flat.name, shard, whole, finish))

    def _reduce_sum(self, gradient: FlatGradient) -> None:
        """The window's replicated sum is reduced where it lies, in the wire's dtype if that is another."""
        if self.comm.size == 1:
            self._summed(gradient)
            return
        whole, owned = gradient.accumulated, gradient.own_sum
        cast = gradient.dtype != gradient.wire_dtype
        if cast or self._merging.takes(whole) or self._replicas.size > 1 or self._eager:
            # Buffers are to be few, and what follows a sum is to begin soon. Else nothing is gained by waiting here.
            self._wait(IN_FLIGHT - 1)
        if self._predivide != 1.0:
            whole.div_(self._predivide)
        if cast:
            whole = self.pool.take(whole.numel(), gradient.wire_dtype).copy_(whole)
            owned = whole[slice(*gradient.flat.layout.shard_range(gradient.flat.rank))]

        def finish() -> None:
            if cast:
                gradient.own_sum.copy_(owned)
                self.pool.give(whole)
            if self.boundary:
                gradient.reduced = self._replicas.size == 1
                self._cross(gradient)

        self._lane.send(Reduction(gradient.flat.name, owned, whole, finish))

    def _cross(self, gradient: FlatGradient) -> None:
        """The window's reductions are added up within the group: the sum crosses to the replicas, once."""
        if self._replicas.size == 1:
            self._summed(gradient)
            return
        if _crosses_alone(gradient):
            self._summed(gradient)
        elif gradient.dtype == gradient.wire_dtype:
            self._send_across(gradient, gradient.own_sum, partial(self._summed, gradient))
        else:
            own = gradient.own_sum
            part = self.pool.take(own.numel(), gradient.wire_dtype).copy_(own)

            def cast_back() -> None:
                own.copy_(part)
                self.pool.give(part)
                self._summed(gradient)

            self._send_across(gradient, part, cast_back)
        gradient.reduced = True

    def _send_across(self, gradient: FlatGradient, part: torch.Tensor, finish: Callable[[], None]) -> None:
        self._across.wait(IN_FLIGHT - 1)
        self._across.send(Reduction(gradient.flat.name, part, part, finish))

    def _filled(self, gradient: FlatGradient) -> torch.Tensor:
        """A buffer with autograd's gradients of the whole flat, ready for the wire."""
        whole = self.pool.take(gradient.flat.layout.numel, gradient.wire_dtype)
        gradient.take_into(whole, add=False)
        for start, stop in gradient.flat.layout.gaps():
            whole[start:stop].zero_()
        if self._predivide != 1.0:
            whole.div_(self._predivide)
        return whole


def _crosses_alone(gradient: FlatGradient) -> bool:
    """Whether micro-batches of this gradient cross to the replicas by themselves."""
    return gradient.reduced or not gradient.keeps


def _nothing() -> None:
    """What is done with a sum that is read where it lies."""
