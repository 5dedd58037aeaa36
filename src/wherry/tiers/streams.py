"""The way between the device and host memory: copies on streams of their own, and host memory fit for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial

import torch

from wherry import native
from wherry.errors import WherryError
from wherry.fake import faking, host_value
from wherry.observe.log import logger
from wherry.observe.memory import free_on_gpu
from wherry.tickets import DONE, CallbackTicket, Ticket
from wherry.tiers.buffers import PAGE, FallbackPinning, HostPool, PinError, Pinning, spread


def accelerator() -> torch.device | None:
    """The kind of device that is here beside the host; None where it is the CPU that computes.

    Apple's has no float64, in which norms are added up, and no streams: there it is the CPU.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None or found.type == "mps" else found


def check_device(device: torch.device) -> None:
    """Raise where a device cannot do what the engine is built on."""
    if device.type == "cpu":
        return
    try:
        probe = torch.zeros(128, device=device)
        storage = probe.untyped_storage()
        storage.resize_(0)
        storage.resize_(512)
        event = torch.Event(device)
        with torch.Stream(device):
            event.record()
        event.wait()
        probe.zero_().to(torch.float64)
        torch.accelerator.memory_allocated(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WherryError(
            f"{device}: Wherry needs a device whose storages can be resized, with streams, events and float64, and "
            f"this one refused ({reason}); compute on another, or on the CPU"
        ) from error


def use_device(device: torch.device) -> None:
    """For a thread of the engine's own: what it launches goes there."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def new_event(device: torch.device) -> torch.Event:
    """An event that a thread of the host waits for asleep: one that spins has a core that updates and launches want.

    CUDA's are such where they are asked to be, which torch's own cannot ask.
    """
    return torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.Event(device)


def new_stream(device: torch.device) -> torch.Stream:
    """A stream that takes part in what `new_event` makes."""
    return torch.cuda.Stream(device) if device.type == "cuda" else torch.Stream(device)


def on(stream: torch.Stream) -> AbstractContextManager[object]:
    """What is inside goes there. Threads share streams, and each use is to know what was current before it: torch keeps
    that in the object that is entered."""
    if isinstance(stream, torch.cuda.Stream):
        return torch.cuda.stream(stream)
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.cuda.current_stream(device) if device.type == "cuda" else torch.accelerator.current_stream(device)


# Seconds that a link waits at its end for its copies.
CLOSES = 30.0
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
        if pin == self._pins or self.shared:
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
        return HostPool()

    def up(
        self, target: torch.Tensor, source: torch.Tensor, *, fence: Ticket | None = None, after: Ticket = DONE
    ) -> Ticket:
        """`fence`, made where the target was, stands for the current stream; `after` is what brings the source."""
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

    @contextmanager
    def updating(self, fence: Ticket) -> Iterator[None]:
        """What is given to the device inside comes after the `fence`, and holds up nothing of the forward's."""
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
    """Copies to the host that are under way: what they read on the device is given back when others have begun.

    What the host does with them it does in a thread of its own: the one that asks is launching a backward's kernels.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._sources: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._acts: deque[Ticket] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def then(self, act: Callable[[], None]) -> Ticket:
        """What is to be done once a copy has landed. They are done in order, and few wait, as each has a buffer."""
        while len(self._acts) >= IN_FLIGHT:
            with suppress(Exception):  # told to whoever waits for it
                self._acts.popleft().wait()
        if faking():  # fake tensors know one thread
            ticket = CallbackTicket(act)
        else:
            if self._thread is None:
                begin = partial(use_device, self.link.device)
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="wherry-landing", initializer=begin)
            done = self._thread.submit(torch.no_grad()(act))
            ticket = CallbackTicket(done.result, done.done)
        self._acts.append(ticket)
        return ticket

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
        self._acts.clear()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


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
        event: torch.Event,
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

    def order(self, stream: torch.Stream | None = None) -> None:
        # Of the copy's own device: the thread that waits may have another as its current one.
        self._event.wait(stream or current_stream(self._device))

    def release(self) -> None:
        """After `order`, on the stream that the source is of: its memory may be another's now."""
        self._source = None

    def finish(self) -> None:
        self._event.synchronize()
        self._target = self._source = None

    def done(self) -> bool:
        return self._event.query()


class DeviceLink(Link):
    """Between a device and host memory, pinned where it can be, with a stream for each direction."""

    shared = False

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        if device.index is None:  # other threads may have another as their current one
            device = torch.device(device.type, torch.accelerator.current_device_index())
        super().__init__(device, pin=pin)
        self._up = new_stream(device)
        self._down = new_stream(device)
        self._aside: torch.Stream | None = None
        self._reads: torch.Stream | None = None
        self._updates: torch.Stream | None = None

    def _make_pool(self, pin: bool) -> HostPool:
        if not pin:
            return HostPool()
        ways = (CudaPin(), TorchPin()) if self.device.type == "cuda" else (TorchPin(),)
        return HostPool(pinning=FallbackPinning(*ways))

    def _record(self) -> torch.Event:
        event = new_event(self.device)
        event.record(current_stream(self.device))
        return event

    def _copy(self, stream: torch.Stream, target: torch.Tensor, source: torch.Tensor, on_host: bool) -> Ticket:
        event = new_event(self.device)
        with on(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return _Copy(self.device, event, on_host, target, source)

    def up(
        self, target: torch.Tensor, source: torch.Tensor, *, fence: Ticket | None = None, after: Ticket = DONE
    ) -> Ticket:
        # The target's memory may have belonged to work that the current stream, or the fence's, has not done yet.
        if isinstance(fence, _Copy):
            fence.order(self._up)
        else:
            self._record().wait(self._up)
        if isinstance(after, _Copy) and self.host.kind != Pinning.name:
            after.order(self._up)
        else:
            # A driver may stage a pageable source, which is of `host`, when a copy is launched, not in stream order.
            after.wait()
        return self._copy(self._up, target, source, on_host=False)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self._record().wait(self._down)
        return self._copy(self._down, target, source, on_host=True)

    def aside(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        if self._aside is None:
            self._aside = new_stream(self.device)
        self._record().wait(self._aside)
        return self._copy(self._aside, target, source, on_host=True)

    def read(self, number: float | torch.Tensor) -> float:
        if self._reads is None:
            self._reads = new_stream(self.device)
        with on(self._reads):
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
        with on(self._up):
            yield

    @contextmanager
    def updating(self, fence: Ticket) -> Iterator[None]:
        if self._updates is None:
            self._updates = new_stream(self.device)
        if isinstance(fence, _Copy):
            fence.order(self._updates)
        with on(self._updates):
            yield

    def free_bytes(self) -> int | None:
        return free_on_gpu(self.device)

    def return_unused(self) -> None:
        torch.accelerator.empty_cache()

    def close(self) -> None:
        events = [new_event(self.device) for _ in self._streams()]
        for event, stream in zip(events, self._streams(), strict=True):
            event.record(stream)
        ends = time.monotonic() + CLOSES
        while not all(event.query() for event in events):
            if time.monotonic() > ends:
                # As behind a collective with a rank that is gone, which nobody can end.
                logger.warning(
                    "%s has not done in %.0f s what it was given: the host memory that it may still copy from and to "
                    "stays with this process", self.device, CLOSES,
                )  # fmt: skip
                return
            time.sleep(0.001)
        super().close()

    def _streams(self) -> list[torch.Stream]:
        found = (self._up, self._down, self._aside, self._reads, self._updates)
        return [stream for stream in found if stream is not None]


def link_to(device: torch.device, *, pin: bool = True) -> Link:
    """The link for a device."""
    return Link(device, pin=pin) if device.type == "cpu" else DeviceLink(device, pin=pin)


# Host memory that stays where it is, so that a device copies from and to it without staging, and beside all else.


class TorchPin(Pinning):
    """Memory that torch allocates pinned."""

    name = "torch"
    cost = "pinned by torch, which may round each up to a power of two"

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = _torch_pinned(nbytes)
        if start := -memory.data_ptr() % PAGE:
            memory = _torch_pinned(nbytes + PAGE)
            start = -memory.data_ptr() % PAGE
        return memory[start : start + nbytes]


class CudaPin(Pinning):
    """Memory of the system's that is registered with CUDA; torch's own would be rounded up to a power of two."""

    name = "cudaHostRegister"
    _PORTABLE = 1  # pinned for every CUDA context of the process
    _UNLOADING = 4  # at interpreter exit the driver has let go of everything already

    def __init__(self) -> None:
        self._runtime = torch.cuda.cudart()

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = super().allocate(nbytes)
        nodes = native.nodes()
        if len(nodes) > 1:
            # Pinning touches all of it, in one thread and so on one node: half of the machine's bandwidth, or less.
            spread(memory, nodes)
        return memory

    def pin(self, address: int, nbytes: int) -> None:
        code = int(self._runtime.cudaHostRegister(address, nbytes, self._PORTABLE))
        if code:
            _forget_cuda_error()
            raise PinError(f"CUDA error {code}")

    def unpin(self, address: int, nbytes: int) -> None:
        code = int(self._runtime.cudaHostUnregister(address))
        if code not in (0, self._UNLOADING):
            _forget_cuda_error()
            raise RuntimeError(f"unpinning a host buffer failed with CUDA error {code}")


@cache
def can_pin() -> bool:
    """Test whether torch can pin host memory; log why not."""
    try:
        _torch_pinned(1)
    except PinError as error:
        logger.warning("torch cannot pin host memory here (%s): batches are pageable, and copied more slowly", error)
        return False
    return True


def _torch_pinned(nbytes: int) -> torch.Tensor:
    try:
        with torch.inference_mode(False):  # who uses it next may not be in an evaluation
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise PinError(str(error).strip().partition("\n")[0]) from error


def _forget_cuda_error() -> None:
    """CUDA keeps for each thread what a call has failed with. torch, which does not know of this one, would raise it
    where it launches its next kernel, whatever that is; here it does so at once, and has forgotten it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
