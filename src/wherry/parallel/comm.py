"""Every collective of the project. A `Comm` is one group of ranks along one mesh axis.

Replacing the object replaces the cluster: `SoloComm` is one rank, `ProcessGroupComm` is torch.distributed, and
`wherry.testing.ThreadComm` runs ranks as threads of one process.
"""

from __future__ import annotations

import atexit
import os
import pickle
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from wherry.errors import DivergenceError, PeerError, WherryError
from wherry.fake import address_of
from wherry.parallel.peers import Asked, Peers
from wherry.tickets import DONE, CallbackTicket, Ticket, TicketGroup

# Newer releases of torch have these under other names, and warn about the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# So many collectives begun are looked through for those that ended without anybody waiting for them.
MANY = 256


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


# Seconds that a backend waits longer than a `Comm`.
GRACE = 60.0
# How many collectives back ranks can tell each other what they have asked for.
REMEMBERED = 64


# Up to so many ranks take part in one another's broadcasts in place of gloo's gather.
FEW = 4
# A reduce-scatter over gloo of up to so many bytes is an exchange.
EXCHANGED = 1 << 24


def exchanges(whole: torch.Tensor) -> bool:
    """Whether gloo's reduce-scatter of so much takes as much again, for what the other ranks send."""
    return whole.nbytes <= EXCHANGED


# A tensor of up to so many elements is small, and at most so many travel together.
SMALL, TOGETHER = 1 << 19, 1 << 22


