"""safetensors files, written as a stream and read in parts, with a checksum for every block.

The library of that name writes a file from tensors that are all in memory. Here the room for the header is set aside,
tensors are written as they come, and the header last. What results is an ordinary safetensors file.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from wherry.checkpoint.errors import CheckpointError, describe
from wherry.errors import one_line
from wherry.native.checksum import crc32
from wherry.regular import leads_out, open_regular

# Bytes under one checksum: a rank that verifies its share of the blocks need not read whole files.
BLOCK = 8 << 20
# Data of a file begin at a multiple of this, the largest page and sector there is about.
DATA_ALIGNMENT = 4096
# A reader may map a tensor as its dtype, so each begins at a multiple of its largest.
TENSOR_ALIGNMENT = 8
# What fills the gaps between tensors: safetensors has none.
FILL = ".fill"
# Threads of one reader or writer: enough checksums at once for a fast disk. With blocks of 8 MiB, they and what waits
# for them are 40 MiB.
THREADS = 4

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


# A number of bytes, elements or steps, as a file may say it.
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]

_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_BEGIN_WRITING = 2


@dataclass
class FileRecord:
    """A finished file: its size, where its data begin, and checksums of the header and of each block of data."""

    bytes: Count
    data_start: Count
    header_crc32: Count
    blocks: list[Count] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether there are as many checksums as blocks."""
        return 8 <= self.data_start <= self.bytes and len(self.blocks) == -(-(self.bytes - self.data_start) // BLOCK)


class FilePool:
    """A few threads for reading, writing and checksums, which leave the interpreter to others while they run; and
    blocks of memory for them, used again and again.

    No more tasks wait than there are threads, so there is memory for no more. Whoever hears of a failure finds that no
    task is under way any more.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, "checkpoint")
        self._futures: deque[Future[None]] = deque()
        self._idle: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A block of bytes, which nothing but `give` brings back."""
        try:
            return self._idle.pop()
        except IndexError:  # pages of its own, which the system has back at once when it goes
            return torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.uint8)

    def give(self, block: torch.Tensor) -> None:
        self._idle.append(block)

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


