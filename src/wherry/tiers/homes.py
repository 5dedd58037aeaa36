"""Homes: where a piece of state rests outside the device, and how it comes to host memory and goes back."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from wherry.fake import is_fake
from wherry.tiers import budget
from wherry.tiers.tickets import DONE, OnHost, Ticket, TicketGroup

if TYPE_CHECKING:
    import torch

    from wherry.tiers.buffers import HostPool
    from wherry.tiers.disk import DiskStore, Record


class Home(Protocol):
    """A piece of state. `fetch` begins to bring it to host memory; `memory` is it there, from the ticket's end on.

    Every `fetch` is followed by one `leave`, which says that `memory` is not used any more once `after` is complete, or
    that it was not read (`failed`).
    `store` sends what is in `memory` home.
    """

    on_disk: bool

    @property
    def in_memory(self) -> int:
        """Bytes of memory that it takes at the moment."""

    @property
    def stays(self) -> bool:
        """Whether it is still in host memory when it is wanted again."""

    def blank(self, *, zeros: bool = False) -> torch.Tensor:
        """Memory for what is about to be stored for the first time, all of it zero or undefined; as a `fetch` that
        reads nothing."""

    def fetch(self) -> Ticket: ...

    @property
    def memory(self) -> torch.Tensor: ...

    def store(self) -> Ticket: ...

    def leave(self, after: Ticket = DONE, *, failed: bool = False) -> None: ...

    def quiet(self) -> Ticket:
        """Complete when nothing reads the memory any more, so that it may change."""

    def close(self) -> None: ...


class MemoryHome:
    """State that rests in memory, of the host or the device: it is always there.

    `zeros` says that it is new and all zero; `lazy`, of how many bytes it takes none of the machine's memory before its
    first use.
    """

    on_disk = False

    def __init__(
        self,
        memory: torch.Tensor,
        give: Callable[[torch.Tensor], None] | None = None,
        *,
        zeros: bool = False,
        lazy: int = 0,
    ) -> None:
        self._memory: torch.Tensor | None = memory
        self._give = give
        self._zeros = zeros
        self._lazy = lazy > 0 and not is_fake(memory)
        if self._lazy:
            budget.promise(self, lazy)
        # Copies up are made in order: the last one is the last to read.
        self._after: Ticket = DONE

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory

    @property
    def in_memory(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def stays(self) -> bool:
        return True

    def blank(self, *, zeros: bool = False) -> torch.Tensor:
        return self.memory.zero_() if zeros and not self._zeros else self.memory

    def fetch(self) -> Ticket:
        if self._lazy:
            self._keep_promise()
        return DONE

    def _keep_promise(self) -> None:
        self._lazy = False
        budget.keep(self)

    def store(self) -> Ticket:
        return DONE

    def leave(self, after: Ticket = DONE, *, failed: bool = False) -> None:
        if after is not DONE:
            self._after = after

    def quiet(self) -> Ticket:
        after, self._after = self._after, DONE
        return after if after is DONE else OnHost(after)

    def close(self) -> None:
        self._keep_promise()
        memory, self._memory = self._memory, None
        if self._give is not None and memory is not None:
            self._give(memory)


class Shelf:
    """What state on disk shares: the store, buffers, and those of the state last used, kept while there is room.

    `keep` is how many bytes of host memory there may be beside one piece in use: of what is read ahead of its use, and
    of what was used and is kept. The former goes first.
    """

    def __init__(self, store: DiskStore, pool: HostPool, keep: int = 0) -> None:
        self.store = store
        self.pool = pool
        self.keep = keep
        # Bytes of all buffers; of those that nobody uses; and of the largest piece there is.
        self.held = 0
        self.kept = 0
        self.largest = 0
        # And of all pieces, wherever they are.
        self.all = 0
        # One lock for all homes on a shelf: fetching one may let go of another.
        self.lock = threading.RLock()
        self.idle: OrderedDict[DiskHome, None] = OrderedDict()
        store.attach(pool)

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer, in the place of what was used longest ago if there are as many as there may be."""
        while self.idle and self.held + nbytes > self.keep + self.largest:
            self._drop_oldest()
        buffer = self.pool.take(nbytes)
        self.held += nbytes
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        self.held -= buffer.nbytes
        self.pool.give(buffer)

    def shrink(self, room: int = 0) -> None:
        """Let go of what was used longest ago, until what is kept and `room` more are within the budget."""
        while self.idle and self.kept + room > self.keep:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        home, _ = self.idle.popitem(last=False)
        self.kept -= home.nbytes
        home.let_go()


