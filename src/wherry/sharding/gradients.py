"""The gradients of all flats through a window, and the first of their phases: they arrive, in any order.

Then they are reduced (`reduce`), and land where their update reads them (`flat_gradient`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from wherry.errors import WherryError
from wherry.parallel.comm import Merging, SoloComm
from wherry.parallel.topology import Topology
from wherry.placement import Placement
from wherry.sharding.autograd import Backward
from wherry.sharding.flat_gradient import Arrivals, FlatGradient, GradientPolicy, Landing
from wherry.sharding.norm import Norm
from wherry.sharding.reduce import Reducer
from wherry.sharding.unit import Flat, Unit
from wherry.tiers.streams import CopiesDown, Link


class Updates(Protocol):
    """What the updates of the next step are told while gradients still come."""

    # Whether they begin in the backward, and whether what they need is read from disk meanwhile.
    in_backward: bool
    reads_ahead: bool

    def landed(self, gradient: FlatGradient) -> None:
        """At the boundary: a flat's gradient is complete, `landing` apart."""

    def detach(self) -> None:
        """The gradients are about to be others."""

    def attach(self, gradients: Gradients) -> None:
        """These are the gradients from now on."""

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
        placement: Placement,
        policy: GradientPolicy,
        link: Link,
        way_of: Callable[[Flat], Landing],
        merging: Merging,
        updates: Updates | None,
    ) -> None:
        self.comm = topology.data
        self.policy = policy
        self.link = link
        self.backward = Backward()
        scatters = placement.optimizer.partitioned
        replicas = topology.replicas if scatters else SoloComm()
        self.norm = Norm(topology, replicas, partitioned=scatters)
        self._updates = updates
        self._copies = CopiesDown(link)
        self._reducer = Reducer(
            topology,
            merging,
            self.backward,
            self._summed,
            scatters=scatters,
            predivide=policy.predivide,
            eager=updates is not None and updates.in_backward,
            sets_out=not link.shared,
        )
        self.pool = self._reducer.pool
        self._cut = topology.tensor.rank > 0
        self._partitioned = placement.gradients.partitioned and topology.shards.size > 1
        self.all: list[FlatGradient] = []
        self._make(flats, policy, way_of)
        # Whether the sums of the last window are complete, and there: from its boundary until something drops them.
        self.complete = False
        # What makes mean gradients of the sums, over ranks and micro-batches, of a loss that may be scaled.
        self.scale = self.own_scale = 1.0
        # Who is told of arrivals, and the hooks that tell.
        self._arrivals: weakref.ref[Arrivals] | None = None
        self._handles: list[RemovableHandle] = []
        self._collected: list[int] = []
        self._next = 0
        # Whether any backward has run others within it, as reentrant checkpoints do, of which gradients come late: to
        # the flats that had such in backwards before; None before the first of these.
        self._nested = False
        self._late_before: set[FlatGradient] | None = None
        # Those whose update has been told of them, and those that more may come for in this backward.
        self._told: set[FlatGradient] = set()
        self._held: dict[FlatGradient, None] = {}
        self._trims = False

    def _make(self, flats: Iterable[Flat], policy: GradientPolicy, way_of: Callable[[Flat], Landing]) -> None:
        self.all += [
            FlatGradient(
                i,
                flat,
                partitioned=self._partitioned,
                policy=policy,
                way=way_of(flat),
                copies=self._copies,
                # Parameters that every tensor-parallel rank holds whole are counted by the first of them.
                counted=flat.layout.cut_ranges(flat.rank) if self._cut else None,
            )
            for i, flat in enumerate(flat for flat in flats if flat.trainable)
        ]
        # The first backward records the order; until then, units in reverse, the root unit last.
        self._order = list(reversed(range(len(self.all))))
        self._order_agreed = self.comm.size == 1

    # A backward, from begin to finish.

    def watch(self, arrivals: weakref.ref[Arrivals]) -> None:
        """Have the gradients of all parameters told of, from now on."""
        self._arrivals = arrivals
        for gradient in self.all:
            for index, parameter in enumerate(gradient.flat.parameters):
                arrived, trained = gradient.arrival(index, arrivals), parameter.requires_grad
                # One that is frozen for a while keeps its hook; torch takes none of one that is frozen now.
                parameter.requires_grad_(True)
                self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))
                parameter.requires_grad_(trained)

    def begin(self) -> None:
        self._next = 0
        self._collected = []
        self._told.clear()
        if self._trims:
            self._trim()
        for gradient in self.all:
            if gradient.way is Landing.COPIED:
                self.link.order(gradient.landing)  # what was copied down may now be overwritten
            gradient.begin()

    def expect(self, forwards: int) -> None:
        """So many forwards have run together, and one backward of them all is to come.

        A reentrant checkpoint runs a backward of its own for each forward, and each brings a gradient. If fewer come
        than in the backward before, the flat is collected at the end; if more, once more.
        """
        for gradient in self.all:
            gradient.expect(max(1, gradient.nested // self.backward.micro_batches * forwards))

    @property
    def have_arrived(self) -> bool:
        """Whether this backward has brought any."""
        return any(gradient.has_arrived for gradient in self.all)

    def arrived_nested(self) -> None:
        self._nested = True

    def collect(self, gradient: FlatGradient) -> None:
        """All gradients of a flat have arrived."""
        self._collected.append(gradient.index)
        half = len(self._collected) == (len(self.all) + 1) // 2
        if half and self.backward.boundary and self._updates is not None and self._updates.reads_ahead:
            self._updates.read_ahead()
        gradient.collect()
        while self._next < len(self._order):
            following = self.all[self._order[self._next]]
            if not following.collected:
                return
            self._reducer.reduce(following)
            self._next += 1

    def finish(self, scale: float, own_scale: float = 1.0) -> None:
        """The backward is over: collect what is incomplete, and wait for every reduction.

        Times `scale` the sums of the window are its mean gradients; `own_scale` is for what ranks have not summed yet.
        """
        self.scale, self.own_scale = scale, own_scale
        for index in self._order[self._next :]:
            gradient = self.all[index]
            if not gradient.collected:
                gradient.collect()
            self._reducer.reduce(gradient)
        self._next = len(self._order)
        for gradient in self.all:
            gradient.note_arrivals()
        self._reducer.finish()
        if not self._order_agreed:
            self._agree()
        if self._nested or any([gradient.late for gradient in self.all]):
            self._collect_late()
        if self._held:
            self._tell_of_held()
        self.complete = self.backward.boundary

    def complete_window(self) -> None:
        """Reduce what the last backward has not, because it was not known to be the window's last."""
        if self.complete:
            return
        self.backward.turn_out_last()
        for index in self._order:
            self._reducer.reduce_rest(self.all[index])
        self._reducer.finish()
        self._tell_of_held()
        self.complete = True

    # Sums that are complete.

    def _summed(self, gradient: FlatGradient) -> None:
        """The window's sum is complete: it lands, and its update may begin unless more of it may come."""
        gradient.land()
        if self._updates is None or not self._updates.in_backward:
            return
        gradient.note_arrivals()  # what is absent now is so for the whole window
        if self._nested and (self._late_before is None or gradient in self._late_before):
            self._held[gradient] = None
        else:
            self._told.add(gradient)
            self._updates.landed(gradient)

    def _tell_of_held(self) -> None:
        """Nothing comes late any more."""
        held, self._held = self._held, {}
        for gradient in held:
            assert self._updates is not None
            gradient.squares()  # afterwards there may be nothing left to measure
            self._updates.landed(gradient)

    def in_order(self) -> list[FlatGradient]:
        """In the order in which the backward completes them, which ranks have agreed on."""
        order = self._order if self.comm.size > 1 else dict.fromkeys([*self._collected, *self._order])
        return [self.all[index] for index in order]

    def of(self, flat: Flat) -> FlatGradient | None:
        """The gradient of a flat; None for frozen ones."""
        return next((gradient for gradient in self.all if gradient.flat is flat), None)

    def norms(self, units: Iterable[Unit]) -> dict[str, float]:
        """The norm of the mean gradients of each unit. Every rank calls it."""
        squares = self.norm.by_flat(self.all)
        sums = {unit.name: [squares[flat] for flat in unit.flats if flat in squares] for unit in units}
        return {name: math.sqrt(sum(found)) * self.scale for name, found in sums.items() if found}

    def finite(self, gradient: FlatGradient) -> bool:
        """Whether this rank's part has neither inf nor NaN, once it has landed where the host updates it."""
        return math.isfinite(self.link.read(gradient.all_squares()))

    # What ranks find out together.

    def _agree(self) -> None:
        """After the first backward: the order in which rank 0 saw flats complete is everybody's from now on.

        And where a backward within a backward was one rank's alone, all look for late gradients together.
        """
        told = self.comm.gather_objects((self._collected, self._nested))
        self._nested = any(nested for _, nested in told)
        agreed, _ = told[0]
        self._order_agreed = bool(agreed)
        self._order = list(dict.fromkeys([*agreed, *self._order]))

    def _collect_late(self) -> None:
        """A second collection for the flats that any rank got late gradients for."""
        assert self._nested, [gradient.flat for gradient in self.all if gradient.late]
        late = torch.tensor([float(gradient.late) for gradient in self.all]).to(self.all[0].flat.whole.device)
        self.comm.all_reduce(late, "max").wait()
        # All were held back in the first of these backwards, which takes memory for all of them.
        self._trims = self._late_before is None and bool(self._held)
        self._late_before = self._late_before or set()
        for gradient in (self.all[index] for index, flag in enumerate(self.comm.read(late)) if flag):
            if gradient in self._told:
                raise WherryError(
                    f"{gradient.flat.name}: a gradient came after the backward had updated its weights already, from a "
                    "reentrant checkpoint that uses a weight which is used elsewhere too; set "
                    '"wherry": {"update_policy": "before_use"}'
                )
            self._late_before.add(gradient)
            if gradient.partitioned or gradient.reduced:
                self._reducer.reduce(gradient)
            else:
                gradient.collect()
                if self.backward.boundary:
                    self._summed(gradient)
        self._reducer.finish()

    # The end of a window.

    def end_window(self) -> None:
        """The update has used the gradients; the next micro-batch starts a new window."""
        for gradient in self.all:
            gradient.end_window()

    def drop(self) -> None:
        """Forget the window's gradients, those on their way included."""
        self.complete = False
        self._reducer.drop()
        self._copies.drop()
        self._held.clear()
        for gradient in self.all:
            with suppress(Exception):
                gradient.landing.wait()  # its error has been raised elsewhere
            gradient.drop()

    def choose(self, policy: GradientPolicy, way_of: Callable[[Flat], Landing], flats: Iterable[Flat]) -> None:
        """Sum and land the gradients of these flats from here on, in this way. It is called between two windows."""
        if self._updates is not None:
            self._updates.detach()
        self.drop()
        self.policy = policy
        # The sums so far are given back before there is memory for others.
        self._forget()
        self._trim()
        self._make(flats, policy, way_of)
        self._late_before = None
        if self._arrivals is not None:
            self.watch(self._arrivals)
        if self._updates is not None:
            self._updates.attach(self)

    def settle(self) -> None:
        """Nothing is on its way any more, and no memory is kept for what is to come."""
        self._copies.wait()
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

    def _forget(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        for gradient in self.all:
            gradient.close()
        self.all.clear()
        self._told.clear()

    def close(self) -> None:
        self.drop()
        self._forget()
        self._copies.close()
        self.pool.close()
