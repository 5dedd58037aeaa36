"""Gather and release: making a unit's working weights whole, and letting go of all but the shard."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wherry.observe.spans import span
from wherry.parallel.comm import Comm
from wherry.sharding.schedule import Schedule
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.tiers.streams import Link
from wherry.tiers.tickets import Ticket, TicketGroup

JOURNAL = 1_000_003


class Gatherer:
    """Gathers and releases units, and prefetches the ones that the schedule expects next."""

    def __init__(
        self,
        units: list[Unit],
        comm: Comm,
        schedule: Schedule,
        link: Link,
        *,
        live_limit: int,
        prefetch: int,
        read_ahead: int = 0,
    ) -> None:
        self.units = units
        self.comm = comm
        self.schedule = schedule
        self.link = link
        # Completes the updates of flats that are still under way.
        self.settle: Callable[[list[Flat]], None] = lambda flats: None
        # Bytes of shards that are read from disk ahead of the gathers.
        self.read_ahead = read_ahead
        self.live_limit = live_limit
        self.prefetch_limit = prefetch
        # Elements of flats that travel and are whole, or on the way to be.
        self.live = 0
        self.peak_live = 0
        # Nothing is released while a graph of gradients (`create_graph`) may still be differentiated.
        self.hold = False
        # A digest of the gathers since the last update, in their order.
        self.journal = 0
        # Flats on disk whose shard has been fetched for a gather to come.
        self._reading: dict[Flat, None] = {}
        self._number = {flat: i for i, flat in enumerate(f for unit in units for f in unit.flats)}

    def start(self, unit: Unit) -> None:
        """Set the unit's gather going, if it is not whole or on its way."""
        for flat in unit.travelling:
            if flat.weights is Weights.RELEASED:
                self._start(flat)

    def gather(self, unit: Unit) -> None:
        """Make the unit's weights whole and up to date."""
        if unit.pending:
            self.settle(unit.flats)
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

    def prefetch(self, *, settle: bool = False) -> None:
        """Set going the gathers of the units that are expected next, and reads from disk further ahead.

        A unit whose update is under way ends the gathering ahead, unless `settle` says to wait for it.
        """
        self._gather_ahead(settle)
        if self.read_ahead:
            self._read_ahead()

    def _gather_ahead(self, settle: bool) -> None:
        ahead = 0
        for follower in self.schedule.ahead():
            if follower.pending and not settle:
                return
            size = sum(flat.layout.numel for flat in follower.travelling if flat.weights is Weights.RELEASED)
            ahead += size
            # One unit ahead is always allowed as far as the live limit goes, or nothing larger than a bucket overlaps.
            if self.live + size > self.live_limit or (ahead > self.prefetch_limit and ahead > size):
                return
            self.start(follower)
            # What rests on disk is gathered one unit ahead only: reading is what looks further.
            if ahead > self.prefetch_limit or follower.on_disk:
                return

    def _read_ahead(self) -> None:
        """Begin to read the shards of the units that follow, within the budget of host memory."""
        room = self.read_ahead - sum(flat.home.in_memory for flat in self._reading if flat.home is not None)
        for follower in self.schedule.ahead():
            for flat in follower.travelling:
                if not flat.at_rest_on_disk or flat.weights is not Weights.RELEASED or flat in self._reading:
                    continue
                room -= flat.shard_nbytes
                if room < 0 or flat.pending:
                    return
                assert flat.home is not None
                flat.home.fetch()
                self._reading[flat] = None

    def stop_reading(self) -> None:
        """Let go of what was read ahead and not used."""
        while self._reading:
            flat, _ = self._reading.popitem()
            assert flat.home is not None
            flat.home.leave()

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
        if flat.pending:
            self.settle([flat])
        if flat.home is not None:
            if flat in self._reading:
                del self._reading[flat]
            flat.home.fetch().wait()
        # The same storage grows again: views that autograd saved in forward become valid, at an unchanged version.
        flat.whole.untyped_storage().resize_(flat.nbytes)
        with torch.autograd._unsafe_preserve_version_counter(flat.whole):
            flat.ticket = self._bring(flat)
        flat.weights = Weights.GATHERING
        self.journal = (self.journal * 31 + self._number[flat] + 1) % JOURNAL
        self.live += flat.layout.numel
        self.peak_live = max(self.peak_live, self.live)

    def _bring(self, flat: Flat) -> Ticket:
        """This rank's part comes over its own link, everybody's over the network."""
        if flat.home is None:
            return self.comm.all_gather(flat.whole, flat.shard_memory, flat.name)
        own = flat.whole[slice(*flat.layout.shard_range(flat.rank))]
        copied = self.link.up(own, flat.shard_memory)
        flat.home.leave(copied)
        if self.comm.size == 1:
            return copied
        with self.link.uploading():
            gathered = self.comm.all_gather(flat.whole, own, flat.name)
        return TicketGroup([copied, gathered])

    def _finish(self, flat: Flat) -> None:
        if flat.weights is Weights.WHOLE:
            return
        assert flat.weights is Weights.GATHERING, flat
        flat.ticket.wait()
        flat.show_whole()
        flat.weights = Weights.WHOLE
