"""The gradients of all flats through a window, and the first of their phases: they arrive, in any order.

Then they are reduced (`reduce`), and land where their update reads them (`land`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import torch

from wherry.errors import WherryError
from wherry.parallel.comm import SoloComm
from wherry.parallel.merged import Merging
from wherry.parallel.topology import Topology
from wherry.placement import Resting
from wherry.sharding.flat_gradient import FlatGradient, GradientPolicy, Landing
from wherry.sharding.land import Sums
from wherry.sharding.named_gradients import NamedGradients
from wherry.sharding.norm import Norm, SumSquares
from wherry.sharding.reduce import Reducer
from wherry.sharding.unit import Flat
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
        self.policy = policy
        self.link = link
        scatters = optimizer.partitioned
        replicas = topology.replicas if scatters else SoloComm()
        self.norm = Norm(topology, replicas, sum_squares, partitioned=scatters)
        self._updates = updates
        self._updates_in_backward = updates is not None and updates.in_backward
        self._sums = Sums(link, self.norm)
        self._reducer = Reducer(
            topology,
            merging or Merging(0),
            self._sums,
            self._summed,
            scatters=scatters,
            predivide=policy.predivide,
            eager=self._updates_in_backward,
        )
        self.pool = self._reducer.pool
        # Whether the sums tell what is missing; shared out, they leave a norm to be added up, which does.
        self._tells = self.comm.size > 1 and not scatters
        self._partitioned = gradients.partitioned and topology.shards.size > 1
        self.all: list[FlatGradient] = []
        self._make([flat for flat in flats if flat.trainable], policy, way_of)
        self.named = NamedGradients(self.all, topology.shards, topology.tensor)
        # Until the first backward has shown better: as built, backwards. The root unit, built first, comes last.
        self._order = list(reversed(range(len(self.all))))
        self._order_agreed = self.comm.size == 1
        self._completed: list[int] = []
        self._next = 0
        # Those whose update has been told of them, and those that more may come for in this backward.
        self._told: set[FlatGradient] = set()
        self._held: dict[FlatGradient, None] = {}
        # What came after its flat was collected, and what did in backwards before; None before the first of these.
        self._late: set[int] = set()
        self._late_before: set[FlatGradient] | None = None
        self._trims = False
        self.nested = False
        # How many micro-batches the last backward was of.
        self.micro_batches = 1
        # Gradients of parameters that this backward has brought.
        self.arrivals = 0

    def _make(self, flats: Iterable[Flat], policy: GradientPolicy, way_of: Callable[[Flat], Landing]) -> None:
        self.all += [
            FlatGradient(i, flat, partitioned=self._partitioned, policy=policy, way=way_of(flat), link=self.link)
            for i, flat in enumerate(flats)
        ]

    @property
    def boundary(self) -> bool:
        """Whether the last backward was the window's last."""
        return self._reducer.boundary

    # A backward, from begin to finish.

    def begin(self, *, boundary: bool, micro_batches: int = 1) -> None:
        self._reducer.boundary = boundary
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
        self._completed.append(gradient.index)
        half = len(self._completed) == (len(self.all) + 1) // 2
        if half and self.boundary and self._updates is not None and self._updates.reads_ahead:
            self._updates.read_ahead()
        gradient.collect()
        while self._next < len(self._order):
            following = self.all[self._order[self._next]]
            if not following.collected:
                return
            self._reducer.reduce(following)
            self._next += 1

    def arrived_nested(self, gradient: FlatGradient, times: int) -> None:
        """A backward within the backward has brought a parameter's gradient, for the so manieth time."""
        self.nested = True
        gradient.nested = max(gradient.nested, times)

    def arrived_late(self, gradient: FlatGradient) -> None:
        """A gradient came after its flat was collected, as of a module that two reentrant checkpoints share."""
        self._late.add(gradient.index)

    def finish(self) -> None:
        """The backward is over: collect what is incomplete, and wait for every reduction."""
        for index in self._order[self._next :]:
            gradient = self.all[index]
            if not gradient.collected:
                gradient.collect()
            self._reducer.reduce(gradient)
        self._next = len(self._order)
        for gradient in self.all:
            gradient.note_arrivals()
        if self.boundary and self._tells:
            self._reducer.tell_of_missing(self.norm, self.all)
        self._reducer.finish()
        self._agree()
        self._collect_late()
        if self._held:
            self._tell_of_held()

    def complete_window(self) -> None:
        """Reduce what the last backward has not, because it was not known to be the window's last."""
        if self.boundary:
            return
        self._reducer.boundary = True
        for index in self._order:
            self._reducer.reduce_rest(self.all[index])
        if self._tells:
            self._reducer.tell_of_missing(self.norm, self.all)
        self._reducer.finish()
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
        self._make(flats, policy, way_of)
        self._late_before = None

    def rest(self) -> None:
        """Nothing is on its way any more, and no memory is kept for what is to come."""
        self._sums.rest()
        for gradient in self.all:
            gradient.landing.wait()
        self._trim()

    def _trim(self) -> None:
        self._trims = False
        if self._updates is not None:
            self._updates.forget()
        for gradient in self.all:
            gradient.forget()
        self.pool.trim()
        self.link.host.trim()

    def drop(self) -> None:
        """Forget the window's gradients, those on their way included."""
        self._reducer.drop()
        self._sums.drop()
        self._held.clear()
        self.norm.missing = None
        for gradient in self.all:
            with suppress(Exception):
                gradient.landing.wait()  # its error has been raised elsewhere
            gradient.drop()

    def end_window(self) -> None:
        """The update has used the gradients; the next micro-batch starts a new window."""
        self.norm.missing = None
        for gradient in self.all:
            gradient.end_window()

    def _forget(self) -> None:
        for gradient in self.all:
            gradient.close()
        self.all.clear()
        self._told.clear()

    def close(self) -> None:
        self.drop()
        self._forget()
        self.pool.close()

    # Sums that are complete.

    def _summed(self, gradient: FlatGradient) -> None:
        """The window's sum is complete: measure it, and send it to where its update reads it."""
        self._sums.complete(gradient)
        if self._updates is None or not self._updates_in_backward:
            return
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

    # What ranks find out together.

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
                self._reducer.reduce_late(gradient)
            else:
                gradient.absorb()
                if self.boundary:
                    self._summed(gradient)