class DiskHome:
    """State that rests in a record on disk, and in host memory only while it is used, and a little longer."""

    on_disk = True

    def __init__(self, shelf: Shelf, name: str, nbytes: int) -> None:
        self.shelf = shelf
        self.nbytes = nbytes
        self.record: Record = shelf.store.reserve(name, nbytes)
        shelf.largest = max(shelf.largest, nbytes)
        shelf.all += nbytes
        self._users = 0
        self._buffer: torch.Tensor | None = None
        self._reading: Ticket = DONE
        self._writing: Ticket = DONE
        self._after: list[Ticket] = []

    @property
    def memory(self) -> torch.Tensor:
        assert self._buffer is not None, self.record.name
        return self._buffer

    @property
    def in_memory(self) -> int:
        return 0 if self._buffer is None else self.nbytes

    @property
    def stays(self) -> bool:
        return self.shelf.all <= self.shelf.keep

    def blank(self, *, zeros: bool = False) -> torch.Tensor:
        with self.shelf.lock:
            assert self._buffer is None and not self._users, self.record.name
            self._users = 1
            self._buffer = self.shelf.take(self.nbytes)
            return self._buffer.zero_() if zeros else self._buffer

    def fetch(self) -> Ticket:
        with self.shelf.lock:
            if self.shelf.idle.pop(self, 0) is None:
                self.shelf.kept -= self.nbytes
            if self._buffer is None:
                self._writing.wait()
                buffer = self.shelf.take(self.nbytes)
                try:
                    self._reading = self.shelf.store.read(self.record, buffer)
                except BaseException:
                    self.shelf.give(buffer)
                    raise
                self._buffer = buffer
            self._users += 1
            return self._reading

    def store(self) -> Ticket:
        with self.shelf.lock:
            self._writing.wait()  # of an earlier version, from the same memory
            self._writing = self.shelf.store.write(self.record, self.memory)
            return self._writing

    def quiet(self) -> Ticket:
        with self.shelf.lock:
            after, self._after = self._after, []
            return OnHost(TicketGroup(after)) if after else DONE

    def leave(self, after: Ticket = DONE, *, failed: bool = False) -> None:
        with self.shelf.lock:
            assert self._users > 0, self.record.name
            self._users -= 1
            if after is not DONE:
                self._after = [*(ticket for ticket in self._after if not ticket.done()), after]
            if self._users:
                return
            self.shelf.shrink(self.nbytes)
            if failed:
                self.let_go()
            elif self.nbytes <= self.shelf.keep:
                self.shelf.idle[self] = None
                self.shelf.kept += self.nbytes
            else:
                self.let_go()

    def let_go(self) -> None:
        """Give the memory back, once nothing reads or writes it any more."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        for ticket in (*self._after, self._reading, self._writing):
            # Errors are raised where these tickets are waited for; here they only have to be over.
            with suppress(Exception):
                ticket.finish()
        self._after.clear()
        self._reading = DONE
        self.shelf.give(buffer)

    def close(self) -> None:
        with self.shelf.lock:
            if self.shelf.idle.pop(self, 0) is None:
                self.shelf.kept -= self.nbytes
            if self._buffer is not None:
                self.let_go()


@contextmanager
def opened(home: Home, *, write: bool) -> Iterator[torch.Tensor]:
    """The state in host memory, complete; with `write`, what was changed is home again at the end."""
    ticket = home.fetch()
    try:
        ticket.wait()
        if write:
            home.quiet().wait()
        yield home.memory
        if write:
            home.store().wait()
    finally:
        home.leave()
