"""Sums over the replicas: ranks that hold the same part of the gradients, each for a group of ranks of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from wherry.observe.spans import span
from wherry.parallel import merged
from wherry.parallel.comm import Comm
from wherry.parallel.merged import Merging
from wherry.sharding.flat_gradient import FlatGradient
from wherry.tiers.buffers import DevicePool
from wherry.tiers.tickets import Ticket

# Reductions under way at once: one travels while the next is filled.
IN_FLIGHT = 2


@dataclass
class Reduction:
    """What is to be reduced, where this rank's part of the sum goes, and what is done with it then."""

    name: str
    owned: torch.Tensor
    whole: torch.Tensor
    finish: Callable[[], None]


@dataclass
class Travelling:
    """A reduction under way, and what is done with its result."""

    ticket: Ticket
    finish: Callable[[], None]

    def arrive(self) -> None:
        self.ticket.wait()
        self.finish()


@dataclass
class _Crossing:
    """What is to be summed over the replicas, in place, and what is done with it then."""

    gradient: FlatGradient
    part: torch.Tensor
    finish: Callable[[], None]


class Crossings:
    """What waits to be summed over the replicas, and what is on its way there.

    Reductions within a group of ranks are added up, and the window's sum crosses once. A micro-batch crosses by itself
    where the sum that it joins has crossed already, or is not here.
    """

    def __init__(self, replicas: Comm, merging: Merging) -> None:
        self._replicas = replicas
        self._merging = merging
        self.waiting: list[_Crossing] = []
        self.under_way: deque[Travelling] = deque()

    @staticmethod
    def alone(gradient: FlatGradient) -> bool:
        """Whether micro-batches of this gradient cross by themselves."""
        return gradient.reduced or not gradient.keeps

    def add(self, gradient: FlatGradient, part: torch.Tensor, finish: Callable[[], None]) -> None:
        self.waiting.append(_Crossing(gradient, part, finish))

    def add_sum(self, gradient: FlatGradient, pool: DevicePool, finish: Callable[[], None]) -> None:
        """The window's sum crosses where it lies, in the wire's dtype if that is another."""
        own = gradient.own_sum
        if gradient.dtype == gradient.wire_dtype:
            return self.add(gradient, own, finish)
        part = pool.take(own.numel(), gradient.wire_dtype).copy_(own)

        def cast_back() -> None:
            own.copy_(part)
            pool.give(part)
            finish()

        self.add(gradient, part, cast_back)

    def set_out(self) -> None:
        """Set going what waits, small ones together."""
        waiting, self.waiting = self.waiting, []
        together: list[_Crossing] = []
        for crossing in waiting:
            small = self._merging.takes(crossing.part)
            fits = small and self._merging.fits([other.part for other in together], crossing.part)
            if together and not fits:
                self._launch(together)
                together = []
            together.append(crossing)
        self._launch(together)

    def _launch(self, crossings: list[_Crossing]) -> None:
        self.drain(IN_FLIGHT - 1)
        label = merged.name_of([each.gradient.flat for each in crossings])
        with span("reduce", label):
            ticket = merged.all_reduce(self._replicas, [each.part for each in crossings], label)
        self.under_way += [Travelling(ticket, each.finish) for each in crossings]

    def drain(self, keep: int) -> None:
        while len(self.under_way) > keep:
            self.under_way.popleft().arrive()

    def give_up(self) -> None:
        """Nobody wants the results any more; buffers go back to their pools."""
        while self.under_way:
            with suppress(Exception):
                self.under_way.popleft().arrive()
        for crossing in self.waiting:
            with suppress(Exception):
                crossing.finish()
        self.waiting = []
