"""The disk engine without the native library: threads for each lane, `os.preadv` and `os.pwritev`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

from wherry.native.disk import SECTOR, Cause, Counters, Failure, Fault, Layout

_MAX_THREADS = 64
_RETRIES = 1000


@dataclass(frozen=True, slots=True)
class _Layout:
    bases: tuple[int, ...]
    rotate: int
    checksums: list[int] | None


class PythonRequest:
    """A request of the Python engine: its chunks that are not over, and the first failure among them."""

    __slots__ = ("_done", "_failure", "_left")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._failure: Failure | None = None
        self._left = 0

    def wait(self, timeout_ms: int) -> bool:
        return self._done.wait(timeout_ms / 1000)

    def failure(self) -> Failure | None:
        return self._failure

    def begin(self, chunks: int) -> None:
        self._left = chunks
        if not chunks:
            self._done.set()

    def fail(self, failure: Failure) -> bool:
        """Whether it is the first."""
        first = self._failure is None
        self._failure = self._failure or failure
        return first

    def end_one(self) -> bool:
        """Whether it was the last."""
        self._left -= 1
        if not self._left:
            self._done.set()
        return not self._left


@dataclass(slots=True)
class _Chunk:
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


class PythonEngine:
    """What the native engine over threads does, in Python: the same chunks, errors and counters. A lane takes its
    chunks in the order of their requests."""

    def __init__(self, files: Sequence[int], block: int, depth: int) -> None:
        self._files = list(files)
        self._block = block
        self._lanes: list[SimpleQueue[tuple[PythonRequest, _Chunk] | None]] = [SimpleQueue() for _ in files]
        self._flying = [[0, 0] for _ in files]
        self._requests = 0
        self._faults: list[Fault] = []
        self._counts = {name: 0 for name in Counters.__slots__}
        self._changed = threading.Condition()
        # Daemons, because the interpreter joins others before it runs the exit handlers that would stop them.
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name="wherry-disk", daemon=True)
            for lane in self._lanes
            for _ in range(max(1, min(depth, _MAX_THREADS // len(files))))
        ]
        for thread in self._threads:
            thread.start()

    def lay(self, bases: Sequence[int], rotate: int, sectors: int, checksum: bool) -> _Layout:
        return _Layout(tuple(bases), rotate, [0] * sectors if checksum else None)

    def submit(self, write: bool, address: int, layout: Layout, begin: int, length: int) -> PythonRequest:
        assert isinstance(layout, _Layout)
        request = PythonRequest()
        chunks = [
            chunk
            for lane in range(len(self._files))
            for chunk in self._cut(lane, write, address, layout, begin, begin + length)
        ]
        with self._changed:
            self._counts["writes" if write else "reads"] += 1
            for first in {chunk.lane: chunk for chunk in reversed(chunks)}.values():
                if os.fstat(self._files[first.lane]).st_nlink == 0:
                    lost = Failure(Cause.VANISHED, 0, first.lane, first.offset, length, 0)
                    self._counts["failures"] += request.fail(lost)
            if request.failure() is not None:
                chunks = []
            request.begin(len(chunks))
            self._requests += bool(chunks)
            for chunk in chunks:
                self._meet_fault(chunk)
                self._lanes[chunk.lane].put((request, chunk))
        return request

    def add_memory(self, address: int, length: int) -> int:
        return -errno.ENOTSUP

    def remove_memory(self, address: int) -> int:
        return -errno.ENOTSUP

    def counters(self) -> Counters:
        with self._changed:
            return Counters(**self._counts)

    def inject(self, fault: Fault) -> None:
        with self._changed:
            self._faults.append(fault)

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._requests == 0)

    def close(self) -> None:
        for lane in self._lanes:
            for _ in self._threads:
                lane.put(None)
        for thread in self._threads:
            thread.join()

    def _cut(self, lane: int, write: bool, address: int, layout: _Layout, begin: int, end: int) -> Iterator[_Chunk]:
        """The chunks of one lane: block b of a record lies on lane (b + rotate) % lanes, as its block b // lanes."""
        lanes, block = len(self._files), self._block
        ahead = (lane - layout.rotate - begin // block) % lanes
        at = (begin // block + ahead) * block if ahead else begin
        while at < end:
            useful = min((at // block + 1) * block, end) - at
            if useful > SECTOR:
                useful -= useful % SECTOR
            offset = layout.bases[lane] + at // block // lanes * block + at % block
            yield _Chunk(lane, write, address + at - begin, layout, at, offset, useful)
            at += useful
            if at % block == 0:
                at += (lanes - 1) * block

    def _meet_fault(self, chunk: _Chunk) -> None:
        for i, fault in enumerate(self._faults):
            if (fault.direction == "write") is not chunk.write or fault.count == 0:
                continue
            if fault.skip > 0:
                self._faults[i] = replace(fault, skip=fault.skip - 1)
                continue
            self._faults[i] = replace(fault, count=fault.count - 1)
            chunk.code, chunk.limit, chunk.delay_ms = fault.errno, fault.limit, fault.delay_ms
            return

    def _serve(self, lane: SimpleQueue[tuple[PythonRequest, _Chunk] | None]) -> None:
        while (work := lane.get()) is not None:
            self._run(*work)

    def _run(self, request: PythonRequest, chunk: _Chunk) -> None:
        flying, write = self._flying[chunk.lane], chunk.write
        with self._changed:
            skipped = request.failure() is not None
            if not skipped:
                flying[write] += 1
                self._counts["chunks_written" if write else "chunks_read"] += 1
                self._counts["both"] += flying[not write] > 0
                self._counts["deepest"] = max(self._counts["deepest"], sum(flying))
        try:
            failure = None if skipped else self._move(chunk)
        except OSError as error:
            failure = self._failure(chunk, Cause.SYSTEM, error.errno or errno.EIO)
        with self._changed:
            flying[write] -= not skipped
            if failure is not None:
                self._counts["failures"] += request.fail(failure)
            elif not skipped:
                self._counts["bytes_written" if write else "bytes_read"] += chunk.useful
            if request.end_one():
                self._requests -= 1
                self._changed.notify_all()

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
        file, moved, retries = self._files[chunk.lane], 0, 0
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


def _view(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _checksums(memory: memoryview) -> list[int]:
    """One for each sector, never 0, which means unknown."""
    return [zlib.crc32(memory[at : at + SECTOR]) or 1 for at in range(0, len(memory), SECTOR)]
