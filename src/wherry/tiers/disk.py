"""The disk tier's store: records of units in preallocated files, read and written asynchronously."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.native.disk import MAX_LANES, SECTOR, Counters, Engine, Fault, Layout, NativeEngine, Request
from wherry.tiers.disk_errors import DiskError, DiskSpaceError, DiskUseError, disk_error, hint, human
from wherry.tiers.disk_folder import SwapFolder, make_folder, sweep
from wherry.tiers.disk_probe import O_DIRECT, Probe, probe
from wherry.tiers.tickets import Ticket

if TYPE_CHECKING:
    import torch

    from wherry.tiers.buffers import HostPool

__all__ = ["DiskError", "DiskSpaceError", "DiskStore", "DiskUsage", "DiskUseError", "Fault", "Record", "probe", "sweep"]

# `wait` looks up this often, so that Ctrl-C is heard during a long transfer.
_WAIT_SLICE_MS = 200
# How deep each backend goes by itself; a thread costs more than an entry in a ring.
_DEFAULT_DEPTH = {"io_uring": 32, "threads": 16, "buffered": 8}


@dataclass(frozen=True, slots=True)
class Record:
    """Room for one unit's state: `nbytes`, which take up `padded` bytes in whole sectors, striped over `paths`."""

    name: str
    nbytes: int
    padded: int
    paths: tuple[str, ...]
    offsets: tuple[int, ...]
    rotate: int
    layout: Layout = field(repr=False, compare=False)
    owner: _Resources = field(repr=False, compare=False)


@dataclass(frozen=True)
class DiskUsage:
    """`reserved` bytes in all; for each path, what is reserved there and what the file system has free."""

    reserved: int
    paths: tuple[tuple[str, int, int], ...]


class DiskTicket(Ticket):
    """A read or write under way. It keeps the buffer alive until the transfer is over, waited for or not."""

    __slots__ = ("_buffer", "_error", "_paths", "_record", "_request", "_write")

    def __init__(
        self, request: Request, buffer: torch.Tensor, record: Record, write: bool, paths: Sequence[str]
    ) -> None:
        self._request: Request | None = request
        self._buffer: torch.Tensor | None = buffer
        self._record = record
        self._write = write
        self._paths = paths
        self._error: DiskError | None = None

    def wait(self) -> None:
        request = self._request
        if request is not None:
            while not request.wait(_WAIT_SLICE_MS):
                self._record.owner.check_process()
            failure = request.failure()
            if failure is not None and self._error is None:
                self._error = disk_error(failure, self._write, self._record.name, self._paths)
            self._request = self._buffer = None
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        request = self._request
        return request is None or request.wait(0)


