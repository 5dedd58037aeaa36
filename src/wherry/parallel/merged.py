"""Several small collectives as one: below some size a collective costs its latency, whatever it carries.

The parts go through one buffer, so that each is copied once more than if it travelled alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from wherry.parallel.comm import Comm
from wherry.parallel.sizes import SMALL, TOGETHER
from wherry.tiers.tickets import CallbackTicket, Ticket


class Merging:
    """Decides which tensors travel together: small ones of one dtype that follow each other, up to `limit` elements."""

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, TOGETHER)

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= min(SMALL, self.limit)

    def fits(self, together: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
        if not together:
            return True
        numel = sum(other.numel() for other in together) + tensor.numel()
        return numel <= self.limit and together[0].dtype == tensor.dtype


class Named(Protocol):
    name: str


def name_of(parts: Sequence[Named]) -> str:
    first, last = parts[0].name, parts[-1].name
    return first if first == last else f"{first} to {last}"


def all_gather(comm: Comm, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], label: str) -> Ticket:
    """`Comm.all_gather` of each shard into its whole. Wait before the shards change."""
    if len(wholes) == 1:
        return comm.all_gather(wholes[0], shards[0], label)
    mine = torch.cat([shard.view(-1) for shard in shards])
    everything = mine.new_empty(comm.size * mine.numel())
    ticket = comm.all_gather(everything, mine, label)

    def finish() -> None:
        ticket.wait()
        for whole, column in zip(wholes, _columns(everything, wholes, comm.size), strict=True):
            whole.view(column.shape).copy_(column)

    return CallbackTicket(finish, ticket.done)


def reduce_scatter(comm: Comm, shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], label: str) -> Ticket:
    """`Comm.reduce_scatter` of each whole into its shard."""
    if len(wholes) == 1:
        return comm.reduce_scatter(shards[0], wholes[0], label)
    everything = wholes[0].new_empty(sum(whole.numel() for whole in wholes))
    for whole, column in zip(wholes, _columns(everything, wholes, comm.size), strict=True):
        column.copy_(whole.view(column.shape))
    mine = everything.new_empty(everything.numel() // comm.size)
    ticket = comm.reduce_scatter(mine, everything, label)

    def finish() -> None:
        ticket.wait()
        for shard, part in zip(shards, mine.split([shard.numel() for shard in shards]), strict=True):
            shard.view(-1).copy_(part)

    return CallbackTicket(finish, ticket.done)


def all_reduce(comm: Comm, tensors: Sequence[torch.Tensor], label: str) -> Ticket:
    """`Comm.all_reduce` of each tensor."""
    if len(tensors) == 1:
        return comm.all_reduce(tensors[0], label=label)
    everything = torch.cat([tensor.view(-1) for tensor in tensors])
    ticket = comm.all_reduce(everything, label=label)

    def finish() -> None:
        ticket.wait()
        for tensor, part in zip(tensors, everything.split([t.numel() for t in tensors]), strict=True):
            tensor.view(-1).copy_(part)

    return CallbackTicket(finish, ticket.done)


def _columns(everything: torch.Tensor, wholes: Sequence[torch.Tensor], ranks: int) -> Iterator[torch.Tensor]:
    """Where each whole lies in a buffer that has first what is rank 0's of all of them, then what is rank 1's."""
    table, start = everything.view(ranks, everything.numel() // ranks), 0
    for whole in wholes:
        width = whole.numel() // ranks
        yield table[:, start : start + width]
        start += width
