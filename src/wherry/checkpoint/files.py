"""safetensors files, written as a stream and read in parts, with a checksum for every block.

The library of that name writes a file from tensors that are all in memory. Here the room for the header is set aside,
tensors are written as they come, and the header last. What results is an ordinary safetensors file.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint.errors import CheckpointError
from wherry.native.checksum import crc32
from wherry.tiers.buffers import HostPool

# Bytes under one checksum: a rank that verifies its share of the blocks need not read whole files.
BLOCK = 8 << 20
# Data of a file begin at a multiple of this, the largest page and sector there is about.
DATA_ALIGNMENT = 4096
# A reader may map a tensor as its dtype, so each begins at a multiple of its largest.
TENSOR_ALIGNMENT = 8
# What fills the gaps between tensors: safetensors has none.
FILL = ".fill"
# Device memory goes through the host in parts of this many bytes.
HOST_PART = 32 << 20
# Threads of one reader or writer: enough checksums at once for a fast disk. With blocks of 8 MiB, they and what waits
# for them are 40 MiB.
THREADS = 4
# Of sync_file_range(2): begin to write what is dirty, and do not wait.
_BEGIN_WRITING = 2

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class FileRecord:
    """A finished file: its size, where its data begin, and checksums of the header and of each block of data."""

    bytes: int
    data_start: int
    header_crc32: int
    blocks: list[int] = field(default_factory=list)


class Pool:
    """A few threads for reading, writing and checksums, which leave the interpreter to others while they run.

    No more tasks wait than there are threads, so there is memory for no more. Whoever hears of a failure finds that no
    task is under way any more.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, "checkpoint")
        self._futures: deque[Future[None]] = deque()

    def do(self, task: Callable[..., None], *arguments: Any) -> None:
        """Have a task done; raises the error of one before."""
        if len(self._futures) > THREADS:
            first = self._futures.popleft()
            if first.exception() is not None:
                wait(self._futures)
            first.result()
        try:
            self._futures.append(self._executor.submit(task, *arguments))
        except RuntimeError as error:
            # A save goes on while the interpreter waits for its threads, and executors take nothing more by then.
            if "shutdown" not in str(error):
                raise
            task(*arguments)

    def wait(self) -> None:
        """Return when every task is done; raises the first error."""
        futures, self._futures = self._futures, deque()
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """Wait for the tasks under way, whatever becomes of them."""
        self._executor.shutdown(cancel_futures=True)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Buffers:
    """Blocks of memory that several threads use again and again: as many as were ever in use at once."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []
        self._pool = HostPool()  # of huge pages

    def take(self) -> memoryview:
        try:
            return self._idle.pop()
        except IndexError:
            return byte_view(self._pool.take(BLOCK))

    def give(self, buffer: memoryview) -> None:
        self._idle.append(buffer)


def host_parts(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor wherever it is, a part at a time."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        if flat.numel():
            yield byte_view(flat)
        return
    step = max(1, HOST_PART // flat.element_size())
    for start in range(0, flat.numel(), step):
        yield byte_view(flat[start : start + step].cpu())


class TensorWriter:
    """Writes one file: `add` tensors, then `finish`.

    Blocks are summed and written by threads, and the disk begins with each as it comes: at the end there is little left
    to wait for. What does not fill a block is copied into one.
    """

    def __init__(self, path: Path, header_room: int, metadata: dict[str, str] | None = None) -> None:
        self.path = path
        self._entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self._data_start = -(-(8 + header_room) // DATA_ALIGNMENT) * DATA_ALIGNMENT
        self._room = self._data_start - 8
        self._used = 64 + len(json.dumps(metadata or {}))
        self._position = 0
        self._blocks: list[int] = []
        # The block that is being filled, and memory for others.
        self._block: memoryview | None = None
        self._buffers = Buffers()
        self._pool = Pool()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    @property
    def data_bytes(self) -> int:
        return self._position

    def fits(self, name: str) -> bool:
        """Whether the header has room for one more tensor, and for what fills the gap before it."""
        return self._used + len(json.dumps(name)) + 400 <= self._room

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.add_parts(name, tensor.dtype, tuple(tensor.shape), [tensor])

    def add_parts(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[torch.Tensor]) -> None:
        """A tensor as it comes, in row-major order. Each part may change when the next is asked for."""
        assert name not in self._entries, name
        if dtype not in DTYPES:
            raise CheckpointError(f"{name}: safetensors files hold no {dtype}; leave it out, or convert it")
        gap = -self._position % TENSOR_ALIGNMENT
        if gap:
            self._begin(f"{FILL}.{self._position}", "U8", (gap,), gap)
            self._write(memoryview(bytes(gap)))
        nbytes = math.prod(shape) * dtype.itemsize
        self._begin(name, DTYPES[dtype], shape, nbytes)
        end = self._position + nbytes
        for tensor in parts:
            assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
            for part in host_parts(tensor):
                self._write(part)
        assert self._position == end, (name, self._position, end)

    def _begin(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [self._position, self._position + nbytes]}
        self._entries[name] = entry
        self._used += len(json.dumps({name: entry}))

    def _write(self, data: memoryview) -> None:
        """Take over some bytes; they may change when this returns."""
        at = 0
        direct = False
        while at < len(data):
            filled = self._position % BLOCK
            if not filled and len(data) - at >= BLOCK:
                self._hand_over(data[at : at + BLOCK])
                at += BLOCK
                self._position += BLOCK
                direct = True
                continue
            if self._block is None:
                self._block = self._buffers.take()
            count = min(BLOCK - filled, len(data) - at)
            self._block[filled : filled + count] = data[at : at + count]
            at += count
            self._position += count
            if filled + count == BLOCK:
                block, self._block = self._block, None
                self._hand_over(block, own=True)
        if direct:
            self._pool.wait()

    def _hand_over(self, block: memoryview, *, own: bool = False) -> None:
        self._blocks.append(0)
        self._pool.do(self._put, len(self._blocks) - 1, block, own)

    def _put(self, number: int, block: memoryview, own: bool = False) -> None:
        self._blocks[number] = crc32(block)
        start = self._data_start + number * BLOCK
        self._pwrite(block, start)
        _begin_writing(self._fd, start, len(block))
        if own:
            self._buffers.give(block)

    def _pwrite(self, data: memoryview, position: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], position + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def finish(self) -> FileRecord:
        """Write the header, and wait until everything is on the disk."""
        text = json.dumps(self._entries, separators=(",", ":")).encode()
        assert len(text) <= self._room, (len(text), self._room)
        header = self._room.to_bytes(8, "little") + text.ljust(self._room)
        rest = self._position % BLOCK
        if rest:
            assert self._block is not None
            self._blocks.append(0)
            self._put(len(self._blocks) - 1, self._block[:rest])
        self._pwrite(memoryview(header), 0)
        self._pool.wait()
        os.fsync(self._fd)
        self.close()
        return FileRecord(self._data_start + self._position, self._data_start, crc32(header), self._blocks)

    def close(self) -> None:
        # Threads write to the descriptor's number, which must not be another file's by then.
        self._pool.close()
        self._block = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _begin_writing(fd: int, start: int, count: int) -> None:
    """Let the disk begin with what was written. It is a hint: what it does not do, fsync does."""
    if _sync_file_range is not None:
        _sync_file_range(fd, start, count, _BEGIN_WRITING)


def _find_sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorReader:
    """Reads parts of the tensors of one file; long ones by the threads of a pool."""

    def __init__(self, path: Path, pool: Pool) -> None:
        self.path = path
        self._pool = pool
        # Of tensors, so far.
        self.bytes_read = 0
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, Stored]:
        head = os.pread(self._fd, 8, 0)
        size = int.from_bytes(head, "little")
        length = os.fstat(self._fd).st_size
        if len(head) < 8 or size > length - 8:
            raise CheckpointError(f"{self.path}: this is not a whole safetensors file")
        data = 8 + size
        try:
            entries = json.loads(os.pread(self._fd, size, 8))
            return {
                name: Stored(
                    TORCH_DTYPES[entry["dtype"]],
                    tuple(entry["shape"]),
                    data + entry["data_offsets"][0],
                    data + entry["data_offsets"][1],
                )
                for name, entry in entries.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.path}: its header cannot be read ({error})") from error

    def read(
        self, name: str, first: int = 0, count: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`count` elements of a tensor from element `first`, as one dim; into `out` where that is given."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: it holds no tensor {name!r}")
        stored = self.tensors[name]
        size = stored.dtype.itemsize
        if count is None:
            count = (stored.stop - stored.start) // size - first
        if out is None:
            out = torch.empty(count, dtype=stored.dtype)
        assert out.dtype == stored.dtype and out.numel() == count and out.is_contiguous(), (name, out.dtype, count)
        if stored.start + (first + count) * size > stored.stop:
            raise CheckpointError(f"{self.path}: {name} is shorter than the manifest says")
        if count:
            self._read_long(byte_view(out), stored.start + first * size)
        return out

    def _read_long(self, target: memoryview, position: int) -> None:
        self.bytes_read += len(target)
        if len(target) <= BLOCK:
            self._read_into(target, position)
            return
        for start in range(0, len(target), BLOCK):
            self._pool.do(self._read_into, target[start : start + BLOCK], position + start)
        self._pool.wait()

    def _read_into(self, target: memoryview, position: int) -> None:
        done = 0
        while done < len(target):
            got = os.preadv(self._fd, [target[done:]], position + done)
            if got == 0:
                raise CheckpointError(f"{self.path}: the file ends early, at byte {position + done}")
            done += got

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_blocks(path: Path, record: FileRecord, blocks: range, pool: Pool) -> list[str]:
    """What is wrong with some blocks of a file; block 0 goes with the header."""
    found: dict[int, str] = {}
    try:
        with open(path, "rb", buffering=0) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            if size != record.bytes:
                return [f"{path.name} has {size:,} bytes, expected {record.bytes:,}"]
            buffers = Buffers()
            if blocks.start == 0 and _checksum(fd, 0, record.data_start, buffers) != record.header_crc32:
                found[-1] = f"{path.name}: its header is damaged"
            for block in blocks:
                pool.do(_check_block, fd, path.name, record, block, buffers, found)
            pool.wait()
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    return [found[block] for block in sorted(found)]


def _check_block(fd: int, name: str, record: FileRecord, block: int, buffers: Buffers, found: dict[int, str]) -> None:
    start = record.data_start + block * BLOCK
    length = min(BLOCK, record.bytes - start)
    if length > 0 and _checksum(fd, start, length, buffers) != record.blocks[block]:
        found[block] = f"{name}: bytes {start:,} to {start + length:,} are damaged"


def _checksum(fd: int, start: int, count: int, buffers: Buffers) -> int:
    """Of `count` bytes, or of fewer at the file's end."""
    buffer = buffers.take()
    crc = 0
    done = 0
    while done < count:
        got = os.preadv(fd, [buffer[: count - done]], start + done)
        if not got:
            break
        crc = crc32(buffer[:got], crc)
        done += got
    buffers.give(buffer)
    return crc


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, and lasts."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Taken first: whoever was waiting for the file may move its folder as soon as it is there.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        os.fsync(folder)
    finally:
        os.close(folder)
