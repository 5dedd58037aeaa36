"""Gather and release: making a unit's working weights whole, and letting go of all but the shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from wherry.observe.spans import span
from wherry.parallel import merged
from wherry.parallel.comm import Comm
from wherry.parallel.merged import Merging
from wherry.sharding.schedule import Pass, Schedule
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.tiers.homes import Home
from wherry.tiers.streams import Link
from wherry.tiers.tickets import CallbackTicket, Ticket, TicketGroup

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
        look_ahead: int,
        read_ahead: int = 0,
        merging: Merging | None = None,
        node: Comm | None = None,
        settle: Callable[[list[Flat]], None] = lambda flats: None,
    ) -> None:
        self.units = units
        self._travelling = [unit for unit in units if unit.travelling]
        self.comm = comm
        self.schedule = schedule
        self.link = link
        # Completes the updates of flats that are still under way.
        self.settle = settle
        # Bytes of shards that are read from disk ahead of the gathers.
        self.read_ahead = read_ahead
        self.merging = merging or Merging(0)
        travelling = (flat for unit in units for flat in unit.travelling)
        self._small = {flat for flat in travelling if flat.home is None and self.merging.takes(flat.whole)}
        # The ranks among which weights are shared a second time, so that backward gathers from near.
        self.node = node if node is not None and node.size > 1 else None
        if self.node is not None:
            for flat in (flat for unit in units for flat in unit.travelling):
                flat.secondary = torch.empty(
                    flat.layout.numel // self.node.size, dtype=flat.dtype, device=flat.whole.device
                )
        self.live_limit = live_limit
        # Elements that may be on their way beside the unit at work; one unit always may.
        self.look_ahead = look_ahead
        # Elements of flats that travel and are whole, or on the way to be.
        self.live = 0
        self.peak_live = 0
        # Nothing is released while a graph of gradients (`create_graph`) may still be differentiated.
        self.hold = False
        # A digest of the gathers since the last update, in their order.
        self.journal = 0
        # Flats on disk whose shard has been fetched for a gather to come.
        self._reading: dict[Flat, Ticket] = {}
        self._number = {flat: i for i, flat in enumerate(f for unit in units for f in unit.flats)}

    def start(self, *units: Unit) -> None:
        """Set the units' gathers going, for what is not whole or on its way; small flats are gathered together."""
        together: list[Flat] = []
        for unit in units:
            for flat in unit.travelling:
                if flat.weights is not Weights.RELEASED:
                    continue
                if flat not in self._small:
                    self._start(flat)
                    continue
                near = [self._is_near(other) for other in together[:1]]
                fits = self.merging.fits([other.whole for other in together], flat.whole)
                if together and (not fits or near != [self._is_near(flat)]):
                    self._start(*together)
                    together = []
                together.append(flat)
        if together:
            self._start(*together)

    def _is_near(self, flat: Flat) -> bool:
        """Whether the flat is gathered from the secondary shards: in backward, of what the forward has gathered."""
        return self.node is not None and flat.secondary_fresh and self.schedule.running is Pass.BACKWARD

    def _keep_near(self, flat: Flat) -> None:
        """The forward lets go of a flat: this rank keeps its part of what its node shares."""
        if self.node is not None and self.schedule.running is Pass.FORWARD and not flat.secondary_fresh:
            assert flat.secondary is not None
            size = flat.secondary.numel()
            flat.secondary.copy_(flat.whole[self.node.rank * size : (self.node.rank + 1) * size])
            flat.secondary_fresh = True

    def forget_near(self) -> None:
        """The weights change: secondary shards are out of date."""
        if self.node is not None:
            for unit in self.units:
                for flat in unit.travelling:
                    flat.secondary_fresh = False

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

    def gather_for_readers(self, flat: Flat) -> None:
        """As `gather_flat`, in memory that stays as long as a view that somebody keeps of it, if it was released."""
        if flat.weights is Weights.RELEASED:
            flat.lend()
        try:
            self.gather_flat(flat)
        except BaseException:
            if flat.weights is Weights.RELEASED:
                flat.shrink()
            raise

    def prefetch(self, *, settle: bool = False) -> None:
        """Set going the gathers of the units that are expected next, and reads from disk further ahead.

        A unit that was not gathered since its last update ends the gathering ahead, unless `settle` says to wait for
        that update. Whether it is still under way each rank knows for itself, and all must gather the same together.
        """
        self._gather_ahead(settle)
        if self.read_ahead:
            self._read_ahead()

    def _gather_ahead(self, settle: bool) -> None:
        ahead, under_way, large, wanted = 0, False, False, list[Unit]()
        for follower in self.schedule.ahead():
            released = [flat for flat in follower.travelling if flat.weights is Weights.RELEASED]
            if not settle and any(flat.ungathered for flat in released):
                break
            size = sum(flat.layout.numel for flat in released)
            small = self._small.issuperset(released)
            under_way = under_way or not released
            # One unit ahead is always allowed as far as the live limit goes, or nothing larger than a bucket overlaps;
            # small ones before it do not take its place.
            too_far = ahead + size > self.look_ahead and (large or (small and ahead > 0))
            if self.live + ahead + size > self.live_limit or too_far:
                break
            ahead += size
            large = large or not small
            if released:
                wanted.append(follower)
            # What rests on disk is gathered one unit ahead only: reading is what looks further.
            if ahead > self.look_ahead or follower.on_disk:
                break
        # Small units wait for each other as long as something is ahead without them.
        if not (under_way and not large and ahead < self.merging.limit // 2):
            self.start(*wanted)

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
                try:
                    self._reading[flat] = flat.home.fetch()
                except BaseException as error:
                    self.comm.tell(error)  # before any hook takes part in another collective
                    raise

    def stop_reading(self) -> None:
        """Let go of what was read ahead and not used."""
        while self._reading:
            flat, _ = self._reading.popitem()
            assert flat.home is not None
            flat.home.leave()

    def release(self, unit: Unit) -> None:
        for flat in unit.travelling:
            self.release_flat(flat)

    def release_all(self) -> None:
        for unit in self._travelling:
            self.release(unit)

    def give_up(self) -> None:
        """Nobody wants weights any more, nor to know what has become of gathers that are under way."""
        for unit in self._travelling:
            for flat in unit.travelling:
                if flat.weights is not Weights.GATHERING:
                    continue
                try:
                    flat.ticket.wait()
                except Exception:
                    # What has failed may still write to its memory: that goes with the tensor, and to no other before.
                    flat.show_blanks()
                    flat.weights = Weights.RELEASED
                    self.live -= flat.layout.numel

    def release_flat(self, flat: Flat) -> None:
        """Free the memory of a whole flat. Its parameters keep shape and dtype, and read as NaN."""
        if flat.resident or flat.weights is Weights.RELEASED or flat.pins or (self.hold and not flat.lent):
            return
        if flat.weights is Weights.GATHERING:
            flat.ticket.wait()
        self._keep_near(flat)
        flat.show_blanks()
        flat.shrink()
        flat.weights = Weights.RELEASED
        self.live -= flat.layout.numel

    def _start(self, *flats: Flat) -> None:
        for flat in flats:
            if flat.pending:
                self.settle([flat])
            flat.ungathered = False
            if flat.home is not None and not self._is_near(flat):
                self._fetch(flat, flat.home)
            # The same storage grows again: views that autograd saved in forward become valid, at an unchanged version.
            flat.elastic.grow()
        wholes = tuple(flat.whole for flat in flats)
        with torch.autograd._unsafe_preserve_version_counter(wholes):
            ticket = self._bring(flats)
        if len(flats) > 1:
            ticket = CallbackTicket(partial(self._receive, ticket, wholes), ticket.done)
        for flat in flats:
            flat.ticket = ticket
            flat.weights = Weights.GATHERING
            self.journal = (self.journal * 31 + self._number[flat] + 1) % JOURNAL
            self.live += flat.layout.numel
        self.peak_live = max(self.peak_live, self.live)

    def _fetch(self, flat: Flat, home: Home) -> None:
        """Have the shard in host memory; it may have been read ahead."""
        reading = self._reading.pop(flat, None)
        fetched = reading is not None
        try:
            reading = reading or home.fetch()
            fetched = True
            reading.wait()
        except BaseException as error:
            if fetched:
                home.leave(failed=True)
            self.comm.tell(error)  # before any hook takes part in another collective
            raise

    def _bring(self, flats: Sequence[Flat]) -> Ticket:
        """This rank's part comes over its own link, everybody's over the network."""
        first = flats[0]
        if self._is_near(first):
            assert self.node is not None
            shards = [flat.secondary for flat in flats if flat.secondary is not None]
            return merged.all_gather(self.node, [flat.whole for flat in flats], shards, merged.name_of(flats))
        if first.home is None:
            wholes, shards = [flat.whole for flat in flats], [flat.shard_memory for flat in flats]
            return merged.all_gather(self.comm, wholes, shards, merged.name_of(flats))
        assert len(flats) == 1, flats
        own = first.whole[slice(*first.layout.shard_range(first.rank))]
        copied = self.link.up(own, first.shard_memory)
        first.home.leave(copied)
        if self.comm.size == 1:
            return copied
        with self.link.uploading():
            gathered = self.comm.all_gather(first.whole, own, first.name)
        return TicketGroup([copied, gathered])

    @staticmethod
    def _receive(ticket: Ticket, wholes: tuple[torch.Tensor, ...]) -> None:
        """What was gathered together is copied to its places by the wait."""
        with torch.autograd._unsafe_preserve_version_counter(wholes):
            ticket.wait()

    def _finish(self, flat: Flat) -> None:
        if flat.weights is Weights.WHOLE:
            return
        assert flat.weights is Weights.GATHERING, flat
        flat.ticket.wait()
        flat.show_whole()
        flat.weights = Weights.WHOLE
