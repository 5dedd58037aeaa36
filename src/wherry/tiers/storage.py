"""Where a piece of state rests outside the device, and how it comes to host memory and goes back."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from wherry.tickets import DONE, OnHost, Ticket, TicketGroup

if TYPE_CHECKING:
    import torch

    from wherry.tiers.buffers import HostPool
    from wherry.tiers.disk import DiskRecord, DiskStore


class Storage(Protocol):
    """A piece of state. `fetch` begins to bring it to host memory; `memory` is it there, from the ticket's end on.

    Every `fetch` is followed by one `release`, which says that `memory` is not used any more once `after` is complete,
    or that it was not read (`failed`). `store` writes what is in `memory` to where the state rests.
    """

    on_disk: bool

    @property
    def in_memory(self) -> int:
        """Bytes of memory that it takes at the moment."""

    def blank(self) -> torch.Tensor:
        """Memory for what is about to be stored for the first time, all of it zero; as a `fetch` that reads nothing."""

    def fetch(self) -> Ticket: ...

    @property
    def memory(self) -> torch.Tensor: ...

    def store(self) -> Ticket: ...

    def release(self, after: Ticket = DONE, *, failed: bool = False) -> None: ...

    def readers(self) -> Ticket:
        """Complete when no copy reads the memory any more, so that it may change."""

    def close(self) -> None: ...


class MemoryStorage:
    """State that rests in memory, of the host or the device: it is always there, and begins as zeros."""

    on_disk = False

    def __init__(self, memory: torch.Tensor, give: Callable[[torch.Tensor], None] | None = None) -> None:
        self._memory: torch.Tensor | None = memory
        self._give = give
        # Copies up are made in order: the last one is the last to read.
        self._after: Ticket = DONE

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory

    @property
    def in_memory(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def blank(self) -> torch.Tensor:
        return self.memory

    def fetch(self) -> Ticket:
        return DONE

    def store(self) -> Ticket:
        return DONE

    def release(self, after: Ticket = DONE, *, failed: bool = False) -> None:
        if after is not DONE:
            self._after = after

    def readers(self) -> Ticket:
        after, self._after = self._after, DONE
        return after if after is DONE else OnHost(after)

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if self._give is not None and memory is not None:
            self._give(memory)


class DiskCache:
    """What state on disk shares: the store, buffers, and those of the state last used, kept while there is room.

    `keep` is how many bytes of host memory there may be beside one piece in use: of what is read ahead of its use, and
    of what was used and is kept. The former goes first.
    """

    def __init__(self, store: DiskStore, pool: HostPool) -> None:
        self.store = store
        self.keep = 0
        # Bytes of all buffers, and of the largest piece there is.
        self.held = 0
        self.largest = 0
        # One lock for all storages: fetching one may drop the buffer of another.
        self.lock = threading.RLock()
        self._pool = pool
        # Those that nobody uses, the one used longest ago first, and their bytes.
        self._idle: OrderedDict[DiskStorage, None] = OrderedDict()
        self._idle_bytes = 0
        store.attach(pool)

    def allow(self, nbytes: int) -> None:
        """At least so many bytes may be kept."""
        self.keep = max(self.keep, nbytes)

    def reserve(self, name: str, nbytes: int) -> DiskRecord:
        self.largest = max(self.largest, nbytes)
        return self.store.reserve(name, nbytes)

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer, in the place of what was used longest ago if there are as many as there may be."""
        while self._idle and self.held + nbytes > self.keep + self.largest:
            self._drop_oldest()
        buffer = self._pool.take(nbytes)
        self.held += nbytes
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        self.held -= buffer.nbytes
        self._pool.give(buffer)

    def use(self, storage: DiskStorage) -> None:
        """Somebody uses it, for whom its buffer stays."""
        if self._idle.pop(storage, 0) is None:
            self._idle_bytes -= storage.nbytes

    def leave(self, storage: DiskStorage, *, failed: bool) -> None:
        """Nobody uses it any more: its buffer is kept, if there is room."""
        while self._idle and self._idle_bytes + storage.nbytes > self.keep:
            self._drop_oldest()
        if failed or storage.nbytes > self.keep:
            storage.drop()
        else:
            self._idle[storage] = None
            self._idle_bytes += storage.nbytes

    def _drop_oldest(self) -> None:
        storage, _ = self._idle.popitem(last=False)
        self._idle_bytes -= storage.nbytes
        storage.drop()


class DiskStorage:
    """State that rests in a record on disk, and in host memory only while it is used, and a little longer."""

    on_disk = True

    def __init__(self, cache: DiskCache, name: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cache = cache
        self._record = cache.reserve(name, nbytes)
        self._users = 0
        self._buffer: torch.Tensor | None = None
        self._reading: Ticket = DONE
        self._writing: Ticket = DONE
        self._after: list[Ticket] = []

    @property
    def memory(self) -> torch.Tensor:
        assert self._buffer is not None, self._record.name
        return self._buffer

    @property
    def in_memory(self) -> int:
        return 0 if self._buffer is None else self.nbytes

    def blank(self) -> torch.Tensor:
        with self._cache.lock:
            assert self._buffer is None and not self._users, self._record.name
            self._users = 1
            self._buffer = self._cache.take(self.nbytes).zero_()
            return self._buffer

    def fetch(self) -> Ticket:
        with self._cache.lock:
            self._cache.use(self)
            if self._buffer is None:
                self._writing.wait()
                buffer = self._cache.take(self.nbytes)
                try:
                    self._reading = self._cache.store.read(self._record, buffer)
                except BaseException:
                    self._cache.give(buffer)
                    raise
                self._buffer = buffer
            self._users += 1
            return self._reading

    def store(self) -> Ticket:
        with self._cache.lock:
            self._writing.wait()  # of an earlier version, from the same memory
            self._writing = self._cache.store.write(self._record, self.memory)
            return self._writing

    def readers(self) -> Ticket:
        with self._cache.lock:
            after, self._after = self._after, []
            return OnHost(TicketGroup(after)) if after else DONE

    def release(self, after: Ticket = DONE, *, failed: bool = False) -> None:
        with self._cache.lock:
            assert self._users > 0, self._record.name
            self._users -= 1
            if after is not DONE:
                self._after = [*(ticket for ticket in self._after if not ticket.done()), after]
            if not self._users:
                self._cache.leave(self, failed=failed)

    def drop(self) -> None:
        """Give the memory back, once nothing reads or writes it any more."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        for ticket in (*self._after, self._reading, self._writing):
            # Errors are raised where these tickets are waited for; here they only have to be over.
            with suppress(Exception):
                ticket.finish()
        self._after.clear()
        self._reading = DONE
        self._cache.give(buffer)

    def close(self) -> None:
        with self._cache.lock:
            self._cache.use(self)
            if self._buffer is not None:
                self.drop()


@contextmanager
def opened(storage: Storage, *, write: bool) -> Iterator[torch.Tensor]:
    """The state in host memory, complete; with `write`, what was changed is stored again at the end."""
    ticket = storage.fetch()
    try:
        ticket.wait()
        if write:
            storage.readers().wait()
        yield storage.memory
        if write:
            storage.store().wait()
    finally:
        storage.release()