class _Resources:
    """What a store must give back, apart from the store so that garbage collection gives it back as well."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.folders: list[SwapFolder] = []
        self.files: list[int] = []
        self.engine: Engine | None = None
        # Held until complete: the kernel must never write into memory that was freed.
        self.flying: deque[DiskTicket] = deque()
        self.refused: dict[str, None] = {}
        # Several threads may use one store.
        self.lock = threading.Lock()

    @property
    def ours(self) -> bool:
        """False in a forked child: the engine's threads are not in it, and the files are its parent's."""
        return os.getpid() == self.owner

    def check_process(self) -> None:
        if not self.ours:
            raise DiskUseError(
                "the disk store was opened by another process, of which this one is a fork: use it there, or open "
                "another store here"
            )

    def register(self, address: int, length: int) -> None:
        if self.engine is None or not self.ours:
            return
        code = -self.engine.add_memory(address, length)
        if code > 0:
            hint = ": raise `ulimit -l`" if code == errno.ENOMEM else ""
            self.refused[f"buffers are not registered with io_uring: {os.strerror(code)}{hint}"] = None

    def unregister(self, address: int) -> None:
        if self.engine is not None and self.ours:
            self.engine.remove_memory(address)

    def release(self) -> None:
        if self.ours and self.engine is not None:
            self.engine.close()
        self.engine = None
        self.flying.clear()
        while self.files:
            os.close(self.files.pop())
        while self.folders:
            self.folders.pop().close()


class DiskStore:
    """Preallocated records on one path, or striped over several, in a private folder that goes when the store does.

    Reads and writes return tickets and run at the same time, `queue_depth` blocks deep on each path. Buffers are
    contiguous CPU tensors that start at a multiple of 4096 bytes, as those of `HostPool` do; a buffer must not change
    until the ticket of its write was waited for. An error in one request is raised at its ticket and nowhere else. With
    `checksum` every sector that was written here is compared with its checksum whenever it is read.

    >>> with DiskStore("/dev/shm") as store, HostPool() as pool:
    ...     record = store.reserve("layers.0", 1 << 20)
    ...     buffer = pool.take(1 << 20)
    ...     store.write(record, buffer).wait()
    ...     store.read(record, buffer).wait()
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        block_size: int = 1 << 20,
        queue_depth: int | None = None,
        backend: str | None = None,
        checksum: bool = False,
        faults: Iterable[Fault] = (),
        native: bool | None = None,
    ) -> None:
        roots = _checked_paths(paths)
        _check_shape(block_size, queue_depth, len(roots))
        self.swept = [folder for root in dict.fromkeys(roots) for folder in sweep(root)]
        self.probe: Probe = probe(roots, backend, native)
        self.block_size = block_size
        self.queue_depth = queue_depth or _DEFAULT_DEPTH[self.probe.backend]
        self.checksum = checksum
        self._resources = _Resources()
        self._ends = [0] * len(roots)
        self._records: list[Record] = []
        self._watches: list[Callable[[], None]] = []
        self._attached: weakref.WeakSet[HostPool] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, self._resources.release)
        try:
            self.paths = tuple(self._create(root, lane, name) for lane, root in enumerate(roots))
            self._resources.engine = self._start(self._resources.files, self.queue_depth)
        except OSError:
            self._finalizer()
            raise
        for fault in faults:
            self.inject(fault)

    @property
    def backend(self) -> str:
        """What moves the bytes: "io_uring", "threads" or "buffered"."""
        return self.probe.backend

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why nothing better moves them; empty when all is at its best."""
        return (*self.probe.reasons, *self._resources.refused)

    @property
    def stats(self) -> Counters:
        """What was read and written since the store was opened."""
        return self._engine().counters()

    def reserve(self, name: str, nbytes: int) -> Record:
        """Room for `nbytes` on the disk, allocated now, so that no later write of it can meet a full disk."""
        engine = self._engine()
        if nbytes <= 0:
            raise DiskUseError(f"unit {name!r}: a record of {nbytes} bytes; expected 1 or more")
        with self._resources.lock:
            return self._reserve(engine, name, nbytes)

    def write(self, record: Record, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Write `nbytes` of the buffer (all of it if None) to the record, from `offset` on."""
        return self._submit(True, record, buffer, offset, nbytes)

    def read(self, record: Record, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Read `nbytes` (as many as the buffer has if None) of the record, from `offset` on, into the buffer."""
        return self._submit(False, record, buffer, offset, nbytes)

    def attach(self, pool: HostPool) -> None:
        """Register the pool's memory with io_uring, now and as it grows. Other backends have no use for it."""
        if pool in self._attached:
            return
        self._attached.add(pool)
        resources = weakref.ref(self._resources)

        def mapped(address: int, length: int) -> None:
            owner = resources()
            if owner is not None:
                owner.register(address, length)

        def unmapped(address: int, length: int) -> None:
            owner = resources()
            if owner is not None:
                owner.unregister(address)

        self._engine()
        if self.backend == "io_uring":
            self._watches.append(pool.watch(mapped, unmapped))

    def check_free(self, nbytes: int) -> None:
        """Raise DiskSpaceError unless `nbytes` more can be reserved."""
        padded = -(-nbytes // SECTOR) * SECTOR
        self._check_room("the disk tier", _shares(padded, self.block_size, 0, len(self.paths)))

    def usage(self) -> DiskUsage:
        """What the store takes up, and what is free beside it."""
        rows = tuple(
            (path, end, _free(os.path.dirname(path))) for path, end in zip(self.paths, self._ends, strict=True)
        )
        return DiskUsage(sum(self._ends), rows)

    def inject(self, fault: Fault) -> None:
        """For tests: let transfers to come meet this fault."""
        self._engine().inject(fault)

    def drain(self) -> None:
        """Wait for everything under way. Errors stay with their tickets."""
        self._engine().drain()
        self._reap()

    def close(self) -> None:
        """Wait for everything under way, then remove the store's files. Tickets can still be waited for."""
        while self._watches:
            self._watches.pop()()
        self._finalizer()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create(self, root: str, lane: int, name: str | None) -> str:
        folder = SwapFolder(root, name)
        self._resources.folders.append(folder)
        path = folder.create(f"data-{lane}.bin")
        self._resources.files.append(self._open(path))
        return str(path)

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (O_DIRECT if self.probe.direct else 0))

    def _start(self, files: list[int], queue_depth: int) -> Engine:
        if self.probe.native:
            from wherry import native

            library = native.library()
            assert library is not None
            uring = self.backend == "io_uring"
            return NativeEngine(library, files, self.block_size, queue_depth, uring=uring)
        from wherry.native.disk_fallback import PythonEngine

        return PythonEngine(files, self.block_size, queue_depth)

    def _engine(self) -> Engine:
        engine = self._resources.engine
        if engine is None:
            raise DiskUseError("the disk store is closed: open another one")
        self._resources.check_process()
        return engine

    def _reserve(self, engine: Engine, name: str, nbytes: int) -> Record:
        padded = -(-nbytes // SECTOR) * SECTOR
        rotate = len(self._records) % len(self.paths)
        shares = _shares(padded, self.block_size, rotate, len(self.paths))
        self._check_room(f"unit {name!r}", shares)
        self._grow(name, shares)
        offsets = tuple(end - share for end, share in zip(self._ends, shares, strict=True))
        layout = engine.lay(offsets, rotate, padded // SECTOR, self.checksum)
        record = Record(name, nbytes, padded, self.paths, offsets, rotate, layout, self._resources)
        self._records.append(record)
        return record

    def _check_room(self, who: str, shares: Sequence[int]) -> None:
        roots = [os.path.dirname(os.path.dirname(path)) for path in self.paths]
        needed: dict[int, tuple[str, int]] = {}
        for root, share in zip(roots, shares, strict=True):
            device = os.stat(root).st_dev
            needed[device] = root, needed.get(device, ("", 0))[1] + share
        for root, share in needed.values():
            if share > _free(root):
                raise _too_small(who, share, root)

    def _grow(self, name: str, shares: Sequence[int]) -> None:
        for lane, share in enumerate(shares):
            if share == 0:
                continue
            try:
                self._allocate(self.paths[lane], self._ends[lane], share)
            except OSError as error:
                for shrunk in range(lane + 1):
                    os.ftruncate(self._resources.files[shrunk], self._ends[shrunk])
                raise self._no_room(name, lane, share, error) from error
        self._ends = [end + share for end, share in zip(self._ends, shares, strict=True)]

    def _allocate(self, path: str, end: int, nbytes: int) -> None:
        # Not through the store's own descriptor: where the system can only allocate by writing, it writes single bytes.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(file, end, nbytes)
        finally:
            os.close(file)

    def _no_room(self, name: str, lane: int, nbytes: int, error: OSError) -> DiskError | DiskSpaceError:
        path = self.paths[lane]
        if error.errno == errno.ENOSPC:
            return _too_small(f"unit {name!r}", nbytes, os.path.dirname(os.path.dirname(path)))
        message = f"unit {name!r}: reserving {human(nbytes)} in {path} failed: {error.strerror}; {hint(error.errno)}"
        return DiskError(message, error.errno, path, self._ends[lane], nbytes, name)

    def _submit(self, write: bool, record: Record, buffer: torch.Tensor, offset: int, nbytes: int | None) -> DiskTicket:
        engine = self._engine()
        if record.owner is not self._resources:
            raise DiskUseError(f"unit {record.name!r}: its record is of another disk store; reserve one in this store")
        size = buffer.numel() * buffer.element_size()
        length = size if nbytes is None else nbytes
        address = buffer.data_ptr()
        _check_request(record, buffer, address, size, offset, length, write)
        request = engine.submit(write, address, record.layout, offset, length)
        ticket = DiskTicket(request, buffer, record, write, record.paths)
        self._reap(ticket)
        return ticket

    def _reap(self, *started: DiskTicket) -> None:
        with self._resources.lock:
            flying = self._resources.flying
            flying.extend(started)
            while flying and flying[0].done():
                flying.popleft()


def _checked_paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    roots = [os.fspath(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not 1 <= len(roots) <= MAX_LANES:
        raise DiskUseError(f"disk paths: got {len(roots)}, expected 1 to {MAX_LANES}")
    for root in roots:
        make_folder(root)
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise DiskUseError(
                f"disk path {root!r} cannot be read and written by this user: change its mode or name another"
            )
    return roots


def _check_shape(block_size: int, queue_depth: int | None, lanes: int) -> None:
    if block_size % SECTOR or not SECTOR <= block_size <= 1 << 30:
        raise DiskUseError(f"disk block_size {block_size}: expected a multiple of {SECTOR} up to {1 << 30}")
    deepest = 4096 // lanes
    if queue_depth is not None and not 1 <= queue_depth <= deepest:
        raise DiskUseError(f"disk queue_depth {queue_depth}: expected 1 to {deepest} with {lanes} path(s)")


def _check_request(
    record: Record, buffer: torch.Tensor, address: int, size: int, offset: int, length: int, write: bool
) -> None:
    what = f"unit {record.name!r}: {'write' if write else 'read'} of {length} bytes at offset {offset}"
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise DiskUseError(
            f"{what}: expected a contiguous CPU tensor, got one on {buffer.device} with strides {buffer.stride()}; "
            "copy it into a buffer of `HostPool` first"
        )
    if address % SECTOR:
        raise DiskUseError(
            f"{what}: the buffer starts {address % SECTOR} bytes past a multiple of {SECTOR}; take it from `HostPool`, "
            f"and slice it at multiples of {SECTOR} bytes"
        )
    if length > size:
        raise DiskUseError(f"{what}: the buffer has {size} bytes only")
    if length <= 0 or offset < 0 or offset + length > record.nbytes:
        raise DiskUseError(f"{what}: the record holds {record.nbytes} bytes; ask for 1 or more within it")
    if offset % SECTOR or (write and length % SECTOR and offset + length != record.nbytes):
        raise DiskUseError(
            f"{what}: a transfer starts at a multiple of {SECTOR}, and a write ends at one or at the record's end "
            f"({record.nbytes})"
        )


def _shares(padded: int, block: int, rotate: int, lanes: int) -> list[int]:
    """How many bytes of a record lie on each path: whole blocks in turn, and the last one as long as it is."""
    blocks = -(-padded // block)
    shares = [0] * lanes
    for lane in range(lanes):
        first = (lane - rotate) % lanes
        shares[lane] = len(range(first, blocks, lanes)) * block
    shares[(blocks - 1 + rotate) % lanes] -= blocks * block - padded
    return shares


def _too_small(who: str, nbytes: int, root: str) -> DiskSpaceError:
    free = _free(root)
    missing = max(nbytes - free, 1)
    return DiskSpaceError(
        f"{who} needs {human(nbytes)} under {root}, where {human(free)} are free: {human(missing)} are missing; "
        "free some space, name a path on a larger drive, add a path on another drive, or place less on the disk",
        missing,
        root,
    )


def _free(folder: str) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize
