"""The second phase of a gradient: what ranks have is summed over them, and each gets the part that it updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from wherry.observe.spans import SILENT, recording, span
from wherry.parallel.comm import Comm, Merging, SoloComm, from_to
from wherry.parallel.topology import Topology
from wherry.sharding.autograd import Backward
from wherry.sharding.flat_gradient import FlatGradient
from wherry.tickets import Ticket
from wherry.tiers.buffers import DevicePool
from wherry.tiers.streams import IN_FLIGHT


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
        if self.comm.size == 1:
            self.comm.reduce_scatter(reduction.owned, reduction.whole)
            reduction.finish()
            return
        if not self._merging.takes(reduction.whole):
            self._launch([reduction])
            return
        if self._waiting and not self._merging.fits([other.whole for other in self._waiting], reduction.whole):
            self.flush()
        self._waiting.append(reduction)

    def flush(self) -> None:
        """Set going what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._launch(waiting)

    def wait(self, keep: int = 0, *, ended: bool = False) -> None:
        """Until so many are left under way; with `ended` also for those that wait for nothing any more."""
        while len(self._under_way) > keep or (ended and self._under_way and self._under_way[0][0].done()):
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
        names = [reduction.name for reduction in reductions]
        wholes = [reduction.whole for reduction in reductions]
        with span("reduce", from_to(names)) if recording() else SILENT:
            if self._scatters:
                owned = [reduction.owned for reduction in reductions]
                ticket = self.comm.reduce_scatter_together(owned, wholes, names)
            else:
                ticket = self.comm.all_reduce_together(wholes, names)
        for reduction in reductions:
            self._under_way.append((ticket, reduction.finish))


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
        backward: Backward,
        summed: Callable[[FlatGradient], None],
        *,
        scatters: bool,
        predivide: float,
        eager: bool,
        sets_out: bool,
    ) -> None:
        self.comm = topology.data
        # The ranks that share out one sum, and those that hold the same part of it.
        self._shards = topology.shards
        self._replicas = topology.replicas if scatters else SoloComm()
        self._scatters = scatters
        self._predivide = predivide
        # Whether updates follow in the backward.
        self._eager = eager
        # Whether a sum leaves the device: then it does so at once, and not when the next ones are reduced. What crosses
        # to replicas does so in one order on all ranks.
        self._sets_out = sets_out and self._replicas.size == 1
        self._merging = merging
        self._lane = Lane(self._shards if scatters else self.comm, merging, scatters=scatters)
        self._across = Lane(self._replicas, merging, scatters=False)
        self._backward = backward
        # Told of each gradient that is summed over the window and the ranks.
        self._summed = summed
        self.pool = DevicePool(topology.device)

    def reduce(self, gradient: FlatGradient) -> None:
        """What a backward has brought of it."""
        if gradient.partitioned or gradient.reduced:
            self._wait(IN_FLIGHT - 1)
            self._reduce_micro_batch(gradient)
        elif self._backward.boundary and self.comm.size == 1:
            self._summed(gradient)
        elif self._backward.boundary:
            self._reduce_sum(gradient)

    def reduce_rest(self, gradient: FlatGradient) -> None:
        """What is left to reduce of a window whose last backward was not known to be that."""
        if self._replicas.size > 1 and gradient.partitioned:
            self._cross(gradient)
            self._across.flush()
        elif gradient.partitioned or gradient.reduced or self.comm.size == 1:
            self._summed(gradient)
        else:
            self._reduce_sum(gradient)

    def finish(self) -> None:
        """Wait for all of them."""
        if self.comm.size > 1:
            self._lane.flush()
            self._wait(0)

    def drop(self) -> None:
        self._lane.drop()
        self._across.drop()

    def _wait(self, keep: int) -> None:
        self._lane.wait(keep, ended=self._sets_out)
        if self._replicas.size > 1:
            self._across.flush()
            if keep == 0:
                self._across.wait()

    def _reduce_micro_batch(self, gradient: FlatGradient) -> None:
        """One micro-batch's gradient is added to this rank's part."""
        whole = self._filled(gradient)
        if gradient.takes_directly:
            shard = gradient.accumulated
        elif self._shards.size == 1 or not self._scatters:
            shard = whole
        else:
            shard = self.pool.take(whole.numel() // self._shards.size, gradient.wire_dtype)

        def add() -> None:
            gradient.add(shard, partial(self.pool.give, shard))
            if self._backward.boundary:
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
        whole, owned = gradient.accumulated, gradient.own_sum
        cast = gradient.dtype != gradient.wire_dtype
        if cast or self._scatters or self._merging.takes(whole) or self._eager:
            # Buffers are to be few, and what follows a sum is to begin soon. Else nothing is gained by waiting here.
            self._wait(IN_FLIGHT - 1)
        if self._predivide != 1.0:
            whole.div_(self._predivide)
        if cast:
            whole = self.pool.take(whole.numel(), gradient.wire_dtype).copy_(whole)
            owned = whole[gradient.flat.own]

        def finish() -> None:
            if cast:
                gradient.own_sum.copy_(owned)
                self.pool.give(whole)
            if self._backward.boundary:
                if self._replicas.size == 1:
                    gradient.note_reduced()
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
        gradient.note_reduced()

    def _send_across(self, gradient: FlatGradient, part: torch.Tensor, finish: Callable[[], None]) -> None:
        self._across.wait(IN_FLIGHT - 1)
        self._across.send(Reduction(gradient.flat.name, part, part, finish))

    def _filled(self, gradient: FlatGradient) -> torch.Tensor:
        """A buffer with autograd's gradients of the whole flat, ready for the wire."""
        whole = self.pool.take(gradient.flat.layout.numel, gradient.wire_dtype)
        gradient.fill(whole)
        if self._predivide != 1.0:
            whole.div_(self._predivide)
        return whole


def _crosses_alone(gradient: FlatGradient) -> bool:
    """Whether micro-batches of this gradient cross to the replicas by themselves."""
    return gradient.reduced or not gradient.keeps
