"""The disk engine without the native library: a thread for each transfer in flight, `os.preadv` and `os.pwritev`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from wherry.native.disk import SECTOR, Cause, Counters, Failure, Fault, Layout

_MAX_THREADS = 64
_RETRIES = 1000


@dataclass(frozen=True, slots=True)
class _Layout:
    bases: tuple[int, ...]
    rotate: int
    checksums: list[int] | None


class PythonRequest:
    """A request of the Python engine."""

    __slots__ = ("_done", "_failure", "_open")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._failure: Failure | None = None
        self._open = 0

    def wait(self, timeout_ms: int) -> bool:
        return self._done.wait(timeout_ms / 1000)

    def failure(self) -> Failure | None:
        return self._failure


@dataclass(slots=True)
class _Chunk:
    request: PythonRequest
    lane: int
    write: bool
    address: int
    layout: _Layout
    at: int
    offset: int
    useful: int
    code: int = 0
    limit: int = -1
    delay_ms: int = 0

    @property
    def length(self) -> int:
        return -(-self.useful // SECTOR) * SECTOR


@dataclass(slots=True)
class _Lane:
    file: int
    queues: tuple[deque[tuple[PythonRequest, Iterator[_Chunk]]], ...] = field(
        default_factory=lambda: (deque(), deque())
    )
    flying: list[int] = field(default_factory=lambda: [0, 0])
    last: int = 1


class PythonEngine:
    """What the native threads engine does, in Python: the same chunks, order, errors and counters."""

    def __init__(self, files: Sequence[int], block: int, depth: int) -> None:
        self._lanes = [_Lane(file) for file in files]
        self._block = block
        self._depth = depth
        self._turn = 0
        self._alive = 0
        self._faults: list[list[int]] = []
        self._counts = {name: 0 for name in Counters.__slots__}
        self._changed = threading.Condition()
        self._stopping = False
        count = min(_MAX_THREADS, depth * len(files))
        # Daemons, because the interpreter joins others before it runs the exit handlers that would stop them.
        self._threads = [threading.Thread(target=self._run, name="wherry-disk", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def lay(self, bases: Sequence[int], rotate: int, sectors: int, checksum: bool) -> _Layout:
        return _Layout(tuple(bases), rotate, [0] * sectors if checksum else None)

    def submit(self, write: bool, address: int, layout: Layout, begin: int, length: int) -> PythonRequest:
        assert isinstance(layout, _Layout)
        request = PythonRequest()
        parts = []
        for index, lane in enumerate(self._lanes):
            chunks = self._cut(request, index, write, address, layout, begin, begin + length)
            first = next(chunks, None)
            if first is None:
                continue
            parts.append((lane, first, chunks))
            if os.fstat(lane.file).st_nlink == 0 and request._failure is None:
                request._failure = Failure(Cause.VANISHED, 0, index, first.offset, length, 0)
        with self._changed:
            self._counts["writes" if write else "reads"] += 1
            if request._failure is not None or not parts:
                self._counts["failures"] += request._failure is not None
                request._done.set()
                return request
            self._alive += 1
            request._open = len(parts)
            for lane, first, chunks in parts:
                lane.queues[write].append((request, _chain(first, chunks)))
            self._changed.notify_all()
        return request

    def add_memory(self, address: int, length: int) -> int:
        return -errno.ENOTSUP

    def remove_memory(self, address: int) -> int:
        return -errno.ENOTSUP

    def counters(self) -> Counters:
        with self._changed:
            return Counters(**self._counts)

    def inject(self, fault: Fault) -> None:
        write = int(fault.direction == "write")
        with self._changed:
            self._faults.append([write, fault.skip, fault.count, fault.errno, fault.limit, fault.delay_ms])

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._alive == 0)

    def close(self) -> None:
        self.drain()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _cut(
        self, request: PythonRequest, lane: int, write: bool, address: int, layout: _Layout, begin: int, end: int
    ) -> Iterator[_Chunk]:
        """The chunks of one lane: block b of a record lies on lane (b + rotate) % lanes, as its block b // lanes."""
        lanes, block = len(self._lanes), self._block
        ahead = (lane - layout.rotate - begin // block) % lanes
        at = (begin // block + ahead) * block if ahead else begin
        while at < end:
            useful = min((at // block + 1) * block, end) - at
            if useful > SECTOR:
                useful -= useful % SECTOR
            offset = layout.bases[lane] + at // block // lanes * block + at % block
            yield _Chunk(request, lane, write, address + at - begin, layout, at, offset, useful)
            at += useful
            if at % block == 0:
                at += (lanes - 1) * block

    def _pick(self) -> _Chunk | None:
        for step in range(len(self._lanes)):
            index = (self._turn + step) % len(self._lanes)
            lane = self._lanes[index]
            reading, writing = lane.flying
            if reading + writing >= self._depth:
                continue
            first = 0 if reading < writing else 1 if writing < reading else 1 - lane.last
            chunk = self._take(lane, first) or self._take(lane, 1 - first)
            if chunk is None:
                continue
            lane.last = int(chunk.write)
            lane.flying[chunk.write] += 1
            self._counts["chunks_written" if chunk.write else "chunks_read"] += 1
            self._counts["both"] += lane.flying[not chunk.write] > 0
            self._counts["deepest"] = max(self._counts["deepest"], sum(lane.flying))
            self._turn = index + 1
            self._apply_faults(chunk)
            return chunk
        return None

    def _take(self, lane: _Lane, direction: int) -> _Chunk | None:
        queue = lane.queues[direction]
        while queue:
            request, chunks = queue[0]
            chunk = next(chunks, None) if request._failure is None else None
            if chunk is not None:
                request._open += 1
                return chunk
            queue.popleft()
            self._close_one(request)
        return None

    def _apply_faults(self, chunk: _Chunk) -> None:
        for fault in self._faults:
            write, skip, count, code, limit, delay_ms = fault
            if write != chunk.write or count == 0:
                continue
            if skip > 0:
                fault[1] -= 1
                continue
            fault[2] -= 1
            chunk.code, chunk.limit, chunk.delay_ms = code, limit, delay_ms
            return

    def _run(self) -> None:
        while True:
            with self._changed:
                while (chunk := self._pick()) is None:
                    if self._stopping:
                        return
                    self._changed.wait()
            try:
                failure = self._move(chunk)
            except OSError as error:
                failure = self._failure(chunk, Cause.SYSTEM, error.errno or errno.EIO)
            self._finish(chunk, failure)

    def _move(self, chunk: _Chunk) -> Failure | None:
        if chunk.delay_ms:
            time.sleep(chunk.delay_ms / 1000)
        if chunk.code:
            return self._failure(chunk, Cause.SYSTEM, chunk.code)
        caller = _view(chunk.address, chunk.useful)
        ragged = chunk.useful != chunk.length
        memory = memoryview(mmap.mmap(-1, SECTOR)) if ragged else caller
        if ragged and chunk.write:
            memory[: chunk.useful] = caller
        sums, first = chunk.layout.checksums, chunk.at // SECTOR
        if chunk.write and sums is not None:
            sums[first : first + chunk.length // SECTOR] = _checksums(memory)
        failure = self._transfer(chunk, memory)
        if failure is not None or chunk.write:
            return failure
        if sums is not None:
            for i, found in enumerate(_checksums(memory)):
                if sums[first + i] not in (0, found):
                    return self._failure(chunk, Cause.CHECKSUM, moved=chunk.length, bad=i * SECTOR)
        if ragged:
            caller[:] = memory[: chunk.useful]
        return None

    def _transfer(self, chunk: _Chunk, memory: memoryview) -> Failure | None:
        file, moved, retries = self._lanes[chunk.lane].file, 0, 0
        system = os.pwritev if chunk.write else os.preadv
        while moved < chunk.length:
            part = memory[moved:]
            if chunk.limit >= 0:
                part, result, chunk.limit = part[: chunk.limit - chunk.limit % SECTOR], chunk.limit, -1
                if not part:
                    return self._failure(chunk, Cause.SHORT, moved=moved + result)
            try:
                result = system(file, [part], chunk.offset + moved)
            except BlockingIOError:
                retries += 1
                if retries == _RETRIES:
                    raise
                continue
            whole = result - result % SECTOR
            moved += whole
            if whole == 0:
                return self._failure(chunk, Cause.SHORT, moved=moved + result)
            if moved < chunk.length:
                with self._changed:
                    self._counts["resumed"] += 1
        return None

    def _failure(self, chunk: _Chunk, cause: Cause, code: int = 0, moved: int = 0, bad: int = 0) -> Failure:
        return Failure(cause, code, chunk.lane, chunk.offset + bad, chunk.length, moved)

    def _finish(self, chunk: _Chunk, failure: Failure | None) -> None:
        with self._changed:
            self._lanes[chunk.lane].flying[chunk.write] -= 1
            if failure is None:
                self._counts["bytes_written" if chunk.write else "bytes_read"] += chunk.useful
            elif chunk.request._failure is None:
                self._counts["failures"] += 1
                chunk.request._failure = failure
            self._close_one(chunk.request)

    def _close_one(self, request: PythonRequest) -> None:
        request._open -= 1
        if request._open == 0:
            request._done.set()
            self._alive -= 1
            if self._alive == 0:
                self._changed.notify_all()


def _chain(first: _Chunk, rest: Iterator[_Chunk]) -> Iterator[_Chunk]:
    yield first
    yield from rest


def _view(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _checksums(memory: memoryview) -> list[int]:
    """One for each sector, never 0, which means unknown."""
    return [zlib.crc32(memory[at : at + SECTOR]) or 1 for at in range(0, len(memory), SECTOR)]
