"""Working weights: which units are expected next, gathering them, and letting go of all but the shard."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch

from wherry.observe.log import logger
from wherry.observe.spans import SILENT, recording, span
from wherry.parallel.comm import Merging
from wherry.parallel.topology import Topology
from wherry.sharding.quantized import is_wide
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.tickets import CallbackTicket, Ticket, TicketGroup
from wherry.tiers.storage import Storage
from wherry.tiers.streams import Link

# Digests of what a rank did are numbers below it.
DIGEST = 1_000_003
# After so many windows in which every rank took one and the same other path, the program itself changes its path.
TRUST = 4


class Pass(enum.Enum):
    """What a way through the units is for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    # A forward without gradients.
    LOOK = "look"
    # Members are single objects, and the hash that Python gives an enum is a call each time.
    __hash__ = object.__hash__


class Schedule:
    """The order in which units are expected, in forwards and in backwards.

    Collectives must come in one order on every rank. A rank whose model passes over a unit that is expected stands in
    for it: it takes part in the unit's gather, and in backward in its reduction, because other ranks may use the unit.
    So ranks may skip different units, and the results are those of missing gradients.

    Until the first step, the order in which the model holds its units is expected. After each window the ranks learn,
    by a digest that travels with the gradients' norm, whether they all took one path. If they did, it is expected from
    then on, and units that no rank used a few windows longer. Ranks that have once differed keep to an order of all.
    """

    def __init__(self, units: Sequence[Unit], ranks: int) -> None:
        self._all = [unit for unit in units if unit.travelling and not unit.root]
        self._ranks = ranks
        self._expected: dict[Pass, list[Unit]] = {
            Pass.FORWARD: self._all,
            Pass.BACKWARD: self._all[::-1],
            Pass.LOOK: [],
        }
        # What is known, and no guess: only for these passes units are gathered ahead. The same on every rank.
        self._proven: set[Pass] = set()
        # The pass that runs, what it has reached, and how far along the expected order it is.
        self.running: Pass | None = None
        self._path: list[Unit] = []
        self._place = 0
        # Of the window: what each kind of pass did last, and a digest of all that they did.
        self._seen: dict[Pass, list[Unit]] = {}
        self.digest = 0
        # In how many windows all ranks took another path than was expected, and whether they have ever differed.
        self._alike = 0
        self._differed = False
        # Every rank takes the path of the others, whatever it is: nobody needs a stand-in.
        self._trusted = ranks == 1

    # A pass.

    def begin(self, kind: Pass) -> None:
        self.running = kind
        self._path = []
        self._place = 0
        if kind is not Pass.LOOK:
            self.digest = (self.digest * 31 + 7) % DIGEST

    def reach(self, unit: Unit) -> Iterator[Unit]:
        """This rank needs `unit` now. Yields the units to stand in for before it, in their order."""
        if self.running is None or (self._path and self._path[-1] is unit and unit.whole):
            return  # several micro-batches go through the unit, one after another
        self._path.append(unit)
        if self.running is not Pass.LOOK:
            self.digest = (self.digest * 31 + unit.index + 1) % DIGEST
        expected = self._expected[self.running]
        try:
            place = expected.index(unit, self._place)
        except ValueError:
            return  # not expected any more: gathered as it comes
        yield from self._skip(place)
        self._place = place + 1

    def end(self) -> Iterator[Unit]:
        """The pass has ended. Yields the units to stand in for."""
        kind = self.running
        if kind is None:
            return
        yield from self._skip(len(self._expected[kind]))
        self.running = None
        if kind is Pass.LOOK or self._trusted:
            self._follow(kind)
        if kind is not Pass.LOOK:
            self._seen[kind] = self._path

    def _skip(self, place: int) -> Iterator[Unit]:
        """Go on to a place, by way of all that is expected before it."""
        if self._trusted or self.running in (None, Pass.LOOK):
            return
        expected = self._expected[self.running]
        while self._place < place:
            self._place += 1
            yield expected[self._place - 1]

    def _follow(self, kind: Pass) -> None:
        """What this pass did is what the next is expected to do."""
        self._proven.add(kind)
        if self._path == self._expected[kind]:
            return
        if self._expected[kind]:
            logger.debug("the model took another path through its units; the schedule follows it")
        self._expected[kind] = self._path
        if kind is Pass.FORWARD:
            self._expected[Pass.BACKWARD] = self._path[::-1]

    def drop(self) -> None:
        """The pass was broken off."""
        self.running = None

    def ahead(self) -> Iterator[Unit]:
        """The units that are expected next, nearest first; none while the order is no more than a guess."""
        kind = self.running
        proven = kind in self._proven or (kind is Pass.BACKWARD and Pass.FORWARD in self._proven)
        if kind is None or not proven:
            return iter(())
        return iter(self._expected[kind][self._place :])

    # Between windows.

    def settle(self, *, one_path: bool) -> None:
        """After a window, on every rank alike: what was done is expected of the next, if every rank did the same."""
        seen, self._seen, self.digest = self._seen, {}, 0
        if self._ranks == 1:
            return
        self._proven |= seen.keys()
        if not one_path:
            self.differ()
        elif not (self._differed or self._trusted) and any(path != self._expected[kind] for kind, path in seen.items()):
            self._alike += 1
            self._trusted = self._alike >= TRUST
            # Units that ran forward only need have no backward.
            forward = set(seen.get(Pass.FORWARD, ()))
            for kind, path in seen.items():
                without = forward if kind is Pass.BACKWARD else ()
                self._expected[kind] = path if self._trusted else self._with_rest(kind, path, without)

    def differ(self) -> None:
        """Ranks have run different units: from now on each stands in for those that it skips."""
        if not self._differed:
            logger.debug("ranks run different units; each stands in for the units that it skips")
        self._differed, self._trusted = True, False
        for kind in (Pass.FORWARD, Pass.BACKWARD):
            self._expected[kind] = self._with_rest(kind, self._expected[kind])

    def _with_rest(self, kind: Pass, path: list[Unit], without: Collection[Unit] = ()) -> list[Unit]:
        """An order of all units: `path` with those that it lacks, each behind the one that it was expected after."""
        merged = list(path)
        for order in (self._expected[kind], self._all if kind is Pass.FORWARD else self._all[::-1]):
            place, here = 0, set(merged)
            for unit in order:
                if unit in here:
                    place = merged.index(unit) + 1
                elif unit not in without:
                    merged.insert(place, unit)
                    place += 1
        return merged