class Merging:
    """Decides which tensors travel together: small ones of one dtype that follow each other, up to `limit` elements."""

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, TOGETHER)

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= min(SMALL, self.limit)

    def fits(self, together: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
        """Whether it may join those."""
        numel = sum(other.numel() for other in together) + tensor.numel()
        return numel <= self.limit and together[0].dtype == tensor.dtype


class Comm:
    """One group of ranks. The public methods count; the underscored ones, which a subclass provides, communicate.

    `label` says in an error for what a collective was: the unit's name, usually.
    """

    rank: int
    size: int

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        # What this rank has asked for: how many collectives so far, and the last of them.
        self.asked = 0
        self.recent: deque[Asked] = deque(maxlen=REMEMBERED)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", label: str = "") -> Ticket:
        """Reduce `tensor` in place over the ranks; `op` is "sum" or "max"."""
        if self.size == 1:
            return DONE
        self._ask("all_reduce", tensor, label)
        return self._all_reduce(tensor, op)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, label: str = "") -> Ticket:
        """Sum `whole` over the ranks; this rank's 1/N of the sum goes to `shard`, which may be a part of `whole`.

        What `whole` holds afterwards is not said.
        """
        assert shard.numel() * self.size == whole.numel(), (shard.numel(), self.size, whole.numel())
        if self.size == 1:
            _copy_unless_same(shard, whole)
            return DONE
        self._ask("reduce_scatter", whole, label)
        return self._reduce_scatter(shard, whole)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: str = "") -> Ticket:
        """Lay the ranks' shards end to end in `whole`; `shard` may be this rank's part of `whole`."""
        assert shard.numel() * self.size == whole.numel(), (shard.numel(), self.size, whole.numel())
        if self.size == 1:
            _copy_unless_same(whole, shard)
            return DONE
        self._ask("all_gather", whole, label)
        return self._all_gather(whole, shard)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str = "") -> Ticket:
        """Part i of `sent` goes to rank i, and what rank i has for this one becomes part i of `received`."""
        assert received.shape == sent.shape and len(sent) % self.size == 0, (received.shape, sent.shape, self.size)
        if self.size == 1:
            _copy_unless_same(received, sent)
            return DONE
        self._ask("all_to_all", sent, label)
        return self._all_to_all(received, sent)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, label: str = "") -> Ticket:
        if self.size == 1:
            return DONE
        self._ask("broadcast", tensor, label)
        return self._broadcast(tensor, source)

    # Several small collectives as one: below some size a collective costs its latency, whatever it carries. The parts
    # go through one buffer, so that each is copied once more than if it travelled alone.

    def all_reduce_together(self, tensors: Sequence[torch.Tensor], labels: Sequence[str]) -> Ticket:
        """`all_reduce` of each tensor."""
        if len(tensors) == 1:
            return self.all_reduce(tensors[0], label=labels[0])
        everything = torch.cat([tensor.view(-1) for tensor in tensors])
        ticket = self.all_reduce(everything, label=from_to(labels))

        def finish() -> None:
            ticket.wait()
            for tensor, part in zip(tensors, everything.split([t.numel() for t in tensors]), strict=True):
                tensor.view(-1).copy_(part)

        return CallbackTicket(finish, ticket.done)

    def reduce_scatter_together(
        self, shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], labels: Sequence[str]
    ) -> Ticket:
        """`reduce_scatter` of each whole into its shard."""
        if len(wholes) == 1:
            return self.reduce_scatter(shards[0], wholes[0], labels[0])
        everything = wholes[0].new_empty(sum(whole.numel() for whole in wholes))
        for whole, column in zip(wholes, _columns(everything, wholes, self.size), strict=True):
            column.copy_(whole.view(column.shape))
        mine = everything.new_empty(everything.numel() // self.size)
        ticket = self.reduce_scatter(mine, everything, from_to(labels))

        def finish() -> None:
            ticket.wait()
            for shard, part in zip(shards, mine.split([shard.numel() for shard in shards]), strict=True):
                shard.view(-1).copy_(part)

        return CallbackTicket(finish, ticket.done)

    def all_gather_together(
        self, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], labels: Sequence[str]
    ) -> Ticket:
        """`all_gather` of each shard into its whole. Wait before the shards change."""
        if len(wholes) == 1:
            return self.all_gather(wholes[0], shards[0], labels[0])
        mine = torch.cat([shard.view(-1) for shard in shards])
        everything = mine.new_empty(self.size * mine.numel())
        ticket = self.all_gather(everything, mine, from_to(labels))

        def finish() -> None:
            ticket.wait()
            for whole, column in zip(wholes, _columns(everything, wholes, self.size), strict=True):
                whole.view(column.shape).copy_(column)

        return CallbackTicket(finish, ticket.done)

    def _ask(self, operation: str, tensor: torch.Tensor, label: str) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self.traffic.add(operation, nbytes)
        self.recent.append((self.asked, operation, nbytes, label))
        self.asked += 1

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank. For set-up and diagnosis, not for the hot path."""
        return [value] if self.size == 1 else self._gather_objects(value)

    def barrier(self) -> None:
        self.gather_objects(None)

    def meet(self, what: str) -> None:
        """Return once every rank has come to `what`, a call that all of them must make; raise when one does not.

        It is no collective: a rank that has gone on to another one does not take part in this by mistake. It comes
        before the collectives of what is rare, as saving is, and where a program may have left out ranks.
        """
        if self.size == 1:
            return
        try:
            self._meet(what)
        except DivergenceError as error:
            self.tell(error)
            raise

    def check_reaches(self, device: torch.device) -> None:
        """Raise where what is on that device cannot be communicated."""

    def read(self, tensor: torch.Tensor) -> list[float]:
        """The numbers in a small tensor, on the host. Where that waits for collectives, peers are watched."""
        return tensor.tolist()

    def within(self, ranks: int) -> Comm:
        """This rank's group of `ranks` consecutive ranks: one axis of the mesh that the group is cut into."""
        low = self.rank // ranks * ranks
        return self._sub("within", ranks, list(range(low, low + ranks)))

    def across(self, ranks: int) -> Comm:
        """The other axis: the ranks with this one's place in their groups of `ranks`."""
        return self._sub("across", ranks, list(range(self.rank % ranks, self.size, ranks)))

    def _sub(self, axis: str, ranks: int, members: list[int]) -> Comm:
        assert self.size % ranks == 0, (self.size, ranks)
        if len(members) == self.size:
            return self
        return SoloComm() if len(members) == 1 else self._group(axis, members)

    def fail(self, message: str) -> None:
        """Tell the other ranks that this one cannot go on: whoever waits for it raises `message` as a `PeerError`.

        A rank that goes on nevertheless, as after an exception that every rank has met, takes it back by doing so.
        """

    def tell(self, error: BaseException) -> None:
        """`fail` with an error of this rank's own; one that a peer has told is known already."""
        if self.size > 1 and not isinstance(error, PeerError):
            self.fail(f"{type(error).__name__}: {error}".removesuffix(": "))

    def close(self) -> None:
        """Give back what this object itself made."""

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no all_reduce")

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no reduce_scatter")

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no all_gather")

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no all_to_all")

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no broadcast")

    def _group(self, axis: str, members: list[int]) -> Comm:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no groups of some of them")

    def _gather_objects(self, value: Any) -> list[Any]:
        raise AssertionError(f"{type(self).__name__} has {self.size} ranks and no gather_objects")

    def _meet(self, what: str) -> None:
        """Nothing, for ranks that are imagined; what others do tells on them in the collectives that follow."""


