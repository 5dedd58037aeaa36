"""Buffers taken and given back, on the host and on the device: after the first step of a run nothing is allocated."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.errors import WherryError
from wherry.fake import faking
from wherry.observe.log import logger
from wherry.observe.memory import format_bytes

if TYPE_CHECKING:
    import torch

PAGE = 4096
HUGE_PAGE = 2 << 20
_DEVICE_GRAIN = 512  # what CUDA's allocator rounds to

Watcher = Callable[[int, int], None]


class PoolError(WherryError):
    """A buffer was asked for that cannot be had."""


class PinError(PoolError):
    """Host memory that is there could not be pinned."""


@dataclass(slots=True)
class PoolCounters:
    """Bytes that a pool has allocated and lent. `misses` are the takes that had to allocate."""

    allocated: int = 0
    in_use: int = 0
    peak_in_use: int = 0
    misses: int = 0


class Pinning:
    """How a host pool has its memory kept in place; the base class registers none of it."""

    name = "pageable"
    cost = "pageable: copies between them and the device are staged and block the host"

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes from a page on, all zero."""
        return _map(nbytes, shared_with_forks=False)

    def pin(self, address: int, nbytes: int) -> None:
        return None

    def unpin(self, address: int, nbytes: int) -> None:
        return None


class FallbackPinning(Pinning):
    """Several ways of pinning, each for when the ones before it have failed, and then pageable memory.

    A way that has failed once is not tried again. A buffer is unpinned the way it was pinned.
    """

    def __init__(self, *ways: Pinning) -> None:
        self._ways = [*ways, Pinning()]
        self._pinned_by: dict[int, Pinning] = {}
        self.name = self._ways[0].name

    def allocate(self, nbytes: int) -> torch.Tensor:
        while True:
            try:
                return self._allocate(self._ways[0], nbytes)
            except PinError as error:
                failed, way = self._ways.pop(0), self._ways[0]
                self.name = way.name
                logger.warning(
                    "pinning a host buffer of %s by %s failed (%s); this buffer and later ones of its pool are "
                    "%s. Raise the limits on pinned memory (`ulimit -l unlimited`; those of a virtual machine or "
                    'container), place less in host memory, or set "pin_memory": false',
                    format_bytes(nbytes), failed.name, error, way.cost,
                )  # fmt: skip

    def _allocate(self, way: Pinning, nbytes: int) -> torch.Tensor:
        buffer = way.allocate(nbytes)
        way.pin(buffer.data_ptr(), nbytes)
        self._pinned_by[buffer.data_ptr()] = way
        return buffer

    def unpin(self, address: int, nbytes: int) -> None:
        self._pinned_by.pop(address).unpin(address, nbytes)


