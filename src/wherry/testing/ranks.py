"""Ranks as threads of one process: the real engine on several ranks without a launcher, for tests and small demos."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from wherry.errors import DivergenceError, PeerError
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.peers import Asked, describe
from wherry.parallel.topology import Topology
from wherry.tickets import DONE, Ticket

T = TypeVar("T")


class _Round:
    """One collective: what each rank has brought, and how many have taken the result."""

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        self.values: dict[int, Any] = {}
        self.left = 0


class _Rendezvous:
    """Where the threads of one group meet: each leaves a value, and all read them once everybody has arrived."""

    def __init__(self, members: list[int], timeout: float, whole: _Rendezvous | None = None) -> None:
        self.size = len(members)
        self.timeout = timeout
        # The ranks as errors name them: in the whole group.
        self.members = members
        self.whole = whole or self
        self.changed = threading.Condition()
        self._round = _Round()
        # How often each rank has failed; and with what, as long as it has not gone on.
        self._counts = [0] * self.size
        self._failed: dict[int, str] = {}
        # Of the whole group: the ranks whose program has failed, and with what. They come to no meeting any more.
        self.ended: dict[int, str] = {}
        self._parts: dict[tuple[str, tuple[int, ...]], _Rendezvous] = {}

    def exchange(self, rank: int, asked: Asked, value: Any, use: Callable[[list[Any]], T]) -> T:
        with self.changed:
            here = self._round
            here.asked[rank], here.values[rank] = asked, value
            self._compare(here, rank)
            if len(here.values) == self.size:
                self._round = _Round()
                self.changed.notify_all()
            else:
                self._wait(here, rank, lambda: len(here.values) == self.size)
        try:
            return use([here.values[member] for member in range(self.size)])
        finally:
            with self.changed:
                here.left += 1
                if here.left == self.size:
                    # A rank that goes on finds nobody else holding what it brought.
                    here.values.clear()
                    self.changed.notify_all()
                else:
                    # Nobody overwrites a value that another rank is still reading.
                    self._wait(here, rank, lambda: here.left == self.size)

    def _compare(self, here: _Round, rank: int) -> None:
        """Whether this rank has come for what the others have come for."""
        mine = here.asked[rank]
        for other, theirs in here.asked.items():
            if mine[1:] != theirs[1:]:
                del here.asked[rank], here.values[rank]
                first, second = sorted([(self.members[rank], mine), (self.members[other], theirs)])
                raise DivergenceError(
                    f"the ranks disagree about their next collective: rank {first[0]} wants {describe(first[1])} and "
                    f"rank {second[0]} {describe(second[1])}; every rank must run the same units and steps"
                )

    def _wait(self, here: _Round, rank: int, arrived: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout
        while not arrived():
            for other, message in self._lost(rank) if self._failed or self.whole.ended else ():
                if other not in here.values:
                    mine = here.asked.pop(rank)
                    del here.values[rank]
                    raise PeerError(
                        f"rank {self.members[other]} has failed, while rank {self.members[rank]} waited for "
                        f"{describe(mine)}: {message}"
                    )
            left = deadline - time.monotonic()
            if left <= 0:
                late = [str(self.members[other]) for other in range(self.size) if other not in here.values]
                raise PeerError(
                    f"rank {self.members[rank]} has waited {self.timeout:.0f} s for {describe(here.asked[rank])}: "
                    f"{'ranks' if len(late) > 1 else 'rank'} {', '.join(late) or 'none'} did not arrive"
                )
            self.changed.wait(left)

    def _lost(self, rank: int) -> Iterator[tuple[int, str]]:
        """The ranks that will not come, as far as this one can tell, and what they have failed with."""
        for other, name in enumerate(self.members):
            if name in self.whole.ended:
                yield other, self.whole.ended[name]
        for other, message in self._failed.items():
            # What this rank has met as well, every rank has met: the other goes on, as this one has.
            if self._counts[other] > self._counts[rank]:
                yield other, message

    def end(self, rank: int, message: str) -> None:
        """The rank's program has failed: it comes to nothing any more, nor to meetings that others have yet to make."""
        self.whole.ended[self.members[rank]] = message
        for meeting, _ in self._everywhere(rank):
            with meeting.changed:
                meeting.changed.notify_all()

    def fail(self, rank: int, message: str) -> None:
        """Told in every meeting that the rank takes part in."""
        for meeting, place in self._everywhere(rank):
            with meeting.changed:
                meeting._counts[place] += 1
                meeting._failed[place] = message
                meeting.changed.notify_all()

    def go_on(self, rank: int) -> None:
        """Take back, everywhere, what the rank has told."""
        if rank in self._failed:
            for meeting, place in self._everywhere(rank):
                with meeting.changed:
                    meeting._failed.pop(place, None)

    def _everywhere(self, rank: int) -> list[tuple[_Rendezvous, int]]:
        """The meetings that a rank takes part in, and its place in each."""
        name = self.members[rank]
        with self.whole.changed:
            meetings = [self.whole, *self.whole._parts.values()]
        return [(meeting, meeting.members.index(name)) for meeting in meetings if name in meeting.members]

    def part(self, axis: str, members: list[int]) -> _Rendezvous:
        """The meeting of some of the ranks; whoever asks first makes it."""
        names = [self.members[member] for member in members]
        with self.whole.changed:
            return self.whole._parts.setdefault((axis, tuple(names)), _Rendezvous(names, self.timeout, self.whole))


