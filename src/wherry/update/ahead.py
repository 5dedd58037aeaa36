"""Records that are read before their updates begin: in a backward, those that the next forward will wait for first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wherry.tiers.tickets import DONE, Ticket
from wherry.update.state import Batch


class Ahead:
    """Which records are being read, or have been, for updates that have not begun."""

    def __init__(self) -> None:
        self._reading: dict[Batch, Ticket] = {}

    def read(self, batches: Sequence[Batch], busy: Collection[Batch]) -> None:
        """Begin to read the records of these, in this order, up to one that is `busy` with the update before."""
        for batch in batches:
            if batch in busy:
                return
            if batch not in self._reading:
                ticket = batch.fetch()
                assert ticket is not None, batch.name
                self._reading[batch] = ticket

    def take(self, batch: Batch) -> Ticket | None:
        """An update begins: the read of its record, which begins now if it has not before. None without a record."""
        return self._reading.pop(batch, None) or batch.fetch()

    def beside(self, batches: Collection[Batch]) -> int:
        """How many records have been read for others than these."""
        return sum(batch not in batches for batch in self._reading)

    def stop(self) -> None:
        """Let go of what was read for updates that do not come."""
        while self._reading:
            batch, _ = self._reading.popitem()
            batch.leave(DONE)

    def forget(self) -> None:
        """The batches are closed, and what they have read with them."""
        self._reading.clear()
