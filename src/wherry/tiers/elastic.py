"""Memory of a tensor that goes and comes again while the tensor stays, and all views of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from functools import cache

import torch

from wherry.fake import faking
from wherry.tiers.buffers import HUGE_PAGE, PAGE, advise_huge

# After so many bytes that were let go of, the heap gives back what it has.
TRIMMED = 1 << 23


class Heap:
    """Gives memory that was let go of back to the system, now and then.

    glibc keeps what lies between small objects, and finds no use for it: torch asks for aligned memory, for which a
    hole of the same size is too small by the alignment.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def freed(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes >= TRIMMED:
            self._bytes = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
            if trim is not None:
                trim(0)


class Elastic:
    """A tensor whose storage shrinks to nothing and grows again. It begins all zeros; what it grows to is undefined.

    torch reads a view of an empty storage at address 0, which ends the process. So on the host of Linux, where it is
    `mapped`, its addresses stay, and what somebody has kept a view of reads as NaN.

    >>> elastic = Elastic(1000, torch.float32, torch.device("cpu"))
    >>> elastic.shrink()
    >>> elastic.nbytes
    0
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, mapped: bool = True) -> None:
        self._full = self.nbytes = numel * dtype.itemsize
        self._mapping: Mapping | None = None
        if mapped and device.type == "cpu" and numel and not faking() and _system() is not None:
            self._mapping = Mapping(self._full)
            with torch.inference_mode(False):
                self.tensor = torch.frombuffer(self._mapping.memory, dtype=dtype, count=numel)
        else:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)

    def grow(self) -> None:
        if self._mapping is None:
            self.tensor.untyped_storage().resize_(self._full)
        elif not self.nbytes:
            self._mapping.fill()
        self.nbytes = self._full

    def shrink(self) -> None:
        """Nothing may still write to it, and who reads it knows no value of it."""
        if self._mapping is None:
            self.tensor.untyped_storage().resize_(0)
        elif self.nbytes:
            self._mapping.show_nan()
        self.nbytes = 0


class Mapping:
    """Memory at addresses that stay: filled, it is private to the process; else it shows NaN, again and again."""

    def __init__(self, nbytes: int) -> None:
        size = -(-nbytes // PAGE) * PAGE
        # With room to begin at a huge page: a gather writes to new ones in half the time.
        room = HUGE_PAGE if size >= HUGE_PAGE else 0
        self._area = mmap.mmap(-1, size + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        self._skip = -begin % HUGE_PAGE if room else 0
        self.memory = (ctypes.c_char * size).from_buffer(self._area, self._skip)
        self._address = begin + self._skip
        # What is left of the room would count against the process's limit on memory of its own.
        for address, left in ((begin, self._skip), (self._address + size, room - self._skip)):
            if left:
                self._map(address, left, mmap.MAP_SHARED, _nan_file(HUGE_PAGE))
        self._use_huge_pages()

    def fill(self) -> None:
        try:
            self._map(self._address, len(self.memory), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except MemoryError:
            self.show_nan()  # the system may have let go of what was there before it found that it has no more
            raise
        self._use_huge_pages()

    def show_nan(self) -> None:
        # The system counts mappings: at most 64 of them for a tensor.
        size = max(HUGE_PAGE, -(-len(self.memory) // (64 * PAGE)) * PAGE)
        file, end = _nan_file(size), self._address + len(self.memory)
        for address in range(self._address, end, size):
            # Shared, as private memory would count as the process's own.
            self._map(address, min(size, end - address), mmap.MAP_SHARED, file)

    def _use_huge_pages(self) -> None:
        if len(self.memory) >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            advise_huge(self._area, self._skip, len(self.memory))

    @staticmethod
    def _map(address: int, nbytes: int, flags: int, file: int = -1) -> None:
        system = _system()
        assert system is not None
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if system.mmap(address, nbytes, access, flags | _AT_THIS_ADDRESS, file, 0) != address:
            number = ctypes.get_errno()
            raise MemoryError(f"no memory is left to gather weights in: mmap of {nbytes} bytes: {os.strerror(number)}")


_AT_THIS_ADDRESS = 0x10  # MAP_FIXED, which `mmap` does not have


@cache
def _system() -> ctypes.CDLL | None:
    """The C library, where mappings are as Linux has them."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mmap.restype = ctypes.c_void_p
    return library


_nan_files: dict[int, int] = {}
_one_at_a_time = threading.Lock()


def _nan_file(size: int) -> int:
    """A file in memory whose bytes are all ones, NaN in every floating type: one of each size for the process.

    A stray write to what shows NaN changes it for all that show it.
    """
    with _one_at_a_time:
        if size not in _nan_files:
            file = os.memfd_create("wherry-nan", os.MFD_CLOEXEC)
            with open(file, "wb", closefd=False) as writing:
                writing.write(b"\xff" * size)
            _nan_files[size] = file
        return _nan_files[size]