class _BufferPool:
    """The bookkeeping that both pools share: idle buffers by size, and lent ones by their storage."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, torch.Tensor] = {}
        self._counts = PoolCounters()
        self._closed = False

    @property
    def counters(self) -> PoolCounters:
        with self._lock:
            return replace(self._counts)

    def give(self, tensor: torch.Tensor) -> None:
        """Take a buffer back. Nothing may still read or write it: other streams, the disk and copies included."""
        with self._lock:
            buffer = self._lent.pop(tensor.untyped_storage()._cdata, None)
            assert buffer is not None, "a buffer is given back once, and to its own pool"
            self._counts.in_use -= buffer.nbytes
            if self._closed:
                self._drop(buffer)
            else:
                self._idle[buffer.nbytes].append(buffer)

    def buffers(self) -> list[torch.Tensor]:
        """All that there are, lent or not."""
        with self._lock:
            return [*self._lent.values(), *(buffer for idle in self._idle.values() for buffer in idle)]

    def trim(self) -> None:
        """Free the buffers that nobody has taken."""
        with self._lock:
            for buffers in self._idle.values():
                while buffers:
                    self._drop(buffers.pop())

    def close(self) -> None:
        """Free everything. A buffer that is still lent is freed when it is given back."""
        with self._lock:
            self._closed = True
            self.trim()

    def _take(self, size: int) -> torch.Tensor:
        with self._lock:
            assert not self._closed, "the buffer pool is closed"
            counts, idle = self._counts, self._idle[size]
            if idle:
                buffer = idle.pop()
            else:
                buffer = self._allocate(size)
                counts.misses += 1
                counts.allocated += size
            self._lent[buffer.untyped_storage()._cdata] = buffer
            counts.in_use += size
            counts.peak_in_use = max(counts.peak_in_use, counts.in_use)
            return buffer

    def _drop(self, buffer: torch.Tensor) -> None:
        self._counts.allocated -= buffer.nbytes
        self._free(buffer)

    def _allocate(self, size: int) -> torch.Tensor:
        """A buffer of uint8, with a storage of its own."""
        raise NotImplementedError

    def _free(self, buffer: torch.Tensor) -> None:
        return None


class HostPool(_BufferPool):
    """Host buffers that begin at a page, in size classes; large ones on huge pages where the system allows.

    `pinning` keeps them in place; `poison` fills what is given back with NaN patterns, so that a test sees
    a late reader.

    >>> with HostPool() as pool:
    ...     buffer = pool.take(1000)
    ...     pool.give(buffer)
    ...     pool.counters.allocated
    4096
    """

    def __init__(self, *, pinning: Pinning | None = None, poison: bool = False) -> None:
        super().__init__()
        self._pinning = pinning
        self._poison = poison
        self._watchers: list[tuple[Watcher, Watcher]] = []
        # Memory known to CUDA or the kernel must be let go of before it is unmapped, also when nobody calls close():
        # what is mapped next at the same address would be taken for it.
        self._mapped: dict[int, int] = {}
        self._finalizer = weakref.finalize(self, _let_go_of_all, os.getpid(), pinning, self._watchers, self._mapped)

    @property
    def kind(self) -> str:
        """Return "cudaHostRegister" or "torch", which pin new buffers, or "pageable"."""
        return Pinning.name if self._pinning is None else self._pinning.name

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of `nbytes`, its contents undefined."""
        assert nbytes > 0, nbytes
        return self._take(_host_class(nbytes))[:nbytes]

    def take_zeros(self, nbytes: int) -> torch.Tensor:
        """As `take`, all zero. A new buffer takes memory only where somebody writes."""
        with self._lock:
            misses = self._counts.misses
            buffer = self.take(nbytes)
            return buffer if self._counts.misses > misses else buffer.zero_()

    def give(self, tensor: torch.Tensor) -> None:
        if self._poison:
            with self._lock:
                self._lent[tensor.untyped_storage()._cdata].fill_(0xFF)
        super().give(tensor)

    def watch(self, mapped: Watcher, unmapped: Watcher) -> Callable[[], None]:
        """Call `mapped(address, nbytes)` for all memory the pool has and will have, and `unmapped` before it goes.

        Returns what ends the watch.
        """
        pair = (mapped, unmapped)
        with self._lock:
            self._watchers.append(pair)
            for address, size in self._mapped.items():
                mapped(address, size)

        def end() -> None:
            with self._lock:
                if pair in self._watchers:
                    self._watchers.remove(pair)

        return end

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allocate(self, size: int) -> torch.Tensor:
        buffer = _map(size) if self._pinning is None else self._pinning.allocate(size)
        address = buffer.data_ptr()
        if self._pinning is not None:
            self._pinning.pin(address, size)
        self._mapped[address] = size
        for mapped, _ in self._watchers:
            mapped(address, size)
        return buffer

    def _free(self, buffer: torch.Tensor) -> None:
        address = buffer.data_ptr()
        _let_go(self._pinning, self._watchers, address, self._mapped.pop(address))


class DevicePool(_BufferPool):
    """Buffers on a device, for the engine's temporary flats.

    A buffer given back may be lent again at once: whoever gives it has made other streams wait for its last use.

    >>> pool = DevicePool("cpu")
    >>> flat = pool.take(1024, torch.bfloat16)
    >>> pool.give(flat)
    """

    def __init__(self, device: torch.device | str) -> None:
        import torch

        super().__init__()
        self.device = torch.device(device)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of `numel` elements, its contents undefined."""
        assert numel > 0, numel
        nbytes = numel * dtype.itemsize
        size = -(-nbytes // _DEVICE_GRAIN) * _DEVICE_GRAIN
        return self._take(size)[:nbytes].view(dtype)

    def _allocate(self, size: int) -> torch.Tensor:
        import torch

        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=self.device)


def host_copy(source: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory. A large one lies on huge pages, which takes half the time of a new one from the
    heap: that is touched page by page."""
    import torch

    if source.nbytes < HUGE_PAGE:
        return source.detach().to("cpu", copy=True).contiguous()
    with HostPool() as pool, torch.no_grad():
        # It is nobody's but the tensor's, with which it goes.
        return pool.take(source.nbytes).view(source.dtype).view(source.shape).copy_(source)


