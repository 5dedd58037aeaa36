"""Updates on the device of state that rests on the host: it goes up, is updated, and comes down while the next goes up.

Three rooms of the device's memory take turns: one is filled, one is updated, one is emptied.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from wherry import native
from wherry.fake import faking
from wherry.tickets import DONE, OnHost, Ticket, TicketGroup
from wherry.tiers.streams import Link
from wherry.update.record import State
from wherry.update.rules import Groups, UpdateRule, UpdateSegment

BF16, FP32 = torch.bfloat16, torch.float32
ROOMS = 3
# Tensors that lie as near to each other in the host's memory go in one copy, with what is between them.
NEAR = 256
# What is moved and updated to measure how fast that is, in elements.
MEASURED = 1 << 22


@dataclass
class _DeviceRoom:
    memory: torch.Tensor
    # What has to have happened before it is filled again.
    empty: Ticket = DONE


@dataclass
class _HostRun:
    """Host memory that is copied at once: a storage's bytes `start` to `stop`, and where in the room they go."""

    first: torch.Tensor
    start: int
    stop: int
    place: int
    changes: bool

    def on_host(self) -> torch.Tensor:
        return self.first.view(-1).view(torch.uint8).as_strided((self.stop - self.start,), (1,), self.start)

    def in_room(self, room: torch.Tensor) -> torch.Tensor:
        return room[self.place : self.place + self.stop - self.start]


class StreamedUpdates:
    """What the updates of one engine go through. Whoever asks for them does so in one thread at a time."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._rooms: deque[_DeviceRoom] = deque()

    def update(
        self,
        rule: UpdateRule,
        segments: Sequence[UpdateSegment],
        steps: Sequence[int],
        groups: Groups,
        multiplier: float,
        fence: Ticket,
    ) -> Ticket:
        """Begin the update of these; the ticket is complete once all is where it rests. Nothing waits on the host."""
        present = [one for one in zip(segments, steps, strict=True) if one[0].grad is not None]
        if not present:
            return DONE
        runs, places, nbytes = _gathered([segment for segment, _ in present])
        with self.link.updating(fence):
            room, ready = self._room(nbytes, fence)
            ups = [self.link.up(run.in_room(room.memory), run.on_host(), fence=ready, after=room.empty) for run in runs]
            for ticket in ups:
                ticket.wait()
            there = [_moved(segment, room.memory, places) for segment, _ in present]
            rule.update(there, [step for _, step in present], groups, multiplier).wait()
            rule.forget()  # the next ones come in another list
            downs = [self.link.down(run.on_host(), run.in_room(room.memory)) for run in runs if run.changes]
            room.empty = downs[-1] if downs else self.link.fence()
        return TicketGroup([OnHost(ticket) for ticket in downs or [room.empty]])

    def _room(self, nbytes: int, fence: Ticket) -> tuple[_DeviceRoom, Ticket]:
        """The one that was used longest ago, and what must have been done before its memory is written."""
        room = self._rooms.popleft() if len(self._rooms) == ROOMS else _DeviceRoom(torch.empty(0, dtype=torch.uint8))
        if room.memory.numel() < nbytes:
            room.empty.finish()
            room.memory = torch.empty(0, dtype=torch.uint8)  # before there is more
            room = _DeviceRoom(torch.empty(nbytes, dtype=torch.uint8, device=self.link.device))
            fence = self.link.fence()
        self._rooms.append(room)
        return room, fence

    @property
    def nbytes(self) -> int:
        return sum(room.memory.numel() for room in self._rooms)

    def trim(self) -> None:
        """Give the rooms back. No update is under way."""
        for room in self._rooms:
            room.empty.finish()
        self._rooms.clear()


def _gathered(segments: Sequence[UpdateSegment]) -> tuple[list[_HostRun], dict[int, int], int]:
    """The runs of host memory that segments lie in, the place in the room of each tensor in it, and the room's size."""
    runs: list[_HostRun] = []
    places: dict[int, int] = {}
    end = 0
    for changes in (False, True):
        for tensor in (tensor for segment in segments for tensor in _on_host(segment, changes=changes)):
            start = int(tensor.storage_offset()) * tensor.itemsize
            last = runs[-1] if runs else None
            if last is None or last.changes is not changes or not _follows(last, tensor, start):
                last = _HostRun(tensor, start, start, -(-end // NEAR) * NEAR, changes)
                runs.append(last)
            last.stop = start + tensor.nbytes
            places[id(tensor)] = last.place + start - last.start
            end = last.place + last.stop - last.start
    return runs, places, end


def _follows(run: _HostRun, tensor: torch.Tensor, start: int) -> bool:
    alike = run.first.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return alike and 0 <= start - run.stop <= NEAR


def _on_host(segment: UpdateSegment, *, changes: bool) -> Iterator[torch.Tensor]:
    """What is to go up: what an update changes, or the gradient."""
    if not changes:
        yield from (segment.grad,) if segment.grad is not None and "grad" not in segment.on_device else ()
        return
    yield from (segment.working,) if segment.working is not None and "working" not in segment.on_device else ()
    yield from (tensor for tensor in (segment.low, segment.master) if tensor is not None)
    for state in segment.state:
        yield from (state.codes, state.scales) if isinstance(state, native.Blocks8) else (state,)


def _moved(segment: UpdateSegment, room: torch.Tensor, places: dict[int, int]) -> UpdateSegment:
    """The segment, with what went up where it is now."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        place = places.get(id(tensor))
        if place is None:
            return tensor
        return room[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def state_there(state: State) -> State:
        if isinstance(state, native.Blocks8):
            return native.Blocks8(there(state.codes), there(state.scales))
        return there(state)

    given = (segment.grad, segment.working, segment.low, segment.master)
    grad, working, low, master = (None if tensor is None else there(tensor) for tensor in given)
    state = tuple(map(state_there, segment.state))
    return replace(segment, grad=grad, working=working, low=low, master=master, state=state)


def measured_share(link: Link) -> float:
    """The share of the updates with which the device ends when the host ends with the others: of Adam in bf16."""
    if faking():
        return 0.5
    formula = native.Adam(lr=0.0)
    host = [link.host.take(MEASURED * width).zero_() for width in (2, 2, 2, 4, 4)]
    grad, working, low, first, second = (
        memory.view(dtype) for memory, dtype in zip(host, (BF16, BF16, torch.int16, FP32, FP32), strict=True)
    )
    segments = native.PackedSegments([native.Segment(grad, working, low=low, state=(first, second))])
    goes = [torch.empty_like(memory, device=link.device) for memory in host]
    comes = [torch.empty_like(memory, device=link.device) for memory in host[2:]]
    back = [link.host.take(memory.nbytes) for memory in host[2:]]

    def both_ways() -> None:
        tickets = [link.down(target, source) for target, source in zip(back, comes, strict=True)]
        for target, source in zip(goes, host, strict=True):
            link.up(target, source).finish()
        for ticket in tickets:
            ticket.finish()

    by_host, by_device = _seconds(lambda: segments.run(formula)), _seconds(both_ways)
    for memory in (*host, *back):
        link.host.give(memory)
    return by_host / (by_host + by_device)


def _seconds(act: Callable[[], None]) -> float:
    found = []
    for _ in range(4):
        begun = time.perf_counter()
        act()
        found.append(time.perf_counter() - begun)
    return median(found[1:])
