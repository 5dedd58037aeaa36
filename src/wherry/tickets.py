"""Tickets: what every asynchronous read, write, copy, collective or update returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class Ticket:
    """Something under way. `wait()` returns when it is complete, and raises the error it met.

    The base class is a ticket for something already complete. `wait()` may be called more than once.
    """

    __slots__ = ()

    def wait(self) -> None:
        return None

    def finish(self) -> None:
        """Wait on the host, also where `wait()` only makes a stream of the device wait."""
        self.wait()

    def done(self) -> bool:
        return True


DONE = Ticket()


class CallbackTicket(Ticket):
    """A ticket around a wait function, called once; an error is raised again at every later `wait()`.

    Ctrl-C is no error of what is under way: who waits after it, waits for that.
    """

    __slots__ = ("_done", "_error", "_lock", "_wait")

    def __init__(self, wait: Callable[[], object], done: Callable[[], bool] | None = None) -> None:
        self._wait: Callable[[], object] | None = wait
        self._done = done
        self._error: Exception | None = None
        # Several threads may wait: none returns before it is over.
        self._lock = threading.RLock()

    def wait(self) -> None:
        with self._lock:
            if self._wait is not None:
                try:
                    self._wait()
                except Exception as error:
                    self._error = error
                self._wait = self._done = None
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        done = self._done
        return self._wait is None or (done is not None and done())


class TicketGroup(Ticket):
    """Several tickets as one. Every one is waited for, then the first error is raised."""

    __slots__ = ("_tickets",)

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._tickets = list(tickets)

    def wait(self) -> None:
        self._all(lambda ticket: ticket.wait())

    def finish(self) -> None:
        self._all(lambda ticket: ticket.finish())

    def _all(self, wait: Callable[[Ticket], None]) -> None:
        first: BaseException | None = None
        for ticket in self._tickets:
            try:
                wait(ticket)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)


class OnHost(Ticket):
    """A ticket whose `wait()` is on the host, whatever that of the one inside makes wait."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        self._ticket.finish()

    def done(self) -> bool:
        return self._ticket.done()
