"""The way between the device and host memory: copies on streams of their own, and host memory fit for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from wherry.fake import host_value
from wherry.observe.memory import free_on_gpu
from wherry.tickets import DONE, Ticket
from wherry.tiers.buffers import CudaPin, HostPool

# Copies down whose sources are kept: one travels while the next is filled.
IN_FLIGHT = 2


class Link:
    """Between a device and the host where they are one: a CPU. Copies are made at once.

    `shared` says that they are one, so that nothing need be copied at all; whoever can asks that first.
    `up` and `down` copy to and from the device. What they read must be complete on the current stream, and neither side
    may change until the ticket was waited for. A ticket of `up` makes the current stream wait, one of `down` the host.
    """

    shared = True
    # Whether `host` is pinned, where anything is, and a pool that is what `host` is not.
    _pins = True
    _other: HostPool | None = None
    _aside_pool: HostPool | None = None

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self.device = device
        self.host = self._make_pool(pin)
        self._pins = pin

    def pool(self, pin: bool) -> HostPool:
        """Host memory that is pinned, or that is not; `host` where that is what it is, or where nothing is pinned."""
        if pin == self._pins or self._pinning(True) is None:
            return self.host
        if self._other is None:
            self._other = self._make_pool(pin)
        return self._other

    @property
    def aside_pool(self) -> HostPool:
        """Pinned memory for what goes `aside`: what is idle in it nobody else takes, or has freed."""
        if self._aside_pool is None:
            self._aside_pool = self._make_pool(True)
        return self._aside_pool

    def _make_pool(self, pin: bool) -> HostPool:
        return HostPool(pinning=self._pinning(pin))

    def _pinning(self, pin: bool) -> CudaPin | None:
        return None

    def up(self, target: torch.Tensor, source: torch.Tensor, *, after: Ticket = DONE) -> Ticket:
        after.wait()
        target.copy_(source)
        return DONE

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        target.copy_(source)
        return DONE

    def aside(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """As `down`, for much that nobody waits for: nothing else that goes down comes after it."""
        return self.down(target, source)

    def read(self, number: float | torch.Tensor) -> float:
        """A number that the device has computed by now: what it was given to do since is not waited for."""
        return host_value(number)

    def fence(self) -> Ticket:
        """What the current stream has been given so far, for another thread's `up` to come after."""
        return DONE

    def order(self, ticket: Ticket) -> None:
        """Let the current stream, not the host, wait for a copy down: its source may then be written again."""
        ticket.wait()

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Collectives begun inside come after the copies up that were begun before, and hold up nothing else."""
        yield

    def free_bytes(self) -> int | None:
        """Free memory of the device; None where the device is the host."""
        return None

    def return_unused(self) -> None:
        """Memory of the device that was freed is other programs' too, where an allocator would keep it."""

    def close(self) -> None:
        self.host.close()
        for pool in (self._other, self._aside_pool):
            if pool is not None:
                pool.close()


class CopiesDown:
    """Copies to the host that are under way: what they read on the device is given back when others have begun."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._sources: deque[tuple[Ticket, Callable[[], None]]] = deque()

    def begin(self, target: torch.Tensor, source: torch.Tensor, give: Callable[[], None]) -> Ticket:
        """Copy `source`, and call `give` once it may be written again."""
        copied = self.link.down(target, source)
        self._sources.append((copied, give))
        self.wait(IN_FLIGHT)
        return copied

    def wait(self, keep: int = 0) -> None:
        """Until so many are left whose sources may not be written yet."""
        while len(self._sources) > keep:
            copied, give = self._sources.popleft()
            self.link.order(copied)
            give()

    def drop(self) -> None:
        """As `wait`, whatever went wrong with the copies."""
        while self._sources:
            with suppress(Exception):
                self.wait(len(self._sources) - 1)


class Readers(Ticket):
    """Copies down for whoever writes their sources again: `wait()` holds up the current stream, and not the host."""

    __slots__ = ("_link", "_tickets")

    def __init__(self, link: Link, tickets: Iterable[Ticket]) -> None:
        self._link = link
        self._tickets = list(tickets)

    def wait(self) -> None:
        for ticket in self._tickets:
            self._link.order(ticket)

    def finish(self) -> None:
        for ticket in self._tickets:
            ticket.finish()

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)


class _Copy(Ticket):
    """A copy on a stream: `wait` is for whoever uses the target, `order` for whoever reuses the source.

    It keeps the memory of both, the device's until a stream of the device waits for it and the host's until it is over.
    """

    __slots__ = ("_device", "_event", "_on_host", "_source", "_target")

    def __init__(
        self,
        device: torch.device,
        event: torch.cuda.Event,
        on_host: bool,
        target: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        self._device = device
        self._event = event
        self._on_host = on_host
        self._target, self._source = target, source

    def wait(self) -> None:
        if self._on_host:
            self.finish()
        else:
            self.order()
            # Freed from here on, its memory is another's on the stream that has just been told to wait.
            self._target = None

    def order(self) -> None:
        # Of the copy's own device: the thread that waits may have another as its current one.
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def release(self) -> None:
        """After `order`, on the stream that the source is of: its memory may be another's now."""
        self._source = None

    def finish(self) -> None:
        self._event.synchronize()
        self._target = self._source = None

    def done(self) -> bool:
        return self._event.query()


class CudaLink(Link):
    """Between a CUDA device and pinned host memory, with a stream for each direction."""

    shared = False

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        if device.index is None:  # other threads may have another as their current one
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device, pin=pin)
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        self._aside: torch.cuda.Stream | None = None
        self._reads: torch.cuda.Stream | None = None

    def _pinning(self, pin: bool) -> CudaPin | None:
        return CudaPin() if pin else None

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, on_host: bool) -> Ticket:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _Copy(self.device, event, on_host, target, source)

    def up(self, target: torch.Tensor, source: torch.Tensor, *, after: Ticket = DONE) -> Ticket:
        # The target's memory may have belonged to work that the current stream, or the fence's, has not done yet.
        if isinstance(after, _Copy):
            self._up.wait_event(after._event)
        else:
            self._up.wait_event(self._record())
        return self._copy(self._up, target, source, on_host=False)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self._down.wait_event(self._record())
        return self._copy(self._down, target, source, on_host=True)

    def aside(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)
        self._aside.wait_event(self._record())
        return self._copy(self._aside, target, source, on_host=True)

    def read(self, number: float | torch.Tensor) -> float:
        if self._reads is None:
            self._reads = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._reads):
            return host_value(number)

    def fence(self) -> Ticket:
        return _Copy(self.device, self._record(), on_host=False)

    def order(self, ticket: Ticket) -> None:
        if isinstance(ticket, _Copy):
            ticket.order()
            ticket.release()
        else:
            ticket.wait()

    @contextmanager
    def uploading(self) -> Iterator[None]:
        with torch.cuda.stream(self._up):
            yield

    def free_bytes(self) -> int | None:
        return free_on_gpu(self.device)

    def return_unused(self) -> None:
        torch.cuda.empty_cache()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        super().close()


def link_to(device: torch.device, *, pin: bool = True) -> Link:
    """The link for a device."""
    return CudaLink(device, pin=pin) if device.type == "cuda" else Link(device, pin=pin)
