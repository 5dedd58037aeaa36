"""What the disk engines share, and the native one: records in, requests out, the GIL never held."""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

SECTOR = 4096
MAX_LANES = 16

Direction = Literal["read", "write"]


class Cause(enum.IntEnum):
    """Why a request failed."""

    NONE = 0
    SYSTEM = 1
    SHORT = 2
    CHECKSUM = 3
    VANISHED = 4


@dataclass(frozen=True, slots=True)
class DiskFailure:
    """Where a request failed first: `offset` is in the file of `lane`, `code` an errno when the cause is SYSTEM."""

    cause: Cause
    code: int
    lane: int
    offset: int
    wanted: int
    got: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has done since it was opened. A request is one read or write; it moves in chunks."""

    reads: int = 0
    writes: int = 0
    chunks_read: int = 0
    chunks_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    failures: int = 0
    resumed: int = 0
    """Chunks continued after a partial transfer."""
    fixed: int = 0
    """Chunks that used registered memory."""
    deepest: int = 0
    """The most chunks that were ever in flight on one path."""
    both: int = 0
    """Chunks begun while a chunk of the other direction was in flight on the same path."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error injected for a test: after `skip` chunks of `direction`, the next `count` of them wait `delay_ms`, then
    fail with `errno`, or (with errno 0) transfer no more than `limit` bytes at first."""

    direction: Direction
    errno: int = 0
    limit: int = -1
    skip: int = 0
    count: int = 1
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """Room for one unit's state: `nbytes` from `offsets` on in each lane's file, the first block in lane `rotate`.

    `checksums` has one of each sector, 0 where it is unknown.
    """

    name: str
    nbytes: int
    offsets: tuple[int, ...]
    rotate: int
    checksums: ctypes.Array[ctypes.c_uint32] | None = field(repr=False, compare=False)


class _Failure(ctypes.Structure):
    _fields_ = (
        ("cause", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("lane", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
        ("got", ctypes.c_int64),
    )


class _Counters(ctypes.Structure):
    _fields_ = (("values", ctypes.c_int64 * 11),)


def probe_uring(library: ctypes.CDLL) -> int:
    """0 where io_uring works, else the errno of what does not."""
    return int(library.wherry_disk_probe_uring())


class NativeRequest:
    """A request of the native engine. It may outlive the engine, which completes it before closing."""

    __slots__ = ("_handle", "_library")

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library = library
        self._handle = handle

    def wait(self, timeout_ms: int) -> bool:
        return bool(self._library.wherry_disk_wait(self._handle, timeout_ms))

    def failure(self) -> DiskFailure | None:
        raw = _Failure()
        if not self._library.wherry_disk_failure(self._handle, ctypes.byref(raw)):
            return None
        return DiskFailure(Cause(raw.cause), raw.code, raw.lane, raw.offset, raw.wanted, raw.got)

    def __del__(self) -> None:
        self._library.wherry_disk_drop(self._handle)


class NativeEngine:
    """The C++ engine, over io_uring or over threads.

    It moves records between memory and the files ("lanes") it was opened with, `depth` chunks deep on each.
    """

    def __init__(self, library: ctypes.CDLL, files: Sequence[int], block: int, depth: int, *, uring: bool) -> None:
        self._library = library
        self._process = os.getpid()
        error = ctypes.c_int32()
        descriptors = (ctypes.c_int32 * len(files))(*files)
        self._handle = library.wherry_disk_open(int(uring), descriptors, len(files), block, depth, ctypes.byref(error))
        if not self._handle:
            raise OSError(error.value, "the disk engine did not start")

    def submit(self, write: bool, address: int, record: DiskRecord, begin: int, length: int) -> NativeRequest:
        offsets = (ctypes.c_int64 * len(record.offsets))(*record.offsets)
        handle = self._library.wherry_disk_submit(
            self._open(), int(write), address, begin, length, offsets, record.rotate, record.checksums
        )
        return NativeRequest(self._library, handle)

    def add_memory(self, address: int, length: int) -> None:
        """Register it with io_uring. What the system refuses, by its limit of locked memory, is used as it is."""
        if self._handle and os.getpid() == self._process:
            self._library.wherry_disk_add_memory(self._handle, address, length)

    def remove_memory(self, address: int, length: int) -> None:
        if self._handle and os.getpid() == self._process:
            self._library.wherry_disk_remove_memory(self._handle, address)

    def counters(self) -> Counters:
        raw = _Counters()
        self._library.wherry_disk_counters(self._open(), ctypes.byref(raw))
        return Counters(*raw.values)

    def inject(self, fault: Fault) -> None:
        write = fault.direction == "write"
        self._library.wherry_disk_inject(
            self._open(), int(write), fault.skip, fault.count, fault.errno, fault.limit, fault.delay_ms
        )

    def close(self) -> None:
        """Wait for everything under way, then end."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.wherry_disk_close(handle)

    def _open(self) -> int:
        assert self._handle, "the disk engine is closed"
        return self._handle
