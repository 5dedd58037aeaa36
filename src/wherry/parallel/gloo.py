"""Collectives on the CPU that copy nothing twice.

gloo's own all-gather goes through a copy of the whole, in memory that its threads then keep, and its reduce-scatter is
an all-reduce of a copy. Of other operations of gloo's they are made without: a gather is a broadcast of every part,
where it belongs, and a reduce-scatter an exchange of parts and their sum, in rank order. A small sum of two ranks is an
exchange as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wherry.parallel.sizes import EXCHANGED, SWAPPED, SWAPPED_FROM

# A gather among so many ranks at most, of so many bytes at least, is made of broadcasts.
FEW, LARGE = 4, 1 << 20


class Works:
    """Several operations of torch's as one, and what is made of what they have brought, once, by whoever waits."""

    def __init__(self, works: Sequence[Any], then: Callable[[], object] | None = None) -> None:
        self._works = works
        self._then = then

    def wait(self, timeout: timedelta | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if until is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
        then, self._then = self._then, None
        if then is not None:
            then()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def ended_well(self) -> bool:
        return all(map(ended_well, self._works))


def ended_well(work: Any) -> bool:
    """Whether a work has ended, and without an error: torch's own question for it is deprecated, and says so aloud."""
    if isinstance(work, Works):
        return work.ended_well()
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


def all_gather(whole: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Begin to bring every rank's part of `whole`, which each has in its place, to the others."""
    return Works([_broadcast(part, rank, group) for rank, part in enumerate(whole.view(group.size(), -1).unbind())])


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = source
    return group.broadcast([tensor], options)


def swaps(tensor: torch.Tensor, ranks: int) -> bool:
    """Whether a sum over so many ranks is an exchange of the whole tensor."""
    return ranks == 2 and SWAPPED_FROM <= tensor.nbytes <= SWAPPED


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Begin to bring what the other of two ranks has; the sum is there after the wait.

    gloo's own goes to and fro in steps, in each of which either rank waits for a turn of the other's thread.
    """
    received = torch.empty_like(tensor)
    return Works([_swap(received, tensor, group)], lambda: tensor.add_(received))


def _swap(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to send the other of two ranks a tensor, and to receive one like it: the rank itself is sent nothing."""
    sizes = [sent.numel() * (rank != group.rank()) for rank in range(2)]
    return group.alltoall_base(received.view(-1), sent.view(-1), sizes, sizes)


def buffers(whole: torch.Tensor) -> bool:
    """Whether a reduce-scatter of it is an exchange."""
    return whole.nbytes <= EXCHANGED


def reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> Works:
    """Begin to bring what every rank has of this rank's part; the sum is there after the wait."""
    parts = whole.view(group.size(), shard.numel())
    mine = parts[group.rank()]
    if not buffers(whole):
        return Works([group.allreduce([whole])], lambda: _unless_same(shard, mine))
    received = room_for(whole, group.size())
    if group.size() == 2:
        theirs = parts[1 - group.rank()]
        return Works([_swap(received, theirs, group)], lambda: torch.add(mine, received, out=shard.view(-1)))

    def add_up() -> None:
        first, second, *others = received.view(group.size(), shard.numel()).unbind()
        torch.add(first, second, out=shard)
        for other in others:
            shard.add_(other)

    return Works([group.alltoall_base(received, whole, [], [])], add_up)


def room_for(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """What an exchange receives: of two ranks the other's part alone, of more this rank's own among them."""
    return whole.new_empty(whole.numel() // 2 if ranks == 2 else whole.numel())


def _unless_same(shard: torch.Tensor, part: torch.Tensor) -> None:
    if shard.data_ptr() != part.data_ptr():
        shard.copy_(part)
