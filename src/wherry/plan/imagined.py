"""Ranks, host memory, a way to it and a disk that are imagined: the engine's own parts use them, on tensors without
values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from wherry.observe.footprint import Footprint
from wherry.parallel.comm import Comm, exchanges
from wherry.plan.counts import HOST
from wherry.tickets import DONE, CallbackTicket, Ticket
from wherry.tiers.buffers import HostPool
from wherry.tiers.streams import Link


def held(*tensors: torch.Tensor, ticket: Ticket = DONE) -> Ticket:
    """A ticket that keeps tensors alive until it is waited for, as that of a process group does."""

    def wait(_tensors: tuple[torch.Tensor, ...] = tensors) -> None:
        ticket.wait()

    return CallbackTicket(wait, ticket.done)


class FakeComm(Comm):
    """One rank of a group whose other ranks do not exist: everything arrives at once, and means nothing.

    `over_gloo`: what gloo needs for a collective besides its tensors is taken too.
    """

    def __init__(self, rank: int, size: int, *, over_gloo: bool = False) -> None:
        super().__init__(rank, size)
        self._over_gloo = over_gloo

    def read(self, tensor: torch.Tensor) -> list[float]:
        """Zeros: what no rank has a gradient for is what this one has none for."""
        return [0.0] * tensor.numel()

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        return held(tensor)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        received = [torch.empty_like(whole)] if self._over_gloo and exchanges(whole) else []
        return held(shard, whole, *received)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        return held(whole, shard)

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Ticket:
        return held(received, sent)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        return held(tensor)

    def _group(self, axis: str, members: list[int]) -> Comm:
        return FakeComm(members.index(self.rank), len(members), over_gloo=self._over_gloo)

    def _gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size


class FakePool(HostPool):
    """Host buffers without memory, counted as such."""

    def __init__(self, mode: FakeTensorMode, footprint: Footprint) -> None:
        super().__init__()
        self._mode = mode
        self._footprint = footprint

    def _allocate(self, size: int) -> torch.Tensor:
        # Threads that update take buffers too, and modes are a thread's own. To no other mode it is a new tensor.
        with _disable_current_modes(), self._mode:
            buffer = torch.empty(size, dtype=torch.uint8)
        self._footprint.label(HOST, [buffer])
        return buffer

    def _free(self, buffer: torch.Tensor) -> None:
        return None


class FakeLink(Link):
    """Between a device and a host, apart or one: copies are counted, and made of nothing."""

    def __init__(self, host: FakePool, moved: Counter[str], *, shared: bool) -> None:
        self.device = torch.device("cpu")
        self.host = host
        self.shared = shared
        self._moved = moved

    def pool(self, pin: bool) -> HostPool:
        return self.host

    def up(
        self, target: torch.Tensor, source: torch.Tensor, *, fence: Ticket | None = None, after: Ticket = DONE
    ) -> Ticket:
        after.wait()
        self._moved["up"] += target.numel() * target.element_size()
        return DONE

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self._moved["down"] += source.numel() * source.element_size()
        return DONE

    @contextmanager
    def updating(self, fence: Ticket) -> Iterator[None]:
        """What comes down of it is the state that is updated on the device."""
        before = self._moved["down"]
        yield
        self._moved["streamed"] += self._moved["down"] - before


class FakeStore:
    """A disk that keeps count of what is reserved on it, and of what goes there and comes back."""

    def __init__(self, moved: Counter[str], paths: Any, **_: Any) -> None:
        self.paths = tuple(paths)
        self._moved = moved

    def reserve(self, name: str, nbytes: int) -> FakeRecord:
        self._moved["reserved"] += nbytes
        return FakeRecord(name, nbytes)

    def read(self, record: FakeRecord, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        self._moved["read"] += record.nbytes - offset if nbytes is None else nbytes
        return DONE

    def write(self, record: FakeRecord, buffer: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Ticket:
        self._moved["written"] += record.nbytes - offset if nbytes is None else nbytes
        return DONE

    def attach(self, pool: HostPool) -> None:
        return None

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class FakeRecord:
    name: str
    nbytes: int
