"""States copied to host memory, as they are when a save begins, for the thread that writes them behind training."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from wherry.checkpoint.contents import state_pieces, weight_pieces
from wherry.checkpoint.format import Piece, Scalar
from wherry.checkpoint.session import Session
from wherry.observe.memory import format_bytes
from wherry.placement import Tier
from wherry.sharding.unit import Flat
from wherry.tickets import Ticket, TicketGroup
from wherry.tiers.buffers import host_copy
from wherry.tiers.host import Room, rooms
from wherry.tiers.streams import Readers
from wherry.update.parameter_states import kept_fields

# Of the memory that is free, what copies may take: training wants some as well.
SHARE_OF_FREE = 0.9
# Copies of a device begin at multiples of this many bytes: a cache line.
ALIGNMENT = 64

Shares = Mapping[Flat, tuple[int, int]]


@dataclass
class _Group:
    """What is written, in order; from a device into one buffer, complete when these copies are."""

    items: deque[Piece | Scalar]
    buffer: torch.Tensor | None = None
    tickets: list[Ticket] = field(default_factory=list)


class Staging:
    """Host memory is copied at once. A device's states are copied on a stream of their own into pinned memory, which
    stays for the next save: to pin it takes longer than to copy into it.

    That stream makes its copies in order. First comes what others than an update may write to, and all that follows on
    the device waits for these copies; then the rest, a flat at a time, which the flat's next update waits for.
    """

    def __init__(self, session: Session) -> None:
        self._link = session.link
        self._pool = session.link.aside_pool
        self._groups: deque[_Group] = deque()

    def take(self, session: Session, shares: Shares, plain: Iterable[Piece]) -> None:
        """Copy, or begin to copy, what this rank writes of these flats, and the `plain` pieces."""
        if session.link.shared:
            self._copy(plain)
        else:
            first = [self._begin(plain)]
            for flat, share in shares.items():
                if flat.resident:
                    first.append(self._begin(i for i in _on_device(session, flat, share) if _is_shown(flat, i)))
            Readers(self._link, [ticket for group in first for ticket in group.tickets]).wait()
            for flat, share in shares.items():
                group = self._begin(i for i in _on_device(session, flat, share) if not _is_shown(flat, i))
                flat.read_by(Readers(self._link, group.tickets))
        for flat, share in shares.items():
            if not _state_on_device(session, flat):
                self._copy(state_pieces(session, flat, share))
            if not _weights_on_device(session, flat):
                self._copy(weight_pieces(session, flat, share))

    def _copy(self, items: Iterable[Piece | Scalar]) -> None:
        self._groups.append(_Group(deque(_copied(item, host_copy) for item in items)))

    def _begin(self, items: Iterable[Piece | Scalar]) -> _Group:
        found = list(items)
        room = sum(_room(tensor) for item in found for tensor in _tensors(item))
        group = _Group(deque(), buffer=self._pool.take(room) if room else None)
        self._groups.append(group)
        at = 0

        def copy(source: torch.Tensor) -> torch.Tensor:
            nonlocal at
            if not source.numel():
                return torch.empty(0, dtype=source.dtype)
            assert group.buffer is not None
            target = group.buffer[at : at + source.nbytes].view(source.dtype)
            at += _room(source)
            group.tickets.append(self._link.aside(target, source.detach()))
            return target

        group.items.extend(_copied(item, copy) for item in found)
        return group

    def pieces(self) -> Iterator[Piece | Scalar]:
        """Each in turn, complete and valid until the next; nothing is kept of those that have been."""
        while self._groups:
            group = self._groups[0]
            TicketGroup(group.tickets).wait()
            while group.items:
                yield group.items.popleft()
            self._groups.popleft()
            self._give(group)

    def release(self) -> None:
        """Let go of everything that was not written, once nothing is copied any more."""
        while self._groups:
            group = self._groups.popleft()
            with suppress(Exception):  # whoever waits for it hears of it
                TicketGroup(group.tickets).finish()
            group.items.clear()
            self._give(group)

    def _give(self, group: _Group) -> None:
        if group.buffer is not None:
            self._pool.give(group.buffer)
            group.buffer = None


def _state_on_device(session: Session, flat: Flat) -> bool:
    state = session.states.get(flat)
    return state is not None and not session.link.shared and state.bucket.tier is Tier.DEVICE


def _weights_on_device(session: Session, flat: Flat) -> bool:
    return not session.link.shared and flat.storage is None


def _on_device(session: Session, flat: Flat, share: tuple[int, int]) -> Iterator[Piece | Scalar]:
    if _state_on_device(session, flat):
        yield from state_pieces(session, flat, share)
    if _weights_on_device(session, flat):
        yield from weight_pieces(session, flat, share)


def _is_shown(flat: Flat, item: Piece | Scalar) -> bool:
    """Whether the model's parameters show it, so that others than the flat's update may write to it."""
    if isinstance(item, Scalar) or not flat.resident:
        return False
    return item.values.untyped_storage()._cdata == flat.whole.untyped_storage()._cdata


def _copied(item: Piece | Scalar, copy: Callable[[torch.Tensor], torch.Tensor]) -> Piece | Scalar:
    if isinstance(item, Scalar):
        return item
    scales = copy(item.scales) if item.scales is not None else None
    return replace(item, values=copy(item.values), scales=scales)


def _tensors(item: Piece | Scalar) -> list[torch.Tensor]:
    if isinstance(item, Scalar):
        return []
    return [item.values] if item.scales is None else [item.values, item.scales]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


# Whether states can be written behind training.


def why_not_behind(session: Session, shares: Shares, plain: Iterable[torch.Tensor]) -> str | None:
    """Why training stands still until this save is written, in words, the same on every rank; None if it does not.

    What earlier saves have pinned counts as had.
    """
    states = [session.states[flat] for flat in shares if flat in session.states]
    on_disk = any(flat.at_rest_on_disk for flat in shares) or any(state.bucket.on_disk for state in states)
    wanted = sum(_staged_bytes(session, flat, share) for flat, share in shares.items())
    wanted += sum(tensor.nbytes for tensor in plain)
    pinned = session.link.aside_pool.counters
    wanted -= pinned.allocated - pinned.in_use
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", session.comm.size))
    room = rooms(ranks, session.config["wherry"]["host_memory"])
    reports = session.comm.gather_objects((on_disk, round(wanted), room))
    if any(disk for disk, *_ in reports):
        return "states on disk are read as they are written"
    return _shortage([(nbytes, spaces) for _, nbytes, spaces in reports])


def _staged_bytes(session: Session, flat: Flat, share: tuple[int, int]) -> float:
    """What copies of a share of a flat take: of its weights, and of its state as it rests. No less than is copied."""
    start, stop = share
    width, whole = float(flat.dtype.itemsize), 0
    state = session.states.get(flat)
    if state is not None and state.bucket.numel and session.optimizer is not None:
        width += state.bucket.nbytes / state.bucket.numel
        for span, fields in zip(state.segments, kept_fields(state, session.optimizer.param_groups), strict=True):
            if start <= span.start < stop:
                whole += sum(field.nbytes for field in fields if field.shape is not None)
    return width * (stop - start) + whole


def _shortage(found: Iterable[tuple[int, list[Room]]]) -> str | None:
    """`found`: of every rank, what it wants, and the rooms that it takes this from."""
    wanted_in: dict[str, int] = {}
    room_of: dict[str, Room] = {}
    for nbytes, told in found:
        for room in told:
            wanted_in[room.key] = wanted_in.get(room.key, 0) + nbytes
            known = room_of.setdefault(room.key, room)
            room_of[room.key] = known if known.free <= room.free else room
    for key, room in room_of.items():
        if wanted_in[key] > SHARE_OF_FREE * room.free:
            return (
                f"copies of the states take {format_bytes(wanted_in[key])} of host memory {room.name}, and "
                f"{format_bytes(room.free)} are free there, of which a tenth is left alone"
            )
    return None
