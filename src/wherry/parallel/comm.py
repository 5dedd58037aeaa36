"""Every collective of the project. A `Comm` is one group of ranks along one mesh axis.

Replacing the object replaces the cluster: `SoloComm` is one rank, `ProcessGroupComm` is torch.distributed, and
`threads.ThreadComm` runs ranks as threads of one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wherry.fake import address_of
from wherry.tiers.tickets import DONE, CallbackTicket, Ticket

# Newer releases of torch have these under other names, and warn about the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Traffic:
    """What a rank has asked of a `Comm`: calls, and bytes of the whole (unsharded) tensor, by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, operation: str, nbytes: int) -> None:
        self.calls[operation] += 1
        self.bytes[operation] += nbytes

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()

    def volume(self) -> int:
        """Bytes a rank sends in the limit of many ranks: an all-reduce moves its tensor twice, the others once."""
        return sum(count * (2 if name == "all_reduce" else 1) for name, count in self.bytes.items())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Comm:
    """One group of ranks. The public methods count; the underscored ones, which a subclass provides, communicate."""

    rank: int
    size: int

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Ticket:
        """Reduce `tensor` in place over the ranks; `op` is "sum" or "max"."""
        if self.size == 1:
            return DONE
        self.traffic.add("all_reduce", _nbytes(tensor))
        return self._all_reduce(tensor, op)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        """Sum `whole` over the ranks; this rank's 1/N of the sum goes to `shard`, which may be a part of `whole`."""
        assert shard.numel() * self.size == whole.numel(), (shard.numel(), self.size, whole.numel())
        if self.size == 1:
            _copy_unless_same(shard, whole)
            return DONE
        self.traffic.add("reduce_scatter", _nbytes(whole))
        return self._reduce_scatter(shard, whole)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        """Lay the ranks' shards end to end in `whole`; `shard` may be this rank's part of `whole`."""
        assert shard.numel() * self.size == whole.numel(), (shard.numel(), self.size, whole.numel())
        if self.size == 1:
            _copy_unless_same(whole, shard)
            return DONE
        self.traffic.add("all_gather", _nbytes(whole))
        return self._all_gather(whole, shard)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Ticket:
        if self.size == 1:
            return DONE
        self.traffic.add("broadcast", _nbytes(tensor))
        return self._broadcast(tensor, source)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank. For set-up and diagnosis, not for the hot path."""
        return [value] if self.size == 1 else self._gather_objects(value)

    def barrier(self) -> None:
        if self.size > 1:
            self._barrier()

    def close(self) -> None:
        """Give back what this object itself made."""

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no all_reduce")

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no reduce_scatter")

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no all_gather")

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no broadcast")

    def _gather_objects(self, value: Any) -> list[Any]:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no gather_objects")

    def _barrier(self) -> None:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no barrier")


def _copy_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
    if address_of(target) != address_of(source):
        target.copy_(source)


class SoloComm(Comm):
    """A group of one: nothing is ever sent."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)


class _DefaultGroup:
    """torch's default group is the process's: where Wherry started it, the last of its users ends it."""

    def __init__(self) -> None:
        self.users = 0
        self.started_here = False

    def start(self, device_type: str, timeout: timedelta | None = None) -> None:
        """Start torch.distributed from the environment that a launcher has set."""
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=timeout)
        self.started_here = True

    def join(self) -> bool:
        self.users += self.started_here
        return self.started_here

    def leave(self) -> None:
        self.users -= 1
        if self.users == 0 and dist.is_initialized():
            self.started_here = False
            dist.destroy_process_group()


_default_group = _DefaultGroup()
start_default_group = _default_group.start


class ProcessGroupComm(Comm):
    """A torch.distributed process group. On CUDA a ticket's `wait()` orders streams and does not stop the host."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self._shares_default_group = group is None and _default_group.join()

    def _ticket(self, launch: Callable[[], Any], *tensors: torch.Tensor) -> Ticket:
        work = launch()

        # The tensors stay alive until the wait: a backend may still be reading them.
        def wait(_tensors: tuple[torch.Tensor, ...] = tensors) -> None:
            work.wait()

        return CallbackTicket(wait, work.is_completed)

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self._ticket(lambda: dist.all_reduce(tensor, reduce_op, group=self.group, async_op=True), tensor)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        return self._ticket(
            lambda: _reduce_scatter_single(shard, whole, group=self.group, async_op=True), shard, whole
        )

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        return self._ticket(
            lambda: _all_gather_single(whole, shard, group=self.group, async_op=True), whole, shard
        )

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        return self._ticket(lambda: dist.broadcast(tensor, group=self.group, group_src=source, async_op=True), tensor)

    def _gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _barrier(self) -> None:
        dist.barrier(self.group)

    def close(self) -> None:
        if self._shares_default_group:
            self._shares_default_group = False
            _default_group.leave()


