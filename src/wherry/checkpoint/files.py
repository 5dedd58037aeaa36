"""safetensors files, written as a stream and read in parts, with a checksum for every block.

The library of that name writes a file from tensors that are all in memory. Here the room for the header is set aside,
tensors are written as they come, and the header last. What results is an ordinary safetensors file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint.errors import CheckpointError

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


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


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
    """Writes one file: `add` tensors, then `finish`."""

    def __init__(self, path: Path, header_room: int, metadata: dict[str, str] | None = None) -> None:
        self.path = path
        self._entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self._data_start = -(-(8 + header_room) // DATA_ALIGNMENT) * DATA_ALIGNMENT
        self._room = self._data_start - 8
        self._used = 64 + len(json.dumps(metadata or {}))
        self._position = 0
        self._crc = 0
        self._blocks: list[int] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    @property
    def data_bytes(self) -> int:
        return self._position

    def fits(self, name: str) -> bool:
        """Whether the header has room for one more tensor, and for what fills the gap before it."""
        return self._used + len(json.dumps(name)) + 400 <= self._room

    def add(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self._entries, name
        gap = -self._position % TENSOR_ALIGNMENT
        if gap:
            self._begin(f"{FILL}.{self._position}", "U8", (gap,), gap)
            self._write(memoryview(bytes(gap)))
        self._begin(name, DTYPES[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for part in host_parts(tensor):
            self._write(part)

    def _begin(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [self._position, self._position + nbytes]}
        self._entries[name] = entry
        self._used += len(json.dumps({name: entry}))

    def _write(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            # Up to the block's end, so that no checksum spans two blocks.
            room = BLOCK - self._position % BLOCK
            part = data[at : at + room]
            written = os.pwrite(self._fd, part, self._data_start + self._position)
            self._crc = zlib.crc32(part[:written], self._crc)
            self._position += written
            at += written
            if self._position % BLOCK == 0:
                self._blocks.append(self._crc)
                self._crc = 0

    def finish(self) -> FileRecord:
        """Write the header, and wait until everything is on the disk."""
        text = json.dumps(self._entries, separators=(",", ":")).encode()
        assert len(text) <= self._room, (len(text), self._room)
        header = self._room.to_bytes(8, "little") + text.ljust(self._room)
        if self._position % BLOCK:
            self._blocks.append(self._crc)
        written = 0
        while written < len(header):
            written += os.pwrite(self._fd, header[written:], written)
        os.fsync(self._fd)
        self.close()
        return FileRecord(self._data_start + self._position, self._data_start, zlib.crc32(header), self._blocks)

    def close(self) -> None:
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


class TensorReader:
    """Reads parts of the tensors of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.tensors = self._read_header()
        except Exception:
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
        self._read_into(byte_view(out) if count else memoryview(b""), stored.start + first * size)
        return out

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


def check_blocks(path: Path, record: FileRecord, blocks: range) -> list[str]:
    """What is wrong with some blocks of a file; block 0 goes with the header."""
    problems = []
    buffer = memoryview(bytearray(BLOCK))
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.bytes:
                return [f"{path.name} has {size:,} bytes, expected {record.bytes:,}"]
            for block in blocks:
                if block == 0 and zlib.crc32(file.read(record.data_start)) != record.header_crc32:
                    problems.append(f"{path.name}: its header is damaged")
                start = record.data_start + block * BLOCK
                length = min(BLOCK, record.bytes - start)
                if length <= 0:
                    continue
                file.seek(start)
                got = 0
                while got < length:
                    count = file.readinto(buffer[got:length])
                    if not count:
                        break
                    got += count
                if zlib.crc32(buffer[:got]) != record.blocks[block]:
                    problems.append(f"{path.name}: bytes {start:,} to {start + length:,} are damaged")
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    return problems


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
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)