def _copy_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
    if address_of(target) != address_of(source):
        target.copy_(source)


def from_to(labels: Sequence[str]) -> str:
    """The label of what travels together."""
    return labels[0] if labels[0] == labels[-1] else f"{labels[0]} to {labels[-1]}"


def _columns(everything: torch.Tensor, wholes: Sequence[torch.Tensor], ranks: int) -> Iterator[torch.Tensor]:
    """Where each whole lies in a buffer that has first what is rank 0's of all of them, then what is rank 1's."""
    table, start = everything.view(ranks, everything.numel() // ranks), 0
    for whole in wholes:
        width = whole.numel() // ranks
        yield table[:, start : start + width]
        start += width


class SoloComm(Comm):
    """A group of one: nothing is ever sent."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)


# What says which ranks meet.
_PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


class _DefaultGroup:
    """torch's default group is the process's: where Wherry started it, the last of its users ends it."""

    def __init__(self) -> None:
        self.users = 0
        self.started_here = False
        self._starts = 0
        # Where ranks find each other: for which environment, the store, this rank, and how many there are.
        self._store: tuple[tuple[int | str | None, ...], dist.Store, int, int] | None = None
        self._ends = False
        self._comms: weakref.WeakSet[ProcessGroupComm] = weakref.WeakSet()
        self._parts: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def start(self, device_type: str, timeout: float | None = None) -> None:
        """Start torch.distributed from the environment that a launcher has set."""
        # The backend gives up later than we do: its error names no rank.
        patience = timedelta(seconds=timeout + GRACE) if timeout else None
        backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{backend_of(device_type)}"
        options: dict[str, Any] = {"timeout": patience} if patience else {}
        where = (os.getpid(), *(os.environ.get(name) for name in _PLACE))
        if self._store is None or self._store[0] != where:
            self._store = where, *next(rendezvous("env://", **options))
        # One store for all groups, one after another: had each its own, a rank might meet that of the group before,
        # which another rank is about to end.
        _, store, rank, ranks = self._store
        store = dist.PrefixStore(f"wherry/{self._starts}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)
        self._starts += 1
        self.started_here = True

    def part(self, ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
        """The group of some ranks of the world, for whoever asks: it lives as long as the world does.

        A second group of the same ranks, made after the first is gone, may get its name, and wait for its addresses.
        """
        known = self._parts.get(ranks)
        if known is None or not _alive(known):
            patience = timedelta(seconds=timeout + GRACE)
            known = dist.new_group(list(ranks), timeout=patience, use_local_synchronization=True)
            self._parts[ranks] = known
        return known

    def join(self) -> bool:
        self.users += self.started_here
        return self.started_here

    def leave(self) -> None:
        self.users -= 1
        if self.users == 0 and dist.is_initialized():
            self.started_here = False
            dist.destroy_process_group()

    def end_with(self, comm: ProcessGroupComm) -> None:
        """The group ends before the interpreter does, if nothing is under way on it.

        Its threads may hold a tensor a moment longer than the wait for its collective; letting go of it once the
        interpreter is ending aborts the process.
        """
        if not self._ends:
            self._ends = True
            atexit.register(self._end)
        self._comms.add(comm)

    def _end(self) -> None:
        # What is under way may wait for ranks that are gone: then the group is left to the system.
        if dist.is_initialized() and not any(comm.under_way for comm in self._comms):
            dist.destroy_process_group()


def backend_of(device_type: str) -> str:
    """What communicates between devices of a kind."""
    try:
        return dist.get_default_backend_for_device(device_type)
    except ValueError:
        raise WherryError(
            f"torch.distributed has no backend for several ranks on {device_type!r}: import the package that registers "
            "one before the first group is made, or train on one device"
        ) from None


_default_group = _DefaultGroup()
start_default_group = _default_group.start


def _alive(group: dist.ProcessGroup) -> bool:
    return group in dist.distributed_c10d._world.pg_map


_KNOWN_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """What is only copied travels as bytes where a backend may not know its type, as gloo those of 16 and 8 bits."""
    known = tensor.element_size() > 1 if tensor.is_floating_point() else tensor.dtype in _KNOWN_INTEGERS
    return tensor if known else tensor.view(torch.uint8)


def _ended_well(work: Any, tells: bool) -> bool:
    """Whether a work has ended, and without an error if it `tells`: torch's own question for that is deprecated."""
    if not (work.is_completed() and tells):
        return work.is_completed()
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


class ProcessGroupComm(Comm):
    """A torch.distributed process group. On a device a ticket's `wait()` orders streams and does not stop the host."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 600.0) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self.timeout = timeout
        # Whether it is gloo that communicates what is on the host.
        self._over_gloo = "cpu:gloo" in dist.distributed_c10d.get_backend_config(group)
        self.peers = Peers(group, self.recent, timeout)
        self._shares_default_group = group is None and _default_group.join()
        # Collectives that were begun and not waited for, and whether one that has ended says how: NCCL's refuse to.
        self._begun: dict[Any, bool] = {}
        _default_group.end_with(self)

    def _ticket(self, launch: Callable[[], Any], *tensors: torch.Tensor) -> Ticket:
        asked = self.recent[-1]
        if self.peers.failed:
            self.peers.take_back()
        try:
            work = launch()
        except (RuntimeError, MemoryError) as error:
            raise self.peers.explain(error, asked) from error
        wait_for = work.wait if tensors[0].device.type != "cpu" else self.peers.waiting(work, asked)
        if len(self._begun) >= MANY:
            # Another thread may wait for some of them meanwhile.
            for each in [each for each, tells in tuple(self._begun.items()) if _ended_well(each, tells)]:
                self._begun.pop(each, None)
        self._begun[work] = tensors[0].device.type == "cpu"

        # The tensors stay alive until the wait: a backend may still be reading them.
        def wait(_tensors: tuple[torch.Tensor, ...] = tensors) -> None:
            wait_for()
            self._begun.pop(work, None)

        return CallbackTicket(wait, work.is_completed)

    @property
    def under_way(self) -> bool:
        """Whether a collective has not come to its end, or not to a good one. One that nobody waits for may have."""
        return not all(_ended_well(work, tells) for work, tells in tuple(self._begun.items()))

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self._ticket(lambda: dist.all_reduce(tensor, reduce_op, group=self.group, async_op=True), tensor)

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        if whole.device.type == "cpu" and self._over_gloo:
            # gloo has no reduce-scatter, and a wait for torch's stand-in, which copies the whole, has no end. Each rank
            # is sent what it sums; of much, which that would need a second time, all is summed in place.
            if exchanges(whole):
                return self._exchange_and_sum(shard, whole)
            summed = self._all_reduce(whole, "sum")

            def take() -> None:
                summed.wait()
                _copy_unless_same(shard, whole.view(self.size, -1)[self.rank].view_as(shard))

            return CallbackTicket(take, summed.done)
        return self._ticket(lambda: _reduce_scatter_single(shard, whole, group=self.group, async_op=True), shard, whole)

    def _exchange_and_sum(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        received = whole.new_empty(0)

        def exchange() -> Any:
            # It takes memory here, where a lack of it is told to the others.
            received.resize_(whole.shape)
            return dist.all_to_all_single(received, whole, group=self.group, async_op=True)

        exchanged = self._ticket(exchange, received, whole)

        def add_up() -> None:
            exchanged.wait()
            first, second, *others = received.view(self.size, *shard.shape).unbind()
            torch.add(first, second, out=shard)
            for other in others:
                shard.add_(other)

        return CallbackTicket(add_up, exchanged.done)

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        whole, shard = _copyable(whole), _copyable(shard)
        if whole.device.type == "cpu" and self._over_gloo and self.size <= FEW:
            # gloo gathers in a copy of the whole, which its threads then keep. Broadcasts go where each part belongs.
            parts = whole.view(self.size, -1)
            _copy_unless_same(parts[self.rank].view_as(shard), shard)
            return TicketGroup([self._broadcast(part, source) for source, part in enumerate(parts.unbind())])
        return self._ticket(lambda: _all_gather_single(whole, shard, group=self.group, async_op=True), whole, shard)

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Ticket:
        received, sent = _copyable(received), _copyable(sent)
        exchange = partial(dist.all_to_all_single, received, sent, group=self.group, async_op=True)
        return self._ticket(exchange, received, sent)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        tensor = _copyable(tensor)
        return self._ticket(lambda: dist.broadcast(tensor, group=self.group, group_src=source, async_op=True), tensor)

    def _gather_objects(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        device = self._object_device()
        lengths = torch.empty(self.size, dtype=torch.int64, device=device)
        self._exchange(lengths, torch.tensor([mine.numel()], device=device))
        sizes = [int(length) for length in self.read(lengths)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: mine.numel()] = mine.to(device)
        everybody = torch.empty(self.size * max(sizes), dtype=torch.uint8, device=device)
        self._exchange(everybody, padded)
        rows = everybody.cpu().view(self.size, -1)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _exchange(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """An all-gather for objects: not counted as traffic of training."""
        self.recent.append((self.asked, "exchange", 0, ""))
        self.asked += 1
        self._all_gather(whole, part).wait()

    def check_reaches(self, device: torch.device) -> None:
        try:
            self._group_or_default._get_backend(device)
        except RuntimeError as error:
            raise WherryError(
                f"the process group of {self.size} ranks has no backend for what is on {device} ({error}); start it "
                f'with one, as by init_process_group("cpu:gloo,{device.type}:NAME"), or leave that to Wherry'
            ) from error

    @property
    def _group_or_default(self) -> dist.ProcessGroup:
        return self.group or dist.distributed_c10d._get_default_group()

    def _object_device(self) -> torch.device:
        kinds = {device.type for device in self._group_or_default._device_types}
        return torch.device("cpu" if "cpu" in kinds or not kinds else next(iter(kinds)))

    def _meet(self, what: str) -> None:
        if self.peers.failed:
            self.peers.take_back()
        self.peers.meet(self.asked, what)

    def read(self, tensor: torch.Tensor) -> list[float]:
        if tensor.device.type == "cpu":
            return tensor.tolist()
        # A synchronization would wait without end for a rank that is gone; an event can be asked.
        event = torch.Event(tensor.device)
        event.record(torch.accelerator.current_stream(tensor.device))
        asked = self.recent[-1] if self.recent else (0, "read", 0, "")
        try:
            self.peers.watch(event.query, asked)
            event.synchronize()  # it has passed: what failed before it is raised here
        except PeerError:
            raise
        except RuntimeError as error:
            raise self.peers.explain(error, asked) from error
        return tensor.tolist()

    def _group(self, axis: str, members: list[int]) -> Comm:
        everybody = self._everybody()
        ranks = tuple(everybody[member] for member in members)
        return ProcessGroupComm(_default_group.part(ranks, self.timeout), timeout=self.timeout)

    def _everybody(self) -> tuple[int, ...]:
        """The ranks of this group, by their numbers in the world."""
        return tuple(dist.get_process_group_ranks(self.group) if self.group else range(dist.get_world_size()))

    def fail(self, message: str) -> None:
        self.peers.fail(self.asked, message)

    def close(self) -> None:
        self.peers.close()
        if self._shares_default_group:
            self._shares_default_group = False
            _default_group.leave()
