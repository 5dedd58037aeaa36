"""Gather and release: making a unit's working weights whole, and letting go of all but the shard."""

from __future__ import annotations

import torch

from wherry.observe.spans import span
from wherry.parallel.comm import Comm
from wherry.sharding.schedule import Schedule
from wherry.sharding.unit import Flat, Unit, Weights

JOURNAL = 1_000_003


class Gatherer:
    """Gathers and releases units, and prefetches the ones that the schedule expects next."""

    def __init__(self, units: list[Unit], comm: Comm, schedule: Schedule, *, live_limit: int, prefetch: int) -> None:
        self.units = units
        self.comm = comm
        self.schedule = schedule
        self.live_limit = live_limit
        self.prefetch_limit = prefetch
        # Elements of flats that travel and are whole, or on the way to be.
        self.live = 0
        self.peak_live = 0
        # Nothing is released while a graph of gradients (`create_graph`) may still be differentiated.
        self.hold = False
        # A digest of the gathers since the last update, in their order.
        self.journal = 0
        self._number = {flat: i for i, flat in enumerate(f for unit in units for f in unit.flats)}

    def start(self, unit: Unit) -> None:
        """Set the unit's gather going, if it is not whole or on its way."""
        for flat in unit.travelling:
            if flat.weights is Weights.RELEASED:
                self._start(flat)

    def gather(self, unit: Unit) -> None:
        """Make the unit's weights whole, and set going what is needed after it."""
        if unit.whole:
            return
        with span("gather", unit.name):
            self.start(unit)
            for flat in unit.travelling:
                self._finish(flat)

    def gather_flat(self, flat: Flat) -> None:
        if flat.weights is Weights.RELEASED:
            self._start(flat)
        self._finish(flat)

    def prefetch(self) -> None:
        """Set going the gathers of the units that are expected next, within the byte budgets."""
        ahead = 0
        for follower in self.schedule.ahead():
            size = sum(flat.layout.numel for flat in follower.travelling if flat.weights is Weights.RELEASED)
            ahead += size
            # One unit ahead is always allowed as far as the live limit goes, or nothing larger than a bucket overlaps.
            if self.live + size > self.live_limit or (ahead > self.prefetch_limit and ahead > size):
                return
            self.start(follower)
            if ahead > self.prefetch_limit:
                return

    def release(self, unit: Unit) -> None:
        for flat in unit.travelling:
            self.release_flat(flat)

    def release_flat(self, flat: Flat) -> None:
        """Free the memory of a whole flat. Its parameters keep shape and dtype, and read as NaN."""
        if flat.resident or flat.weights is Weights.RELEASED or flat.pins or self.hold:
            return
        if flat.weights is Weights.GATHERING:
            flat.ticket.wait()
        flat.show_blanks()
        flat.whole.untyped_storage().resize_(0)
        flat.weights = Weights.RELEASED
        self.live -= flat.layout.numel

    def _start(self, flat: Flat) -> None:
        # The same storage grows again: views that autograd saved in forward become valid, at an unchanged version.
        flat.whole.untyped_storage().resize_(flat.nbytes)
        with torch.autograd._unsafe_preserve_version_counter(flat.whole):
            flat.ticket = self.comm.all_gather(flat.whole, flat.shard, flat.name)
        flat.weights = Weights.GATHERING
        self.journal = (self.journal * 31 + self._number[flat] + 1) % JOURNAL
        self.live += flat.layout.numel
        self.peak_live = max(self.peak_live, self.live)

    def _finish(self, flat: Flat) -> None:
        if flat.weights is Weights.WHOLE:
            return
        assert flat.weights is Weights.GATHERING, flat
        flat.ticket.wait()
        flat.show_whole()
        flat.weights = Weights.WHOLE
