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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from wherry.native.disk import SECTOR, Cause, Counters, DiskFailure, DiskRecord, Fault

_MAX_THREADS = 64
_RETRIES = 1000  # of a transfer that the system answers with EAGAIN


class PythonRequest:
    """A request of the Python engine: its chunks, each of which comes to a failure, or to None."""

    def __init__(self, chunks: Sequence[Future[DiskFailure | None]]) -> None:
        self._chunks = chunks

    def wait(self, timeout_ms: int) -> bool:
        return not wait(self._chunks, timeout_ms / 1000).not_done

    def failure(self) -> DiskFailure | None:
        return next((failure for chunk in self._chunks if (failure := chunk.result()) is not None), None)


@dataclass(slots=True)
class _Chunk:
    lane: int
    write: bool
    address: int
    record: DiskRecord
    at: int
    offset: int
    useful: int
    fault: Fault | None = None

    @property
    def length(self) -> int:
        return -(-self.useful // SECTOR) * SECTOR

    def failure(self, cause: Cause, code: int = 0, moved: int = 0, bad: int = 0) -> DiskFailure:
        return DiskFailure(cause, code, self.lane, self.offset + bad, self.length, moved)


class PythonEngine:
    """What the native engine over threads does, in Python: the same chunks, errors and counters. A lane takes its
    chunks in the order of their requests."""

    def __init__(self, files: Sequence[int], block: int, depth: int) -> None:
        self._files = list(files)
        self._block = block
        threads = max(1, min(depth, _MAX_THREADS // len(files)))
        self._lanes = [ThreadPoolExecutor(threads, "wherry-disk") for _ in files]
        self._flying = [[0, 0] for _ in files]
        self._faults: list[Fault] = []
        self._counts = {name: 0 for name in Counters.__slots__}
        self._lock = threading.Lock()

    def submit(self, write: bool, address: int, record: DiskRecord, begin: int, length: int) -> PythonRequest:
        chunks = [
            chunk
            for lane in range(len(self._files))
            for chunk in self._cut(lane, write, address, record, begin, begin + length)
        ]
        with self._lock:
            self._counts["writes" if write else "reads"] += 1
            for first in {chunk.lane: chunk for chunk in reversed(chunks)}.values():
                if os.fstat(self._files[first.lane]).st_nlink == 0:
                    self._counts["failures"] += 1
                    lost: Future[DiskFailure | None] = Future()
                    lost.set_result(DiskFailure(Cause.VANISHED, 0, first.lane, first.offset, length, 0))
                    return PythonRequest([lost])
            for chunk in chunks:
                self._meet_fault(chunk)
            return PythonRequest([self._lanes[chunk.lane].submit(self._run, chunk) for chunk in chunks])

    def add_memory(self, address: int, length: int) -> None:
        return None

    def remove_memory(self, address: int, length: int) -> None:
        return None

    def counters(self) -> Counters:
        with self._lock:
            return Counters(**self._counts)

    def inject(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def close(self) -> None:
        for lane in self._lanes:
            lane.shutdown()

    def _cut(self, lane: int, write: bool, address: int, record: DiskRecord, begin: int, end: int) -> Iterator[_Chunk]:
        """The chunks of one lane: block b of a record lies on lane (b + rotate) % lanes, as its block b // lanes."""
        lanes, block = len(self._files), self._block
        ahead = (lane - record.rotate - begin // block) % lanes
        at = (begin // block + ahead) * block if ahead else begin
        while at < end:
            useful = min((at // block + 1) * block, end) - at
            if useful > SECTOR:
                useful -= useful % SECTOR
            offset = record.offsets[lane] + at // block // lanes * block + at % block
            yield _Chunk(lane, write, address + at - begin, record, at, offset, useful)
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
            chunk.fault = fault
            return

    def _run(self, chunk: _Chunk) -> DiskFailure | None:
        flying, write = self._flying[chunk.lane], chunk.write
        with self._lock:
            flying[write] += 1
            self._counts["chunks_written" if write else "chunks_read"] += 1
            self._counts["both"] += flying[not write] > 0
            self._counts["deepest"] = max(self._counts["deepest"], sum(flying))
        try:
            failure = self._move(chunk)
        except OSError as error:
            failure = chunk.failure(Cause.SYSTEM, error.errno or errno.EIO)
        with self._lock:
            flying[write] -= 1
            if failure is None:
                self._counts["bytes_written" if write else "bytes_read"] += chunk.useful
            else:
                self._counts["failures"] += 1
        return failure

    def _move(self, chunk: _Chunk) -> DiskFailure | None:
        if chunk.fault is not None:
            time.sleep(chunk.fault.delay_ms / 1000)
            if chunk.fault.errno:
                return chunk.failure(Cause.SYSTEM, chunk.fault.errno)
        caller = _view(chunk.address, chunk.useful)
        ragged = chunk.useful != chunk.length
        memory = memoryview(mmap.mmap(-1, SECTOR)) if ragged else caller
        if ragged and chunk.write:
            memory[: chunk.useful] = caller
        sums, first = chunk.record.checksums, chunk.at // SECTOR
        if chunk.write and sums is not None:
            for i, found in enumerate(_checksums(memory), first):
                sums[i] = found
        failure = self._transfer(chunk, memory)
        if failure is not None or chunk.write:
            return failure
        if sums is not None:
            for i, found in enumerate(_checksums(memory)):
                if sums[first + i] not in (0, found):
                    return chunk.failure(Cause.CHECKSUM, moved=chunk.length, bad=i * SECTOR)
        if ragged:
            caller[:] = memory[: chunk.useful]
        return None

    def _transfer(self, chunk: _Chunk, memory: memoryview) -> DiskFailure | None:
        file, moved, retries = self._files[chunk.lane], 0, 0
        limit = -1 if chunk.fault is None else chunk.fault.limit
        system = os.pwritev if chunk.write else os.preadv
        while moved < chunk.length:
            part = memory[moved:]
            if limit >= 0:
                part, result, limit = part[: limit - limit % SECTOR], limit, -1
                if not part:
                    return chunk.failure(Cause.SHORT, moved=moved + result)
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
                return chunk.failure(Cause.SHORT, moved=moved + result)
            if moved < chunk.length:
                with self._lock:
                    self._counts["resumed"] += 1
        return None


def _view(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _checksums(memory: memoryview) -> list[int]:
    """One for each sector, never 0, which means unknown."""
    return [zlib.crc32(memory[at : at + SECTOR]) or 1 for at in range(0, len(memory), SECTOR)]
