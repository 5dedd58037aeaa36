"""The disk tier's store: records of units in preallocated files, read and written asynchronously."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wherry.native.disk import MAX_LANES, SECTOR, Counters, DiskRecord, Fault, NativeEngine, NativeRequest
from wherry.tickets import Ticket
from wherry.tiers.disk_errors import DiskError, DiskSpaceError, DiskUseError, disk_error, hint, human
from wherry.tiers.disk_folder import SwapFolder, make_folder, sweep
from wherry.tiers.disk_probe import O_DIRECT, Probe, probe

if TYPE_CHECKING:
    import torch

    from wherry.native.disk_fallback import PythonEngine, PythonRequest
    from wherry.tiers.buffers import HostPool

    Engine = NativeEngine | PythonEngine
    Request = NativeRequest | PythonRequest

__all__ = ["DiskError", "DiskRecord", "DiskSpaceError", "DiskStore", "DiskUseError", "Fault", "probe", "sweep"]

# `wait` looks up this often, so that Ctrl-C is heard during a long transfer.
_WAIT_SLICE_MS = 200
# How deep each backend goes by itself; a thread costs more than an entry in a ring.
_DEFAULT_DEPTH = {"io_uring": 32, "threads": 16, "buffered": 8}


class DiskTicket(Ticket):
    """A read or write under way. It keeps the buffer alive until the transfer is over, waited for or not."""

    __slots__ = ("_buffer", "_error", "_paths", "_process", "_record", "_request", "_write")

    def __init__(
        self,
        request: Request,
        buffer: torch.Tensor,
        record: DiskRecord,
        write: bool,
        paths: Sequence[str],
        process: int,
    ) -> None:
        self._request: Request | None = request
        self._buffer: torch.Tensor | None = buffer
        self._record = record
        self._write = write
        self._paths = paths
        self._process = process
        self._error: DiskError | None = None

    def wait(self) -> None:
        request = self._request
        if request is not None:
            while not request.wait(_WAIT_SLICE_MS):
                _check_process(self._process)
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
        self.process = os.getpid()
        self.folders: list[SwapFolder] = []
        self.files: list[int] = []
        self.engine: Engine | None = None
        # Held until complete: the kernel must never write into memory that was freed.
        self.flying: deque[DiskTicket] = deque()

    def close(self) -> None:
        # In a forked child the engine's threads are not there, and the files are its parent's.
        if self.engine is not None and os.getpid() == self.process:
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
        native: bool | None = None,
    ) -> None:
        self._roots = _checked_paths(paths)
        _check_shape(block_size, queue_depth, len(self._roots))
        for root in dict.fromkeys(self._roots):
            sweep(root)
        self.probe: Probe = probe(self._roots, backend, native)
        self.block_size = block_size
        self.queue_depth = queue_depth or _DEFAULT_DEPTH[self.probe.backend]
        self.checksum = checksum
        # Bytes reserved in the file on each path.
        self._ends = [0] * len(self._roots)
        self._records = 0
        # Several threads may use one store.
        self._lock = threading.Lock()
        self._watches: list[Callable[[], None]] = []
        self._attached: weakref.WeakSet[HostPool] = weakref.WeakSet()
        self._resources = _Resources()
        self._finalizer = weakref.finalize(self, self._resources.close)
        try:
            self.paths = tuple(self._create(root, lane, name) for lane, root in enumerate(self._roots))
            self._resources.engine = self._start()
        except OSError:
            self._finalizer()
            raise

    @property
    def backend(self) -> str:
        """What moves the bytes: "io_uring", "threads" or "buffered"."""
        return self.probe.backend

    @property
    def stats(self) -> Counters:
        """What was read and written since the store was opened."""
        return self._engine().counters()

    @property
    def reserved(self) -> tuple[int, ...]:
        """Bytes that the store takes up on each path."""
        return tuple(self._ends)

    def reserve(self, name: str, nbytes: int) -> DiskRecord:
        """Room for `nbytes` on the disk, allocated now, so that no later write of it can meet a full disk."""
        assert nbytes > 0, name
        with self._lock:
            self._engine()
            sectors = -(-nbytes // SECTOR)
            rotate = self._records % len(self.paths)
            shares = _shares(sectors * SECTOR, self.block_size, rotate, len(self.paths))
            self._check_room(f"unit {name!r}", shares)
            offsets = tuple(self._ends)
            self._grow(name, shares)
            self._records += 1
        return DiskRecord(name, nbytes, offsets, rotate, (ctypes.c_uint32 * sectors)() if self.checksum else None)

    def write(self, record: DiskRecord, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Write `nbytes` of the buffer (all of it if None) to the record, from `offset` on."""
        return self._submit(True, record, buffer, offset, nbytes)

    def read(self, record: DiskRecord, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """Read `nbytes` (as many as the buffer has if None) of the record, from `offset` on, into the buffer."""
        return self._submit(False, record, buffer, offset, nbytes)

    def attach(self, pool: HostPool) -> None:
        """Register the pool's memory with io_uring, now and as it grows. Other backends have no use for it."""
        engine = self._engine()
        if self.backend == "io_uring" and pool not in self._attached:
            self._attached.add(pool)
            self._watches.append(pool.watch(engine.add_memory, engine.remove_memory))

    def check_free(self, nbytes: int) -> None:
        """Raise DiskSpaceError unless `nbytes` more can be reserved."""
        padded = -(-nbytes // SECTOR) * SECTOR
        self._check_room("the disk tier", _shares(padded, self.block_size, 0, len(self.paths)))

    def inject(self, fault: Fault) -> None:
        """For tests: let transfers to come meet this fault."""
        self._engine().inject(fault)

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
        self._resources.files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC | (O_DIRECT if self.probe.direct else 0)))
        return str(path)

    def _start(self) -> Engine:
        files = self._resources.files
        if self.probe.native:
            from wherry import native

            library = native.library()
            assert library is not None
            uring = self.backend == "io_uring"
            return NativeEngine(library, files, self.block_size, self.queue_depth, uring=uring)
        from wherry.native.disk_fallback import PythonEngine

        return PythonEngine(files, self.block_size, self.queue_depth)

    def _engine(self) -> Engine:
        engine = self._resources.engine
        if engine is None:
            raise DiskUseError("the disk store is closed: open another one")
        _check_process(self._resources.process)
        return engine

    def _check_room(self, who: str, shares: Sequence[int]) -> None:
        needed: dict[int, tuple[str, int]] = {}
        for root, share in zip(self._roots, shares, strict=True):
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
                _allocate(self.paths[lane], self._ends[lane], share)
            except OSError as error:
                for shrunk in range(lane + 1):
                    os.ftruncate(self._resources.files[shrunk], self._ends[shrunk])
                if error.errno == errno.ENOSPC:
                    raise _too_small(f"unit {name!r}", share, self._roots[lane]) from error
                path, end, why = self.paths[lane], self._ends[lane], f"{error.strerror}; {hint(error.errno)}"
                message = f"unit {name!r}: reserving {human(share)} in {path} failed: {why}"
                raise DiskError(message, error.errno, path, end, share, name) from error
        self._ends = [end + share for end, share in zip(self._ends, shares, strict=True)]

    def _submit(
        self, write: bool, record: DiskRecord, buffer: torch.Tensor, offset: int, nbytes: int | None
    ) -> DiskTicket:
        engine = self._engine()
        length = buffer.nbytes if nbytes is None else nbytes
        address = buffer.data_ptr()
        assert buffer.is_cpu and buffer.is_contiguous() and address % SECTOR == 0 and length <= buffer.nbytes, record
        assert length > 0 and offset % SECTOR == 0 and 0 <= offset <= record.nbytes - length, record
        assert not write or length % SECTOR == 0 or offset + length == record.nbytes, record
        request = engine.submit(write, address, record, offset, length)
        ticket = DiskTicket(request, buffer, record, write, self.paths, self._resources.process)
        with self._lock:
            flying = self._resources.flying
            flying.append(ticket)
            while flying and flying[0].done():
                flying.popleft()
        return ticket


def _check_process(process: int) -> None:
    """Nobody moves bytes in a fork of the store's process."""
    if os.getpid() != process:
        raise DiskUseError(
            "the disk store was opened by another process, of which this one is a fork: use it there, or open another "
            "store here"
        )


def _allocate(path: str, end: int, nbytes: int) -> None:
    # Not through the store's own descriptor: where the system can only allocate by writing, it writes single bytes.
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(file, end, nbytes)
    finally:
        os.close(file)


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
        "free some space, name a path on a larger drive, add a path on another drive, or keep more in memory, with "
        '"device": "cpu" in offload_optimizer or offload_param',
        missing,
        root,
    )


def _free(folder: str) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize
