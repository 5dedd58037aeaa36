"""Ranks as threads of one process: the real engine on several ranks without a launcher, for tests and small demos."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import Topology
from wherry.tiers.tickets import DONE, Ticket

T = TypeVar("T")


class _Meeting:
    """Where the threads of one group meet: each leaves a value, and all read them once everybody has arrived."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout)

    def exchange(self, rank: int, value: Any, use: Callable[[list[Any]], T]) -> T:
        self.values[rank] = value
        self.barrier.wait()
        result = use(self.values)
        self.barrier.wait()  # nobody overwrites a value that another rank is still reading
        return result


class ThreadComm(Comm):
    """One rank of a group of threads. Sums run in rank order, so every operation gives the same bits."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def _agree(self, operation: str, value: Any, use: Callable[[list[Any]], T]) -> T:
        """Meet, and check that every rank has come for the same operation."""

        def checked(arrivals: list[tuple[str, Any]]) -> T:
            operations = [name for name, _ in arrivals]
            assert len(set(operations)) == 1, f"ranks disagree about the next collective: {operations}"
            return use([item for _, item in arrivals])

        return self._meeting.exchange(self.rank, (operation, value), checked)

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        combine = torch.add if op == "sum" else torch.maximum

        def use(values: list[torch.Tensor]) -> torch.Tensor:
            total = values[0].clone()
            for other in values[1:]:
                total = combine(total, other)
            return total

        tensor.copy_(self._agree(f"all_reduce {tuple(tensor.shape)}", tensor, use))
        return DONE

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        start = self.rank * shard.numel()

        def use(values: list[torch.Tensor]) -> torch.Tensor:
            total = values[0][start : start + shard.numel()].clone()
            for other in values[1:]:
                total += other[start : start + shard.numel()]
            return total

        shard.copy_(self._agree(f"reduce_scatter {whole.numel()}", whole, use))
        return DONE

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        whole.copy_(self._agree(f"all_gather {whole.numel()}", shard, torch.cat))
        return DONE

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        tensor.copy_(self._agree(f"broadcast {tensor.numel()}", tensor, lambda values: values[source].clone()))
        return DONE

    def _gather_objects(self, value: Any) -> list[Any]:
        return self._agree("gather_objects", value, list)

    def _barrier(self) -> None:
        self._agree("barrier", None, len)


def run_ranks(size: int, body: Callable[[Comm], T], *, timeout: float = 60.0) -> list[T]:
    """Run `body(comm)` on `size` ranks, each a thread, and return their results in rank order.

    The first error of any rank is raised; the other ranks are released from whatever they wait for.
    """
    meeting = _Meeting(size, timeout)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        try:
            # On a GPU autograd runs all backwards in one thread of its own, where ranks that wait for each other
            # would wait for ever: each rank's thread runs its own.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = body(ThreadComm(rank, meeting))
        except BaseException as error:
            errors.append((rank, error))
            meeting.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = next((e for _, e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0][1])
        raise first
    return results


def run_grid(
    body: Callable[[Topology], T], *, data: int = 1, tensor: int = 1, pipe: int = 1, timeout: float = 60.0
) -> list[T]:
    """As `run_ranks`, for ranks along several mesh axes; the tensor axis runs fastest, then the data axis."""
    sizes = {"tensor": tensor, "data": data, "pipe": pipe}
    meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
    lock = threading.Lock()

    def place(world: Comm) -> T:
        rest, at = world.rank, {}
        for axis, size in sizes.items():
            rest, at[axis] = divmod(rest, size)

        def along(axis: str) -> Comm:
            if sizes[axis] == 1:
                return SoloComm()
            others = tuple(at[other] for other in sizes if other != axis)
            with lock:
                meeting = meetings.setdefault((axis, others), _Meeting(sizes[axis], timeout))
            return ThreadComm(at[axis], meeting)

        cpu = torch.device("cpu")
        axes = {axis: along(axis) for axis in sizes}
        try:
            return body(Topology(axes["data"], cpu, world.rank, 0, world.size, axes["tensor"], axes["pipe"]))
        except BaseException:
            with lock:
                for meeting in meetings.values():
                    meeting.barrier.abort()
            raise

    return run_ranks(data * tensor * pipe, place, timeout=timeout)
