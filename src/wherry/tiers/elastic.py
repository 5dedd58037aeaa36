"""Memory of a tensor that goes and comes again while the tensor stays, and all views of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch

from wherry.fake import faking
from wherry.tiers.buffers import HUGE_PAGE, PAGE, advise_huge

# As Linux has them.
_NO_ACCESS = 0
_MAY_MOVE, _FIXED, _STAYS_MAPPED = 1, 2, 4
_AT_ITS_PLACE = 0x10


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
    """Memory as torch allocates it, for any device. It begins with memory, all zeros; what it grows to is undefined.

    >>> elastic = Elastic(1000, torch.float32, torch.device("cpu"))
    >>> elastic.shrink()
    >>> elastic.nbytes
    0
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._nbytes = numel * dtype.itemsize

    def grow(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)

    def shrink(self) -> None:
        """Nothing may still read it, or write to it."""
        self.tensor.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def trim(self) -> None:
        """Keep nothing of what it has shrunk by."""


class Frames:
    """Memory that tensors of one size hand on to each other: what one has shrunk by, another grows by.

    Out of the heap each would take a place of its own: in a hole that aligned memory has left there is no room to align
    memory of the same size. Here pages move from mapping to mapping, and are not cleared anew.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[Mapped]] = defaultdict(list)

    def elastic(self, numel: int, dtype: torch.dtype, device: torch.device) -> Elastic:
        """Mapped if it is large and on the host; else as torch allocates it."""
        system = _system()
        small = numel * dtype.itemsize < HUGE_PAGE
        if system is None or device.type != "cpu" or small or faking() or _counts_what_is_mapped():
            return Elastic(numel, dtype, device)
        return Mapped(numel, dtype, self, system)

    def put(self, mapped: Mapped) -> None:
        self._idle[mapped.span].append(mapped)

    def take(self, wanted: Mapped) -> None:
        idle = self._idle[wanted.span]
        if wanted in idle:
            idle.remove(wanted)
        elif idle:
            idle[-1].move_to(wanted)
            idle.pop()
        else:
            self._make_room(wanted.span)

    def _make_room(self, nbytes: int) -> None:
        """New memory takes the place of what lies idle in other sizes: no more is held than was in use at once."""
        for idle in self._idle.values():
            while idle and nbytes > 0:
                oldest = idle.pop(0)
                oldest.clear()
                nbytes -= oldest.span

    def drop(self, mapped: Mapped) -> None:
        idle = self._idle[mapped.span]
        if mapped in idle:
            idle.remove(mapped)
            mapped.clear()


class Mapped(Elastic):
    """Memory of a mapping of its own, on huge pages where there are any. Once it has shrunk nobody can read it."""

    def __init__(self, numel: int, dtype: torch.dtype, frames: Frames, system: ctypes.CDLL) -> None:
        self._frames = frames
        self._system = system
        self._nbytes = numel * dtype.itemsize
        self.span = -(-self._nbytes // PAGE) * PAGE
        # With room to begin at a huge page.
        area = mmap.mmap(-1, self.span + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        skip = -start % HUGE_PAGE
        self._address = start + skip
        advise_huge(area, skip, self.span)
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(area, dtype=dtype, count=numel, offset=skip)
        # That room is for nobody, and so in no limit on memory.
        _check(system.mprotect(start, self.span + HUGE_PAGE, _NO_ACCESS))
        self._grown = False
        self.grow()
        self.tensor.zero_()

    def grow(self) -> None:
        if not self._grown:
            self._frames.take(self)
            try:
                self._allow(mmap.PROT_READ | mmap.PROT_WRITE)
            except BaseException:
                self._frames.put(self)
                raise
            self._grown = True

    def shrink(self) -> None:
        if self._grown:
            self._allow(_NO_ACCESS)
            self._grown = False
            self._frames.put(self)

    @property
    def nbytes(self) -> int:
        return self._nbytes if self._grown else 0

    def trim(self) -> None:
        self._frames.drop(self)

    def move_to(self, other: Mapped) -> None:
        """Its pages become the other's. Both mappings stay where they are."""
        flags = _MAY_MOVE | _FIXED | _STAYS_MAPPED
        if self._system.mremap(self._address, self.span, self.span, flags, other._address) == other._address:
            return
        if ctypes.get_errno() != errno.EINVAL:
            other._map_again()
        self.clear()  # before Linux 5.7, or where there is no room for both mappings: the other gets new ones

    def _map_again(self) -> None:
        """The system may have let go of the mapping before it found that it could not move pages there."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _AT_ITS_PLACE
        if self._system.mmap(self._address, self.span, _NO_ACCESS, flags, -1, 0) != self._address:
            _raise_last()
        # As it was before; where there are no huge pages, that changes nothing.
        self._system.madvise(self._address, self.span, mmap.MADV_HUGEPAGE)

    def clear(self) -> None:
        _check(self._system.madvise(self._address, self.span, mmap.MADV_DONTNEED))

    def _allow(self, access: int) -> None:
        _check(self._system.mprotect(self._address, self.span, access))


@cache
def _system() -> ctypes.CDLL | None:
    """The C library, where mappings are as Linux has them."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    library.mremap.argtypes, library.mremap.restype = [address, size, size, number, address], address
    library.mprotect.argtypes = library.madvise.argtypes = [address, size, number]
    return library


@cache
def _counts_what_is_mapped() -> bool:
    """Whether the system allows no more to be mapped than there is: then mappings that lie empty count as used."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:  # it does not say
        return False


def _check(code: int) -> None:
    if code:
        _raise_last()


def _raise_last() -> NoReturn:
    number = ctypes.get_errno()
    if number == errno.ENOMEM:
        raise MemoryError("no memory is left to gather weights in")
    raise OSError(number, "memory to gather weights in could not be mapped")
