"""A bucket's updates, each in four phases: fetch the state, update, store it, publish the weights."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wherry.parallel.comm import Comm, Merging
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.unit import Flat
from wherry.tickets import DONE, OnHost, Ticket
from wherry.tiers.storage import Storage
from wherry.update.optimizer_states import Absent, UpdateBucket, UpdatePiece
from wherry.update.rules import Groups
from wherry.update.update_thread import FETCH, READY, STORE, UPDATE, Steps, UpdateJob


@dataclass(frozen=True)
class UpdateTerms:
    """What all updates of one step are made with."""

    groups: Groups
    multiplier: float
    # Left alone.
    absent: Absent | None
    # What the device's current stream was given before.
    fence: Ticket


class Phase(enum.Enum):
    """How far a bucket's update has come."""

    SETTLED = "nothing is left to do"
    PENDING = "its weights are not where they rest"
    PUBLISHED = "they are, and those that every rank holds whole are being gathered"
    STORING = "they are in use, and its state is on the way to the disk"


class BucketPipeline:
    """One bucket, and the last update of it."""

    def __init__(self, bucket: UpdateBucket, gradients: list[FlatGradient], merging: Merging, comm: Comm) -> None:
        self.bucket = bucket
        self.flats = [state.flat for state in bucket.states]
        # Those of the flats.
        self.gradients = gradients
        # The flats that every rank holds whole and ranks share the update of: those that are gathered together.
        self.together = _gathered_together(bucket, merging)
        self.phase = Phase.SETTLED
        # At first one of nothing.
        self.job = UpdateJob(bucket.name, _nothing())
        self.job.run()
        # Whether the update has changed anything.
        self.updated = False
        self.gathers: list[Ticket] = []
        # Copies of weights that were published late: they read what the next update writes.
        self._published: list[Ticket] = []
        # The record that is being read, or has been, for an update that has not begun.
        self._prefetched: Ticket | None = None
        self._comm = comm

    def read_ahead(self) -> None:
        """Begin to read the record."""
        if self._prefetched is None and self.bucket.storage is not None:
            self._prefetched = self.bucket.storage.fetch()

    def drop_reads(self) -> None:
        """The record was read for an update that does not come."""
        if self._prefetched is not None and self.bucket.storage is not None:
            self._prefetched = None
            self.bucket.storage.release()

    def begin(self, terms: UpdateTerms, *, late: bool = False, fit: Callable[[], bool] | None = None) -> UpdateJob:
        """An update with the gradients as they are, or will have landed; who asks for it runs the job.

        A `late` one is lent them, and keeps new weights until they are published. `fit` is asked once they have landed:
        unless they are, state and weights stay as they are.
        """
        lent = [gradient.lend() for gradient in self.gradients] if late and self.bucket.apart else None
        self.job = UpdateJob(self.bucket.name, self._steps(terms, lent, fit))
        self.phase = Phase.PENDING
        self.updated = False
        return self.job

    def _steps(
        self, terms: UpdateTerms, lent: list[tuple[torch.Tensor, Ticket]] | None, fit: Callable[[], bool] | None
    ) -> Steps:
        """Its steps between waits."""
        bucket = self.bucket
        late = lent is not None
        weights = [] if late else [flat.storage for flat in self.flats if flat.storage is not None]
        fetched: list[Storage] = []
        sent: list[Ticket] = []
        try:
            # Fetch: the record, weights that the update reaches, and gradients.
            tickets: list[Ticket] = []
            if bucket.storage is not None:
                read, self._prefetched = self._prefetched, None
                tickets.append(bucket.storage.fetch() if read is None else read)
                fetched.append(bucket.storage)
            for storage in weights:
                tickets.append(storage.fetch())
                fetched.append(storage)
            for storage in weights:
                tickets.append(storage.readers())  # what was begun before and still reads what is about to change
            tickets += map(OnHost, self._published)
            tickets += [gradient.landing for gradient in self.gradients] if lent is None else [last for _, last in lent]
            if fit is not None and any(gradient.stays for gradient in self.gradients):
                tickets.append(OnHost(terms.fence))  # what is looked at has been computed by then
            for ticket in tickets:
                if ticket is not DONE:
                    yield FETCH, ticket
            # Update, in pieces; and weights that are apart go to where they rest while the next piece is updated.
            sends = bucket.apart and not late
            if fit is None or fit():
                self.updated = True
                streamed: list[tuple[UpdatePiece, Ticket]] = []
                for piece in bucket.begin_update(
                    self.gradients, terms.absent, None if lent is None else [gradient for gradient, _ in lent]
                ):
                    update = bucket.update(piece, terms.groups, terms.multiplier, terms.fence)
                    if bucket.streamed is not None:
                        streamed.append((piece, update))
                        continue
                    yield UPDATE, update
                    if sends:
                        sent += [OnHost(ticket) for ticket in bucket.send(piece, terms.fence)]
                # What comes down from the device is used when it is there, and all of it is on its way by then.
                for piece, update in streamed:
                    yield STORE, update
                    sent += [OnHost(ticket) for ticket in bucket.send(piece, terms.fence)] if sends else [update]
            for gradient in self.gradients:
                gradient.spent()
            if late:
                bucket.hold_weights()
            for ticket in sent if bucket.on_device else ():
                yield STORE, ticket
            # Store.
            stores = [ticket for storage in fetched if (ticket := storage.store()) is not DONE]
            for ticket in sent if not bucket.on_device else ():
                yield STORE, ticket
            if stores:
                yield READY, DONE
            for ticket in stores:
                yield STORE, ticket
        finally:
            for storage in fetched:
                storage.release(sent[-1] if sent else DONE)

    def publish(self) -> None:
        """The update has made its weights: gather what every rank holds whole."""
        if self.bucket.holds_weights:
            self._published = self.bucket.publish()
        for flats in self.together:
            wholes, shards = [flat.whole for flat in flats], [flat.shard_memory for flat in flats]
            names = [flat.name for flat in flats]
            self.gathers.append(self._comm.all_gather_together(wholes, shards, names))
        self.phase = Phase.PUBLISHED

    def wait_for_gathers(self) -> None:
        """The weights that were published are whole everywhere, and shown."""
        for ticket in self.gathers:
            ticket.wait()
        self.gathers.clear()
        self.show()
        if self.bucket.editable:
            self.bucket.note_weights()
        self.phase = Phase.SETTLED if self.job.ended_well else Phase.STORING

    def show(self) -> None:
        for flat in self.flats:
            if flat.pending:
                flat.end_update()

    def give_up(self, error: BaseException) -> None:
        """The step ends with this error: nobody publishes what this update has made, or has yet to make."""
        self.job.give_up(error)
        self.gathers.clear()
        self.bucket.forget()
        self.show()
        self.phase = Phase.SETTLED


def _nothing() -> Steps:
    yield from ()


def _gathered_together(bucket: UpdateBucket, merging: Merging) -> list[list[Flat]]:
    """The bucket's flats that every rank holds whole and ranks share the update of, small ones together."""
    found: list[list[Flat]] = []
    together: list[Flat] = []
    for flat in (state.flat for state in bucket.states if state.updated):
        if not flat.resident or flat.layout.ranks == 1:
            continue
        if not merging.takes(flat.whole):
            found.append([flat])
            continue
        if together and not merging.fits([other.whole for other in together], flat.whole):
            found.append(together)
            together = []
        together.append(flat)
    return [*found, together] if together else found