def _complete(value: Any) -> None:
    """Nothing is left to streams: those of a GPU on which ranks read and write may know nothing of each other."""
    if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
        torch.accelerator.current_stream(value.device).synchronize()


class ThreadComm(Comm):
    """One rank of a group of threads. Sums run in rank order, so every operation gives the same bits."""

    def __init__(self, rank: int, meeting: _Rendezvous) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def _agree(self, value: Any, use: Callable[[list[Any]], T]) -> T:
        def used(values: list[Any]) -> T:
            result = use(values)
            _complete(value)  # before others overwrite what this rank has read
            return result

        self._meeting.go_on(self.rank)
        _complete(value)
        return self._meeting.exchange(self.rank, self.recent[-1], value, used)

    @staticmethod
    def _take(target: torch.Tensor, result: torch.Tensor) -> Ticket:
        target.copy_(result)
        _complete(target)
        return DONE

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        combine = torch.add if op == "sum" else torch.maximum

        def use(values: list[torch.Tensor]) -> torch.Tensor:
            total = values[0].clone()
            for other in values[1:]:
                total = combine(total, other)
            return total

        return self._take(tensor, self._agree(tensor, use))

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        start = self.rank * shard.numel()

        def use(values: list[torch.Tensor]) -> torch.Tensor:
            total = values[0][start : start + shard.numel()].clone()
            for other in values[1:]:
                total += other[start : start + shard.numel()]
            return total

        return self._take(shard, self._agree(whole, use))

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        return self._take(whole, self._agree(shard, torch.cat))

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Ticket:
        def use(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([value.chunk(self.size)[self.rank] for value in values])

        return self._take(received, self._agree(sent, use))

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        def use(values: list[torch.Tensor]) -> None:
            if self.rank != source:
                tensor.copy_(values[source])

        self._agree(tensor, use)
        return DONE

    def _gather_objects(self, value: Any) -> list[Any]:
        self.recent.append((self.asked, "gather_objects", 0, ""))
        self.asked += 1
        return self._agree(value, list)

    def _meet(self, what: str) -> None:
        self._meeting.go_on(self.rank)
        self._meeting.exchange(self.rank, (self.asked, what, 0, ""), None, len)

    def _group(self, axis: str, members: list[int]) -> Comm:
        return ThreadComm(members.index(self.rank), self._meeting.part(axis, members))

    def fail(self, message: str) -> None:
        self._meeting.fail(self.rank, message)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without garbage collections that begin by themselves.

    torch makes the tensor of a generator's state while it holds the generator's mutex. A collection that begins there
    and frees a tensor lets go of the interpreter's lock; another rank that asks for the state then holds that lock and
    waits for the mutex, for ever.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def run_ranks(size: int, body: Callable[[Comm], T], *, timeout: float = 60.0) -> list[T]:
    """Run `body(comm)` on `size` ranks, each a thread, and return their results in rank order.

    The first error of any rank is raised; the other ranks are released from whatever they wait for.
    """
    meeting = _Rendezvous(list(range(size)), timeout)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            # On a GPU autograd runs all backwards in one thread of its own, where ranks that wait for each other
            # would wait for ever: each rank's thread runs its own.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = body(ThreadComm(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.end(rank, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}") for rank in range(size)]
    with _no_collections() if size > 1 else nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return results


def run_grid(
    body: Callable[[Topology], T], *, data: int = 1, tensor: int = 1, pipe: int = 1, timeout: float = 60.0
) -> list[T]:
    """`run_ranks` for ranks along several mesh axes; the tensor axis runs fastest, then the data axis."""
    grid = torch.arange(data * tensor * pipe).view(pipe, data, tensor)

    def place(world: Comm) -> T:
        at = tuple(int(index) for index in (grid == world.rank).nonzero()[0])

        def along(dim: int) -> Comm:
            line = [slice(None) if other == dim else index for other, index in enumerate(at)]
            members = grid[tuple(line)].tolist()
            return SoloComm() if len(members) == 1 else world._group(f"dim {dim}", members)

        cpu = torch.device("cpu")
        return body(Topology(along(1), cpu, world.rank, 0, world.size, along(2), along(0)))

    return run_ranks(data * tensor * pipe, place, timeout=timeout)
