"""A device apart from the host, on a machine that has none: its copies, reads, writes and collectives all happen late.

They happen in random order, from and to poisoned memory. What a wait was forgotten for is then wrong or NaN, at once
and everywhere, which on a GPU it would be once a week.

    run_ranks(2, lambda comm: train(wherry.initialize(model=..., mesh=topology(comm, Chaos(seed=comm.rank)), ...)))
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.tickets import DONE, Ticket
from wherry.tiers.buffers import HostPool
from wherry.tiers.disk import DiskStore
from wherry.tiers.streams import Link


class Late(Ticket):
    """Something that happens at its wait, or at a moment of the chaos's choice, as when somebody asks for it."""

    def __init__(self, chaos: Chaos, act: Callable[[], None]) -> None:
        self._chaos = chaos
        self._act: Callable[[], None] | None = act

    def happen(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()

    def wait(self) -> None:
        with self._chaos.lock:
            self._chaos.stir(but=self)
            self.happen()

    def done(self) -> bool:
        with self._chaos.lock:
            if self._chaos.random.random() < 0.1:
                self.happen()
        return self._act is None


class Chaos:
    """Where everything late is kept, and now and then something of it happens."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.pending: list[Late] = []

    def later(self, act: Callable[[], None]) -> Late:
        with self.lock:
            late = Late(self, act)
            self.pending.append(late)
            self.stir(but=late)
            return late

    def copy_later(self, target: torch.Tensor, source: torch.Tensor) -> Late:
        """`target` is poison until it has become what `source` is then. Autograd notices neither."""
        with torch.autograd._unsafe_preserve_version_counter(target):
            poison(target)

        def copy() -> None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
                target.copy_(source)

        return self.later(copy)

    def stir(self, but: Late) -> None:
        self.pending = [late for late in self.pending if late._act is not None]
        others = [late for late in self.pending if late is not but]
        self.random.shuffle(others)
        for late in others:
            if self.random.random() < 0.3:
                late.happen()

    def all_happen(self) -> None:
        with self.lock:
            while self.pending:
                self.pending.pop(self.random.randrange(len(self.pending))).happen()


def poison(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, in every floating-point type


class ChaosLink(Link):
    """A device apart from the host, on a machine that has none."""

    shared = False

    def __init__(self, chaos: Chaos, *, free: int | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.chaos = chaos
        self.free = free
        self.bytes_up = 0
        self.bytes_down = 0

    def _make_pool(self, pin: bool) -> HostPool:
        return HostPool(poison=True)

    def up(
        self, target: torch.Tensor, source: torch.Tensor, *, fence: Ticket | None = None, after: Ticket = DONE
    ) -> Ticket:
        assert target.dtype == source.dtype, "a copy between device and host does not cast"
        self.bytes_up += source.nbytes
        after.wait()
        return self.chaos.copy_later(target, source)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        assert target.dtype == source.dtype, "a copy between device and host does not cast"
        self.bytes_down += source.nbytes
        return self.chaos.copy_later(target, source)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        self.chaos.all_happen()  # as a stream does things in order
        yield

    def free_bytes(self) -> int | None:
        return self.free


def late_link(device: torch.device, *, pin: bool = True) -> ChaosLink:
    """In the place of `link_to`."""
    return ChaosLink(Chaos(0))


class ChaosStore(DiskStore):
    """A disk whose reads and writes are late."""

    chaos: Chaos

    def write(self, record: Any, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        return self.chaos.later(lambda: super(ChaosStore, self).write(record, buffer, offset, nbytes).wait())

    def read(self, record: Any, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        poison(buffer)
        return self.chaos.later(lambda: super(ChaosStore, self).read(record, buffer, offset, nbytes).wait())

    def close(self) -> None:
        self.chaos.all_happen()
        super().close()


class ChaosComm(Comm):
    """Collectives meet when they are called, as threads must, and show their results late."""

    def __init__(self, inner: Comm, chaos: Chaos) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner = inner
        inner.recent = self.recent  # what the ranks compare when they meet
        self.chaos = chaos

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        result = tensor.clone()
        self.inner._all_reduce(result, op).wait()
        return self.chaos.copy_later(tensor, result)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        result = torch.empty_like(shard)
        self.inner._reduce_scatter(result, whole.clone()).wait()
        return self.chaos.copy_later(shard, result)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        result = torch.empty_like(whole)
        self.inner._all_gather(result, shard.clone()).wait()
        return self.chaos.copy_later(whole, result)

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Ticket:
        result = torch.empty_like(received)
        self.inner._all_to_all(result, sent.clone()).wait()
        return self.chaos.copy_later(received, result)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        result = tensor.clone()
        self.inner._broadcast(result, source).wait()
        # What is sent is there all the while.
        return self.chaos.copy_later(tensor, result) if self.rank != source else self.chaos.later(lambda: None)

    def _group(self, axis: str, members: list[int]) -> Comm:
        return ChaosComm(self.inner._group(axis, members), self.chaos)

    def _gather_objects(self, value: Any) -> list[Any]:
        return self.inner._gather_objects(value)

    def _ask(self, operation: str, tensor: torch.Tensor, label: str) -> None:
        super()._ask(operation, tensor, label)
        self.inner.recent.append(self.recent[-1])

    def fail(self, message: str) -> None:
        self.inner.fail(message)


def topology(comm: Comm, chaos: Chaos | None = None, *, link: Link | None = None) -> Topology:
    """For a rank that is a thread. With `chaos` its device is apart from the host, and everything is late."""
    if chaos is None:
        return Topology(comm, torch.device("cpu"), comm.rank, comm.rank, comm.size)

    def open_store(*args: Any, **options: Any) -> DiskStore:
        store = ChaosStore(*args, **options)
        store.chaos = chaos
        return store

    chosen = link or ChaosLink(chaos)
    return Topology(
        ChaosComm(comm, chaos),
        torch.device("cpu"),
        comm.rank,
        comm.rank,
        comm.size,
        link=lambda pin: chosen,
        open_store=open_store,
    )
