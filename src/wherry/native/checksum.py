"""CRC-32, zlib's to the bit, at several times its speed where the processor has instructions for it; and a fingerprint
of 64 bits, which is made of it there."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable

import numpy as np

from wherry.native.loading import library

# What the library takes: a multiple of this, and no less than that.
_GRAIN, _LEAST = 16, 64
# Bytes that are read twice: the second time they come from the processor's own memory.
_PIECE = 1 << 18


@functools.cache
def _fast() -> Callable[[int, int, int], int] | None:
    built = library()
    if built is None or not built.wherry_has_crc32():
        return None
    return built.wherry_crc32


def crc32(data: bytes | memoryview, crc: int = 0) -> int:
    """The checksum of contiguous bytes, or of more where `crc` is that of those before. Other threads go on meanwhile.

    >>> crc32(b"wherry" * 20) == zlib.crc32(b"wherry" * 20)
    True
    """
    fast = _fast()
    length = len(data) // _GRAIN * _GRAIN
    if fast is None or length < _LEAST:
        return zlib.crc32(data, crc)
    memory = np.frombuffer(data, np.uint8)
    return zlib.crc32(data[length:], fast(crc, memory.ctypes.data, length))


def fingerprint(data: bytes | memoryview) -> int:
    """64 bits that tell contiguous bytes from others of that length. Other threads go on meanwhile.

    Each piece is told by two checksums, whose polynomials have no common factor: together they are one of 64 bits, and
    notice any change within 64 bits in a row. Without the processor's help it is another function: two processes of
    which one has it take the same bytes for different ones.

    >>> fingerprint(b"wherry" * 20) == fingerprint(b"wherry" * 19 + b"sherry")
    False
    """
    digest = hashlib.blake2b(digest_size=8)
    built = library()
    if built is None or _fast() is None:
        digest.update(data)
        return int.from_bytes(digest.digest(), "little")
    other = built.wherry_crc32c
    for begin in range(0, len(data), _PIECE):
        piece = data[begin : begin + _PIECE]
        second = other(np.frombuffer(piece, np.uint8).ctypes.data, len(piece))
        digest.update((crc32(piece) << 32 | second).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")
