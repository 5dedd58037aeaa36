"""Where activations are put away between forward and backward: on the host, on disk.

A store takes one-dimensional uint8 tensors on the device; their memory is free when `put` and its copy are over.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

from wherry.tickets import Ticket, TicketGroup
from wherry.tiers.streams import Link

if TYPE_CHECKING:
    from wherry.tiers.disk import DiskRecord, DiskStore

# Bytes on their way to the host, or to the disk, at once: they are kept at both ends. One tensor always may be.
COPY_BYTES = 64 << 20


class Held(Protocol):
    """One tensor that was put away."""

    nbytes: int

    def start(self) -> None:
        """Set going its way back, if it is not."""

    def take(self) -> torch.Tensor:
        """The tensor, on the device, for the current stream. It may be taken more than once."""


class Store(Protocol):
    """A place for activations."""

    def put(self, data: torch.Tensor) -> Held: ...

    def close(self) -> None:
        """Free what the store has; what is held may not be taken any more."""


class OnDevice:
    """What stays as it is."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.nbytes = data.numel()

    def start(self) -> None:
        return None

    def take(self) -> torch.Tensor:
        return self.data


class Returning:
    """Host buffers on their way back to the pool: a copy or a write may still be reading or writing them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._waiting: deque[tuple[torch.Tensor, Ticket]] = deque()

    def give(self, host: torch.Tensor, tickets: list[Ticket]) -> None:
        self._waiting.append((host, TicketGroup(tickets)))
        self.sweep(COPY_BYTES)

    def sweep(self, keep: int) -> None:
        """Give back what nothing uses any more, and all but `keep` bytes in any case."""
        left = sum(host.nbytes for host, _ in tuple(self._waiting))
        for _ in range(len(self._waiting)):
            try:
                host, uses = self._waiting.popleft()
            except IndexError:
                return  # of a graph that another thread lets go of meanwhile, as autograd's for a GPU does
            try:
                if not keep or (self._waiting and left > keep):
                    uses.finish()
            finally:
                if uses.done():
                    left -= host.nbytes
                    self.link.host.give(host)
                else:
                    self._waiting.append((host, uses))


class _KeptOnHost:
    def __init__(self, store: HostStore, data: torch.Tensor) -> None:
        self.store = store
        self.nbytes = data.numel()
        self.device = data.device
        self._host = store.link.host.take(self.nbytes)
        self._down = store.send(self._host, data)
        self._up: tuple[torch.Tensor, Ticket] | None = None
        self._tickets = [self._down]
        weakref.finalize(self, store.returning.give, self._host, self._tickets).atexit = False

    def start(self) -> None:
        if self._up is None:
            target = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            ticket = self.store.link.up(target, self._host, after=self._down)
            self._up = target, ticket
            self._tickets.append(ticket)

    def take(self) -> torch.Tensor:
        self.start()
        assert self._up is not None
        (target, ticket), self._up = self._up, None
        ticket.wait()
        self.store.link.order(self._down)  # which is over, and keeps what it read no longer
        return target


class HostStore:
    """Copies to host memory on the link's stream."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.returning = Returning(link)
        self._sending: deque[tuple[Ticket, int]] = deque()
        self._bytes = 0

    def put(self, data: torch.Tensor) -> Held:
        return _KeptOnHost(self, data)

    def send(self, host: torch.Tensor, data: torch.Tensor) -> Ticket:
        """Copy down. The ticket keeps the source until then: of many under way the stream waits for the first."""
        while self._sending and (self._bytes + data.nbytes > COPY_BYTES or self._sending[0][0].done()):
            ticket, nbytes = self._sending.popleft()
            self.link.order(ticket)
            self._bytes -= nbytes
        ticket = self.link.down(host, data)
        self._sending.append((ticket, data.nbytes))
        self._bytes += data.nbytes
        return ticket

    def close(self) -> None:
        while self._sending:
            self._sending.popleft()[0].wait()
        self.returning.sweep(0)
        self.link.close()


class _OnDisk:
    def __init__(self, store: DiskActivations, data: torch.Tensor) -> None:
        self.store = store
        self.nbytes = data.numel()
        self.device = data.device
        self._record = store.record(self.nbytes)
        self._write = store.write(self._record, data)
        # The buffer that it is read into, and the read, until it is taken.
        self._read: list[tuple[torch.Tensor, Ticket]] = []
        weakref.finalize(self, store.record_back, self._record, self._write, self._read).atexit = False

    def start(self) -> None:
        if not self._read:
            self._write.wait()
            host = self.store.link.host.take(self.nbytes)
            self._read.append((host, self.store.disk.read(self._record, host)))

    def take(self) -> torch.Tensor:
        self.start()
        host, read = self._read.pop()
        copies: list[Ticket] = []
        try:
            read.wait()
            target = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            copies.append(self.store.link.up(target, host))
            copies[0].wait()
        finally:
            self.store.returning.give(host, copies)
        return target


class DiskActivations:
    """Writes to disk through host buffers; records are used again by tensors of their size."""

    def __init__(self, disk: DiskStore, link: Link) -> None:
        self.disk = disk
        self.link = link
        self.returning = Returning(link)
        self._idle: dict[int, list[DiskRecord]] = {}
        self._reserved = 0

    def put(self, data: torch.Tensor) -> Held:
        return _OnDisk(self, data)

    def record(self, nbytes: int) -> DiskRecord:
        idle = self._idle.get(nbytes)
        if idle:
            return idle.pop()
        self._reserved += 1
        return self.disk.reserve(f"activation {self._reserved}", nbytes)

    def record_back(self, record: DiskRecord, write: Ticket, read: list[tuple[torch.Tensor, Ticket]]) -> None:
        write.wait()
        for host, ticket in read:  # brought back for nobody
            self.returning.give(host, [ticket])
        self._idle.setdefault(record.nbytes, []).append(record)

    def write(self, record: DiskRecord, data: torch.Tensor) -> Ticket:
        self.returning.sweep(COPY_BYTES)
        host = self.link.host.take(data.numel())
        self.link.down(host, data).wait()
        ticket = self.disk.write(record, host)
        self.returning.give(host, [ticket])
        return ticket

    def close(self) -> None:
        self.returning.sweep(0)
        self.disk.close()
        self.link.close()
