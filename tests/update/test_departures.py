"""New weights on their way: what has begun comes to its end, also where the rest could not begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wherry.parallel.comm import Comm
from wherry.parallel.merged import Merging
from wherry.tiers.tickets import Ticket
from wherry.update.departures import Departures


class Noted(Ticket):
    waits = 0

    def wait(self) -> None:
        self.waits += 1


class Breaking(Comm):
    """Two ranks, and memory for a single gather."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.begun: list[Noted] = []

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        if self.begun:
            raise MemoryError("no room for a second gather")
        self.begun.append(Noted())
        return self.begun[0]


@dataclass(eq=False)
class Updates:
    states: list[Any] = field(default_factory=list)


def departures(comm: Comm) -> tuple[Departures, Any]:
    wholes = [torch.zeros(8) for _ in range(2)]
    flats = [
        SimpleNamespace(
            name=f"flat {i}", whole=whole, shard_memory=whole[:4], resident=True, layout=SimpleNamespace(ranks=2)
        )
        for i, whole in enumerate(wholes)
    ]
    batch: Any = Updates([SimpleNamespace(flat=flat, updated=True) for flat in flats])
    found = Departures(comm, Merging(0))
    found.pack([batch])
    return found, batch


def test_a_gather_that_cannot_begin_leaves_none_unwaited() -> None:
    comm = Breaking()
    found, batch = departures(comm)
    with pytest.raises(MemoryError, match="second gather"):
        found.set_out(batch)
    found.arrive_quietly()
    assert [ticket.waits for ticket in comm.begun] == [1]


def test_nor_where_a_thread_begins_them() -> None:
    comm = Breaking()
    found, batch = departures(comm)
    found.beside = comm
    starter: Any = SimpleNamespace(stopped=None, add=lambda begin: begin())
    comm.starter = starter
    job: Any = Ticket()
    found.promise(batch, job)
    departure = found.promised[batch]
    with pytest.raises(MemoryError, match="second gather"):
        departure.wait()
    assert starter.stopped is not None
    found.close()
    assert [ticket.waits for ticket in comm.begun] == [1]
