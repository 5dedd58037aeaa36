"""Memory of a tensor that goes and comes again while the tensor stays, and all views of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import weakref
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch

from wherry.fake import faking
from wherry.tiers.buffers import HUGE_PAGE, PAGE

# As Linux has them.
_NO_ACCESS, _ACCESS = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAY_MOVE, _FIXED, _STAYS_MAPPED = 1, 2, 4
_AT_ITS_PLACE, _NOT_COUNTED = 0x10, 0x4000
_EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


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
    memory of the same size. Here pages move from area to area, and are not cleared anew. An area that has given its
    pages away reads as NaN, so that a view of it that somebody has kept is loud, and no end of the process.
    """

    def __init__(self) -> None:
        # By size: areas that keep pages for whoever grows next, and those that have none.
        self._idle: defaultdict[int, list[Area]] = defaultdict(list)
        self._empty: defaultdict[int, list[Area]] = defaultdict(list)
        self._keeps = not _counts_what_is_mapped()
        self._nan: NaN | None = None

    def elastic(self, numel: int, dtype: torch.dtype, device: torch.device) -> Elastic:
        """Mapped if it is on the host; else as torch allocates it."""
        system = _system()
        if system is None or device.type != "cpu" or not numel or faking():
            return Elastic(numel, dtype, device)
        return Mapped(numel, dtype, self, Area(-(-numel * dtype.itemsize // PAGE) * PAGE, system))

    def put(self, area: Area) -> None:
        # A 64th of the area at least, as the system counts mappings.
        size = min(area.span, max(HUGE_PAGE, -(-area.span // (64 * PAGE)) * PAGE))
        if self._nan is None or self._nan.size < size:
            self._nan = NaN(size)
        if self._keeps:
            empty = self._empty[area.span]
            keeper = empty.pop() if empty else Area(area.span, area.system)
            (self._idle if keeper.take(area) else self._empty)[area.span].append(keeper)
        area.show(self._nan)

    def take(self, area: Area) -> None:
        idle = self._idle[area.span]
        if idle:
            keeper = idle.pop()
            moved = area.take(keeper)
            keeper.clear()
            self._empty[area.span].append(keeper)
            if moved:
                return
        self._make_room(area.span)
        area.fill()

    def _make_room(self, nbytes: int) -> None:
        """New memory takes the place of what lies idle in other sizes: no more is held than was in use at once."""
        for span, idle in self._idle.items():
            while idle and nbytes > 0:
                idle[0].clear()
                self._empty[span].append(idle.pop(0))
                nbytes -= span

    def trim(self) -> None:
        self._make_room(sys.maxsize)


class Mapped(Elastic):
    """Memory of a mapping of its own, on huge pages where there are any. Once it has shrunk it reads as NaN."""

    def __init__(self, numel: int, dtype: torch.dtype, frames: Frames, area: Area) -> None:
        self._frames = frames
        self._area = area
        self._nbytes = numel * dtype.itemsize
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(area.memory, dtype=dtype, count=numel)
        self._grown = False
        self.grow()
        self.tensor.zero_()

    def grow(self) -> None:
        if not self._grown:
            self._frames.take(self._area)
            self._grown = True

    def shrink(self) -> None:
        if self._grown:
            self._grown = False
            self._frames.put(self._area)

    @property
    def nbytes(self) -> int:
        return self._nbytes if self._grown else 0

    def trim(self) -> None:
        self._frames.trim()


class Area:
    """Addresses that stay, as long as `memory` does. At first nothing is there."""

    def __init__(self, span: int, system: ctypes.CDLL) -> None:
        self.span = span
        self.system = system
        # With room to begin at a huge page. That room is for nobody, and so in no limit on memory.
        room = span + (HUGE_PAGE if span >= HUGE_PAGE else 0)
        start = system.mmap(None, room, _NO_ACCESS, _EMPTY | _NOT_COUNTED, -1, 0)
        if start == ctypes.c_void_p(-1).value:
            _fail()
        self.address = start + (-start % HUGE_PAGE if span >= HUGE_PAGE else 0)
        self.memory = (ctypes.c_char * span).from_address(self.address)
        weakref.finalize(self.memory, system.munmap, start, room).atexit = False

    def take(self, other: Area) -> bool:
        """What is there comes here, if the system can move pages (Linux from 5.7 on); else there is nothing here."""
        flags = _MAY_MOVE | _FIXED | _STAYS_MAPPED
        moved = self.system.mremap(other.address, self.span, self.span, flags, self.address) == self.address
        if not moved:
            self.clear()  # the system may have let go of the mapping before it found that it could not
        return moved

    def clear(self) -> None:
        self._map(_NO_ACCESS, _EMPTY | _NOT_COUNTED)

    def fill(self) -> None:
        try:
            self._map(_ACCESS, _EMPTY)
        except BaseException:
            self.clear()
            raise
        if self.span >= HUGE_PAGE:
            # Where there are no huge pages, that changes nothing.
            self.system.madvise(self.address, self.span, mmap.MADV_HUGEPAGE)

    def show(self, nan: NaN) -> None:
        """Shared, as what is private counts as memory of the process: a stray write is seen by other stray reads."""
        for where in range(self.address, self.address + self.span, nan.size):
            size = min(nan.size, self.address + self.span - where)
            # Of nothing that is moved the system makes another mapping of the same shared memory.
            if self.system.mremap(nan.address, 0, size, _MAY_MOVE | _FIXED, where) != where:
                _fail()

    def _map(self, access: int, flags: int) -> None:
        if self.system.mmap(self.address, self.span, access, flags | _AT_ITS_PLACE, -1, 0) != self.address:
            _fail()


class NaN:
    """Shared memory whose bytes are all ones: NaN in every floating type. A larger area shows it many times."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size)
        self._memory.write(b"\xff" * size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


@cache
def _system() -> ctypes.CDLL | None:
    """The C library, where mappings are as Linux has them."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    library.mremap.argtypes, library.mremap.restype = [address, size, size, number, address], address
    library.madvise.argtypes, library.munmap.argtypes = [address, size, number], [address, size]
    return library


@cache
def _counts_what_is_mapped() -> bool:
    """Whether the system allows no more to be mapped than there is: then what lies idle would count as used twice."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:  # it does not say
        return False


def _fail() -> NoReturn:
    number = ctypes.get_errno()
    if number == errno.ENOMEM:
        raise MemoryError("no memory is left to gather weights in")
    raise OSError(number, "memory to gather weights in could not be mapped")