class TensorWriter:
    """Writes one file: `add` tensors, then `finish`.

    Blocks are summed and written by threads, and the disk begins with each as it comes: at the end there is little left
    to wait for. What is on a device, or does not fill a block, is copied into one.
    """

    def __init__(self, path: Path, header_room: int, metadata: dict[str, str] | None = None) -> None:
        self.path = path
        self._entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self._data_start = -(-(8 + header_room) // DATA_ALIGNMENT) * DATA_ALIGNMENT
        self._room = self._data_start - 8
        self._used = 64 + len(json.dumps(metadata or {}))
        # Bytes of data so far, and the block that the last of them are in.
        self.data_bytes = 0
        self._block = torch.empty(0, dtype=torch.uint8)
        self._blocks: list[int] = []
        self._pool = FilePool()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def fits(self, name: str) -> bool:
        """Whether the header has room for one more tensor, and for what fills the gap before it."""
        return self._used + len(json.dumps(name)) + 400 <= self._room

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.add_parts(name, tensor.dtype, tuple(tensor.shape), [tensor])

    def add_parts(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[torch.Tensor]) -> None:
        """A tensor as it comes, contiguous, in row-major order. Each part may change when the next is asked for."""
        assert name not in self._entries, name
        if dtype not in DTYPES:
            raise CheckpointError(f"{name}: safetensors files hold no {dtype}; leave it out, or convert it")
        gap = -self.data_bytes % TENSOR_ALIGNMENT
        if gap:
            self._begin(f"{FILL}.{self.data_bytes}", "U8", (gap,), gap)
            self._write(torch.zeros(gap, dtype=torch.uint8))
        nbytes = math.prod(shape) * dtype.itemsize
        self._begin(name, DTYPES[dtype], shape, nbytes)
        end = self.data_bytes + nbytes
        for part in parts:
            assert part.dtype == dtype, (name, part.dtype, dtype)
            self._write(part.detach().reshape(-1).view(torch.uint8))
        assert self.data_bytes == end, (name, self.data_bytes, end)

    def _begin(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [self.data_bytes, self.data_bytes + nbytes]}
        self._entries[name] = entry
        self._used += len(json.dumps({name: entry}))

    def _write(self, data: torch.Tensor) -> None:
        """Take over some bytes, wherever they are; they may change when this returns."""
        borrowed = False
        while data.numel():
            filled = self.data_bytes % BLOCK
            count = min(BLOCK - filled, data.numel())
            part, data = data[:count], data[count:]
            self.data_bytes += count
            if count == BLOCK and part.device.type == "cpu":
                self._hand_over(part)
                borrowed = True
                continue
            if not filled:
                self._block = self._pool.take()
            self._block[filled : filled + count].copy_(part)
            if filled + count == BLOCK:
                self._hand_over(self._block, own=True)
        if borrowed:
            self._pool.wait()

    def _hand_over(self, block: torch.Tensor, *, own: bool = False) -> None:
        self._blocks.append(0)
        self._pool.do(self._put, len(self._blocks) - 1, block, own)

    def _put(self, number: int, block: torch.Tensor, own: bool) -> None:
        data = byte_view(block)
        self._blocks[number] = crc32(data)
        start = self._data_start + number * BLOCK
        self._pwrite(data, start)
        if _sync_file_range is not None:  # let the disk begin with it; what this hint does not do, fsync does
            _sync_file_range(self._fd, start, len(data), _BEGIN_WRITING)
        if own:
            self._pool.give(block)

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
        if self.data_bytes % BLOCK:
            self._hand_over(self._block[: self.data_bytes % BLOCK])
        self._pwrite(memoryview(header), 0)
        self._pool.wait()
        os.fsync(self._fd)
        self.close()
        return FileRecord(self._data_start + self.data_bytes, self._data_start, crc32(header), self._blocks)

    def close(self) -> None:
        # Threads write to the descriptor's number, which must not be another file's by then.
        self._pool.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def header_of(entries: Any, data: int, length: int) -> dict[str, Stored]:
    """The tensors of a safetensors header, whose data are bytes `data` to `length` of a file. Raises ValueError for one
    that is not of such a file: tensors follow each other in it, and leave nothing out."""
    if not isinstance(entries, dict):
        raise ValueError("it is no object")
    found: dict[str, Stored] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = TORCH_DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
        if not all(type(number) is int and 0 <= number < 1 << 53 for number in (*shape, start, stop)):
            raise ValueError(f"{name}: sizes and offsets are whole numbers, got {entry['shape']} and {start}, {stop}")
        if stop - start != math.prod(shape) * dtype.itemsize or start % dtype.itemsize:
            raise ValueError(f"{name}: bytes {start:,} to {stop:,} do not hold {list(shape)} of {entry['dtype']}")
        found[name] = Stored(dtype, shape, data + start, data + stop)
    at = data
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != at:
            raise ValueError(f"{name} begins at byte {stored.start:,}, expected {at:,}")
        at = stored.stop
    if at != length:
        raise ValueError(f"its tensors end at byte {at:,}, and the file at {length:,}")
    return found


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON's, in which no key stands twice: readers would differ about which of them counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def inside(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file, which no link leads out of its folder."""
    path = folder / name
    real = leads_out(folder, path)
    if real is not None:
        raise CheckpointError(f"{path} leads out of its folder, to {real}; a checkpoint has its files with it")
    return path


class TensorReader:
    """Reads parts of the tensors of one file; long ones by the threads of a pool."""

    def __init__(self, path: Path, pool: FilePool) -> None:
        self.path = path
        self._pool = pool
        try:
            self._fd = open_regular(inside(path.parent, path.name))
        except OSError as error:
            raise CheckpointError(describe(error)) from error
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
        try:
            text = os.pread(self._fd, size, 8)
            return header_of(json.loads(text, object_pairs_hook=unique_keys), 8 + size, length)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its header cannot be read ({one_line(str(error), 500)})") from error

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
        if len(target) <= BLOCK:
            self._fill(target, position)
            return
        for start in range(0, len(target), BLOCK):
            self._pool.do(self._fill, target[start : start + BLOCK], position + start)
        self._pool.wait()

    def _fill(self, target: memoryview, position: int) -> None:
        try:
            done = _read_into(self._fd, target, position)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        if done < len(target):
            raise CheckpointError(f"{self.path}: the file ends early, at byte {position + done}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _read_into(fd: int, target: memoryview, position: int) -> int:
    """Read what there is, up to the target's size; returns how much that is."""
    done = 0
    while done < len(target):
        got = os.preadv(fd, [target[done:]], position + done)
        if not got:
            break
        done += got
    return done


def check_blocks(path: Path, record: FileRecord, blocks: range, pool: FilePool) -> list[str]:
    """What is wrong with some blocks of a file; block 0 goes with the header."""
    found: dict[int, str] = {}

    def check(number: int, start: int, stop: int, expected: int, told: str) -> None:
        if _checksum(fd, start, stop, pool) != expected:
            found[number] = f"{path.name}: {told}"

    try:
        with open(open_regular(inside(path.parent, path.name)), "rb", buffering=0) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            if size != record.bytes:
                return [f"{path.name} has {size:,} bytes, expected {record.bytes:,}"]
            if blocks.start == 0:
                check(-1, 0, record.data_start, record.header_crc32, "its header is damaged")
            for block in blocks:
                start = record.data_start + block * BLOCK
                stop = min(start + BLOCK, record.bytes)
                if start < stop:
                    told = f"bytes {start:,} to {stop:,} are damaged"
                    pool.do(check, block, start, stop, record.blocks[block], told)
            pool.wait()
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    except CheckpointError as error:
        return [str(error)]
    return [found[number] for number in sorted(found)]


def _checksum(fd: int, start: int, stop: int, pool: FilePool) -> int:
    """Of bytes `start` to `stop`, or of fewer at the file's end."""
    block, crc = pool.take(), 0
    while start < stop:
        data = byte_view(block[: min(BLOCK, stop - start)])
        got = _read_into(fd, data, start)
        if not got:
            break
        crc = crc32(data[:got], crc)
        start += got
    pool.give(block)
    return crc


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that is to be at `path` whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, and lasts."""
    # Taken first: whoever was waiting for the file may move its folder as soon as it is there.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with replacing(path) as aside, open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(folder)
    finally:
        os.close(folder)