def untouched_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on any device; many of them on the host take memory only where somebody writes."""
    import torch

    nbytes = numel * dtype.itemsize
    if device.type == "cpu" and nbytes >= HUGE_PAGE and not faking():
        return _map(nbytes).view(dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


# Memory that was mapped and is still there, and how much of each is anybody's.
_areas: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()


def untouched() -> int:
    """Bytes that are promised in this process and that the system still counts as free: nobody has written there."""
    asks = getattr(ctypes.CDLL(None), "mincore", None) if sys.platform == "linux" else None
    if asks is None:
        return 0
    asks.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    left = 0
    for area, nbytes in list(_areas.items()):
        resident = ctypes.create_string_buffer(-(-len(area) // PAGE))
        if asks(ctypes.addressof(ctypes.c_char.from_buffer(area)), len(area), resident) == 0:
            left += max(0, nbytes - PAGE * (len(resident) - resident.raw.count(0)))
    return left


def _map(nbytes: int, *, shared_with_forks: bool = True) -> torch.Tensor:
    """New memory from the system, which is all zero, from a page on; a huge one where it has as much.

    A device copies from and to the pages that were there when they were pinned. A fork that has them as well makes the
    system copy all of them for it, or gives this process others where it writes next: it is not to have them.
    """
    import torch

    huge = nbytes >= HUGE_PAGE
    grain = HUGE_PAGE if huge else PAGE
    try:
        # Mapped with room to begin at a huge page; room that is never touched takes no memory.
        area = mmap.mmap(-1, nbytes + (grain if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PoolError(
            f"a host buffer of {nbytes} bytes could not be had: {error.strerror}; place less in host memory, or raise "
            "the process's limits (`ulimit -v`, `ulimit -d`)"
        ) from error
    _areas[area] = nbytes
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % grain
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        advise_huge(area, skip, nbytes)
    if not shared_with_forks and hasattr(mmap, "MADV_DONTFORK"):
        area.madvise(mmap.MADV_DONTFORK, skip, nbytes)
    with torch.inference_mode(False):  # who uses it next may not be in an evaluation
        return torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=skip)


# mbind by number, which no C library has without libnuma; and its mode of taking pages from all nodes in turn.
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE = 3


def spread(memory: torch.Tensor, nodes: Collection[int]) -> bool:
    """Let new memory come from these NUMA nodes in turn, whoever touches it first. False where the system cannot."""
    number = _MBIND.get(platform.machine()) if sys.platform == "linux" else None
    if number is None or not nodes:
        return False
    start = -(-memory.data_ptr() // PAGE) * PAGE
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    length = memory.data_ptr() + memory.nbytes - start
    asked = (ctypes.c_long(number), ctypes.c_void_p(start), ctypes.c_ulong(length), ctypes.c_int(_INTERLEAVE))
    limit = ctypes.c_ulong(64 * len(words) + 1)
    return ctypes.CDLL(None).syscall(*asked, ctypes.byref(words), limit, ctypes.c_uint(0)) == 0


def _host_class(nbytes: int) -> int:
    """Whole pages, then 64 KiB, then huge pages: units of one shape share buffers, and an eighth is wasted at most."""
    grain = PAGE if nbytes <= 64 << 10 else 64 << 10 if nbytes < 8 * HUGE_PAGE else HUGE_PAGE
    return -(-nbytes // grain) * grain


def advise_huge(area: mmap.mmap, start: int, size: int) -> None:
    try:
        area.madvise(mmap.MADV_HUGEPAGE, start, size)
    except OSError as error:
        # A kernel without transparent huge pages answers EINVAL: then there are none to be had.
        if error.errno != errno.EINVAL:
            raise


def _let_go(pinning: Pinning | None, watchers: list[tuple[Watcher, Watcher]], address: int, size: int) -> None:
    for _, unmapped in watchers:
        unmapped(address, size)
    if pinning is not None:
        pinning.unpin(address, size)


def _let_go_of_all(
    owner: int, pinning: Pinning | None, watchers: list[tuple[Watcher, Watcher]], mapped: dict[int, int]
) -> None:
    # A forked child has a copy of the memory, but not of what CUDA and the kernel know about it.
    while mapped and os.getpid() == owner:
        _let_go(pinning, watchers, *mapped.popitem())