class Gatherer:
    """Gathers and releases units, and prefetches the ones that the schedule expects next."""

    def __init__(
        self,
        units: list[Unit],
        topology: Topology,
        link: Link,
        merging: Merging,
        *,
        live_limit: int,
        look_ahead: int,
        read_ahead: int,
        settle: Callable[[list[Flat]], None],
    ) -> None:
        self.units = units
        self.comm = topology.shards
        self.schedule = Schedule(units, topology.data.size)
        self.link = link
        # Completes the updates of flats that are still under way.
        self.settle = settle
        # Bytes of shards that are read from disk ahead of the gathers.
        self.read_ahead = read_ahead
        self.merging = merging
        # The ranks among which weights are shared a second time, so that backward gathers from near.
        self.node = topology.node if topology.node is not None and topology.node.size > 1 else None
        self.live_limit = live_limit
        # Elements that may be on their way beside the unit at work; one unit always may.
        self.look_ahead = look_ahead
        # Elements of flats that travel and are whole, or on the way to be.
        self.live = 0
        self.peak_live = 0
        # Nothing is released while a graph of gradients (`create_graph`) may still be differentiated.
        self._holds = False
        # A digest of the gathers since the last update, in their order.
        self.gather_digest = 0
        # Flats on disk whose shard has been fetched for a gather to come.
        self._reading: dict[Flat, Ticket] = {}
        self.take_stock()

    def take_stock(self) -> None:
        """Note the flats that units have now."""
        self._travelling = [unit for unit in self.units if unit.travelling]
        travelling = [flat for unit in self._travelling for flat in unit.travelling]
        self._small = {flat for flat in travelling if flat.storage is None and self.merging.takes(flat.whole)}
        self._number = {flat: i for i, flat in enumerate(f for unit in self.units for f in unit.flats)}
        if self.node is not None:
            for flat in travelling:
                if flat.secondary is None:
                    flat.share_again(self.node.size)

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
                if together and not (
                    self._is_near(together[0]) == self._is_near(flat)
                    and (together[0].dtype == flat.dtype or (is_wide(together[0].dtype) and is_wide(flat.dtype)))
                    and self.merging.fits([other.whole for other in together], flat.whole)
                ):
                    self._start(*together)
                    together = []
                together.append(flat)
        if together:
            self._start(*together)

    def _is_near(self, flat: Flat) -> bool:
        """Whether the flat is gathered from the secondary shards: in backward, of what the forward has gathered."""
        return self.node is not None and flat.secondary_fresh and self.schedule.running is Pass.BACKWARD

    def forget_near(self) -> None:
        """The weights change: secondary shards are out of date."""
        if self.node is not None:
            for unit in self.units:
                for flat in unit.travelling:
                    flat.forget_secondary()

    def gather(self, unit: Unit) -> None:
        """Make the unit's weights whole and up to date."""
        if unit.pending:
            self.settle(unit.flats)
        if unit.whole:
            return
        with span("gather", unit.name) if recording() else SILENT:
            self.start(unit)
            for flat in unit.travelling:
                if flat.weights is Weights.GATHERING:
                    flat.end_gather()

    def gather_flat(self, flat: Flat) -> None:
        if flat.weights is Weights.RELEASED:
            self._start(flat)
        if flat.weights is Weights.GATHERING:
            flat.end_gather()

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
        room = self.read_ahead - sum(flat.storage.in_memory for flat in self._reading if flat.storage is not None)
        for follower in self.schedule.ahead():
            for flat in follower.travelling:
                if not flat.at_rest_on_disk or flat.weights is not Weights.RELEASED or flat in self._reading:
                    continue
                room -= flat.shard_nbytes
                if room < 0 or flat.pending:
                    return
                assert flat.storage is not None
                try:
                    self._reading[flat] = flat.storage.fetch()
                except BaseException as error:
                    self.comm.tell(error)  # before any hook takes part in another collective
                    raise

    def drop_reads(self) -> None:
        """Let go of what was read ahead and not used."""
        while self._reading:
            flat, _ = self._reading.popitem()
            assert flat.storage is not None
            flat.storage.release()

    def release(self, unit: Unit) -> None:
        for flat in unit.travelling:
            self.release_flat(flat)

    def take_apart(self, flat: Flat) -> None:
        """Give a flat's parameters memory of their own, and close it. Every rank must call it."""
        self.gather_flat(flat)
        views = flat.layout.views(flat.whole.clone())
        if not flat.resident:
            self.release_flat(flat)
            flat.close()
        flat.show(views)

    def release_all(self) -> None:
        for unit in self._travelling:
            self.release(unit)

    def hold(self) -> None:
        """Release nothing until the window ends or is dropped: a second backward will need what the first one has."""
        self._holds = True

    def end_hold(self) -> None:
        self._holds = False

    def end_window(self) -> None:
        """The weights change. Those gathered by a forward whose backward never came are out of date now."""
        self._holds = False
        self.gather_digest = 0
        self.drop_reads()
        self.forget_near()
        self.release_all()

    def give_up(self) -> None:
        """Nobody wants weights any more, nor to know what has become of gathers that are under way."""
        for unit in self._travelling:
            for flat in unit.travelling:
                if flat.weights is not Weights.GATHERING:
                    continue
                try:
                    flat.ticket.wait()
                except Exception:
                    flat.give_up_gather()
                    self.live -= flat.layout.numel

    def release_flat(self, flat: Flat) -> None:
        """Free the memory of a whole flat. Its parameters keep shape and dtype, and read as NaN."""
        if flat.resident or flat.weights is Weights.RELEASED or flat.pins or (self._holds and not flat.lent):
            return
        if self.node is not None and self.schedule.running is Pass.FORWARD:
            if flat.weights is Weights.GATHERING:
                flat.end_gather()
            flat.keep_secondary(self.node.rank)
        flat.release()
        self.live -= flat.layout.numel

    def _start(self, *flats: Flat) -> None:
        try:
            for flat in flats:
                if flat.pending:
                    self.settle([flat])
                # The same storage grows again: views that autograd saved in forward become valid, at an unchanged
                # version. Where there is no memory for it, nothing has been fetched yet that nobody would release.
                flat.elastic.grow()
                if flat.storage is not None and not self._is_near(flat):
                    self._fetch(flat, flat.storage)
        except BaseException:
            for flat in flats:
                flat.elastic.shrink()
            raise
        wholes = tuple([flat.whole for flat in flats])
        with torch.autograd._unsafe_preserve_version_counter(wholes):
            ticket = self._bring(flats, wholes)
        if len(flats) > 1:
            ticket = CallbackTicket(partial(self._receive, ticket, wholes), ticket.done)
        for flat in flats:
            flat.begin_gather(ticket)
            self.gather_digest = (self.gather_digest * 31 + self._number[flat] + 1) % DIGEST
            self.live += flat.layout.numel
        self.peak_live = max(self.peak_live, self.live)

    def _fetch(self, flat: Flat, storage: Storage) -> None:
        """Have the shard in host memory; it may have been read ahead."""
        reading = self._reading.pop(flat, None)
        fetched = reading is not None
        try:
            reading = reading or storage.fetch()
            fetched = True
            reading.wait()
        except BaseException as error:
            if fetched:
                storage.release(failed=True)
            self.comm.tell(error)  # before any hook takes part in another collective
            raise

    def _bring(self, flats: Sequence[Flat], wholes: Sequence[torch.Tensor]) -> Ticket:
        """This rank's part comes over its own link, everybody's over the network."""
        first, names = flats[0], [flat.name for flat in flats]
        if self._is_near(first):
            assert self.node is not None
            shards = [flat.secondary for flat in flats if flat.secondary is not None]
            return self.node.all_gather_together(wholes, shards, names)
        if first.storage is None:
            return self.comm.all_gather_together(wholes, [flat.shard_memory for flat in flats], names)
        assert len(flats) == 1, flats
        own = first.whole[first.own]
        copied = self.link.up(own, first.shard_memory)
        first.storage.release(copied)
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
