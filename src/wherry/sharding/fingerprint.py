"""Whether all ranks have the same bits, without sending them: each makes a fingerprint, and these are compared.

Of the fingerprints and their complements the ranks take the maximum, byte by byte, which is one small collective for
any number of ranks: the greatest is the least one as well where all are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint8

import torch

from wherry.native import checksum
from wherry.parallel.comm import Comm

# Of a fingerprint.
BYTES = 8
_BITS = (1 << 8 * BYTES) - 1
# Words of 32 bits in a row, and rows that are multiplied at a time: 16 MiB, and products of 32.
_COLUMNS, _ROWS = 1 << 14, 1 << 8
# Multipliers of SplitMix64, as signed numbers.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def fingerprint(memory: torch.Tensor) -> int:
    """64 bits that tell contiguous bytes (uint8, one dim) from others of that length, made where the bytes are.

    The host's differs from the device's: of ranks that keep a tensor in different places they are never the same.
    """
    if memory.device.type == "cpu":
        # numpy's array of it would keep its storage from ever being resized.
        return checksum.fingerprint(memoryview((c_uint8 * memory.numel()).from_address(memory.data_ptr())))
    return on_device(memory)


def same_everywhere(values: torch.Tensor, comm: Comm) -> bool:
    """Whether all ranks have the same bits in a contiguous tensor. Every rank must ask."""
    claim = claims([fingerprint(values.view(-1).view(torch.uint8))]).to(values.device)
    comm.all_reduce(claim, "max").wait()
    return all(alike(claim.to("cpu")))


def claims(fingerprints: Sequence[int]) -> torch.Tensor:
    """What a rank brings to the maximum."""
    numbers = [number for value in fingerprints for number in (value, value ^ _BITS)]
    said = [byte for number in numbers for byte in number.to_bytes(BYTES, "little")]
    return torch.tensor(said, dtype=torch.uint8)


def alike(greatest: torch.Tensor) -> list[bool]:
    """Which fingerprints were the same on all ranks, from the maximum of their claims."""
    values, complements = greatest.view(greatest.numel() // (2 * BYTES), 2, BYTES).unbind(1)
    found: list[bool] = (values == ~complements).all(1).tolist()
    return found


def on_device(memory: torch.Tensor) -> int:
    """The fingerprint by operations of torch's, on any device, in pieces: all are integers, in whatever order they add.

    Each word is multiplied by an odd number of 64 bits that belongs to its place in its row, and the products are added
    modulo 2^64. One differing word is always noticed; several are missed by such a sum, whatever they are, for one in
    2^32 choices of the numbers, or fewer. So there are two sums by different numbers. Those of the rows are scrambled
    with their places and added.
    """
    device, nbytes = memory.device, memory.numel()
    width = 4 * _COLUMNS
    rows = -(-nbytes // width)
    factors = (_scrambled(_steps(2 * _COLUMNS, device)) | 1).view(2, _COLUMNS)
    sums = torch.empty(2, rows, dtype=torch.int64, device=device)
    for begin in range(0, rows, _ROWS):
        end = min(begin + _ROWS, rows)
        piece = memory[begin * width : end * width]
        # A word begins at a multiple of its size, and a row is full.
        if piece.numel() < (end - begin) * width or piece.storage_offset() % 4:
            full = torch.zeros((end - begin) * width, dtype=torch.uint8, device=device)
            full[: piece.numel()] = piece
            piece = full
        words = piece.view(torch.int32).view(-1, _COLUMNS)
        for total, factor in zip(sums.unbind(), factors.unbind(), strict=True):
            total[begin:end] = (words * factor).sum(1)
    return int(_scrambled(sums.view(-1) + _steps(2 * rows, device)).sum()) & _BITS


def _steps(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _STEP


def _scrambled(values: torch.Tensor) -> torch.Tensor:
    """SplitMix64's function of each: any change of one changes half of its bits."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch repeats the sign."""
    return (values >> bits) & ((1 << 64 - bits) - 1)
