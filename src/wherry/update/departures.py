"""New weights on their way to every rank that holds them whole: which flats travel together, and what begins that."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import torch

from wherry.parallel import merged
from wherry.parallel.comm import Comm
from wherry.parallel.merged import Merging
from wherry.sharding.unit import Flat
from wherry.tiers.tickets import Ticket, TicketGroup
from wherry.update.jobs import Job
from wherry.update.state import Batch


class Departure(Ticket):
    """Gathers that begin in another thread, after an update. `wait()` is until they have, or raises why not."""

    __slots__ = ("_error", "_event", "tickets")

    def __init__(self) -> None:
        # Of the gathers: until they have ended.
        self.tickets: list[Ticket] = []
        self._error: BaseException | None = None
        self._event = threading.Event()

    def leave(self) -> None:
        self._event.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def come_to_an_end(self) -> None:
        """Wait, and leave an error to `wait()`."""
        self._event.wait()

    def wait(self) -> None:
        self._event.wait()
        if self._error is not None:
            raise self._error


class Departures:
    """The gathers of batches' new weights. A batch sets out, and then it arrives.

    A batch may be `promised` after its update: then all ranks have asked for its gathers at the same place of their
    program, and a thread begins them in that order. Otherwise they begin where it sets out.
    """

    def __init__(self, comm: Comm, merging: Merging) -> None:
        self._comm = comm
        self._merging = merging
        # The ranks as a group whose collectives a thread begins, where there is one.
        self.beside: Comm | None = None
        # Of each batch the flats that travel, and of these the ones that travel together.
        self._parcels: dict[Batch, list[list[Flat]]] = {}
        self.promised: dict[Batch, Departure] = {}
        # What has set out and not arrived.
        self.arriving: dict[Batch, list[Ticket]] = {}

    def pack(self, batches: Iterable[Batch]) -> None:
        """Say which flats of these batches travel: those that every rank holds whole, and ranks share the update of."""
        self._parcels = {batch: self._packed(batch) for batch in batches}

    def _packed(self, batch: Batch) -> list[list[Flat]]:
        parcels: list[list[Flat]] = []
        together: list[Flat] = []
        for flat in (state.flat for state in batch.states if state.updated):
            if not flat.resident or flat.layout.ranks == 1:
                continue
            if not self._merging.takes(flat.whole):
                parcels.append([flat])
                continue
            if not self._merging.fits([other.whole for other in together], flat.whole):
                parcels.append(together)
                together = []
            together.append(flat)
        return [*parcels, together] if together else parcels

    def travels(self, batch: Batch) -> bool:
        return bool(self._parcels[batch])

    def open_beside(self, device: torch.device) -> None:
        """From here on departures may be promised, if the ranks can have a group for it."""
        if self.beside is None and any(self._parcels.values()):
            self.beside = self._comm.beside(device)

    def promise(self, batch: Batch, job: Job) -> None:
        """The batch sets out by itself as soon as its update has ended."""
        assert self.beside is not None and self.beside.starter is not None
        self.promised[batch] = departure = Departure()
        self.beside.starter.add(partial(self._depart, batch, job, departure))

    def _depart(self, batch: Batch, job: Job, departure: Departure) -> None:
        """In the starter's thread: the update ends, and the gathers of its weights begin."""
        assert self.beside is not None and self.beside.starter is not None
        starter = self.beside.starter
        try:
            job.wait()
            if starter.stopped is not None:
                raise starter.stopped
            with torch.no_grad():
                self._begin(batch, self.beside, departure.tickets)
            departure.leave()
        except BaseException as error:
            if starter.stopped is None:
                starter.stopped = error
                self.beside.tell(error)
            departure.fail(error)

    def set_out(self, batch: Batch) -> None:
        """The update of a batch has ended, and what was promised after it has been kept."""
        departure = self.promised.pop(batch, None)
        self.arriving[batch] = tickets = [] if departure is None else departure.tickets
        if departure is None:
            self._begin(batch, self._comm, tickets)

    def arrive(self, batch: Batch) -> None:
        """Its weights are whole on every rank."""
        try:
            for ticket in self.arriving[batch]:
                ticket.wait()
        except BaseException:
            self.arrive_quietly()
            raise
        del self.arriving[batch]

    def arrive_quietly(self) -> None:
        """What was begun comes to its end; there is an error to be told already."""
        for departure in self.promised.values():
            departure.come_to_an_end()
        begun = [*self.arriving.values(), *(departure.tickets for departure in self.promised.values())]
        with suppress(Exception):
            TicketGroup([ticket for tickets in begun for ticket in tickets]).wait()

    def _begin(self, batch: Batch, comm: Comm, tickets: list[Ticket]) -> None:
        """Begin a batch's gathers. Where one cannot begin, those before it are among `tickets`, to be waited for."""
        for flats in self._parcels[batch]:
            wholes, shards = [flat.whole for flat in flats], [flat.shard_memory for flat in flats]
            tickets.append(merged.all_gather(comm, wholes, shards, merged.name_of(flats)))

    def close(self) -> None:
        try:
            self.arrive_quietly()
        finally:
            if self.beside is not None:
                self.beside.close()
            self._parcels.clear()
            self.promised.clear()
            self.arriving.clear()
