"""States in memory that are saved behind training: what they were when the save began, in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from wherry.checkpoint.collect import FlatCut, Piece, Scalar, flat_pieces, gradient_pieces
from wherry.checkpoint.held import held_batches
from wherry.checkpoint.session import Session
from wherry.observe.memory import format_bytes
from wherry.placement import Tier
from wherry.sharding.unit import Flat
from wherry.tiers.budget import Room, rooms
from wherry.tiers.buffers import host_copy
from wherry.tiers.streams import Readers
from wherry.tiers.tickets import Ticket, TicketGroup
from wherry.update.optimizer_states import FlatState, UpdateBucket

# Of the memory that is free, what copies may take: training wants some as well.
SHARE_OF_FREE = 0.9
# Copies of a device begin at multiples of this many bytes: a cache line.
ALIGNMENT = 64


@dataclass
class Down:
    """What goes down from the device into one buffer.

    Of a flat's own, its next update waits for it; without a flat it is what others may write to, and all that comes
    next waits for it.
    """

    items: list[Piece | Scalar]
    flat: Flat | None = None

    @property
    def nbytes(self) -> int:
        return sum(_room(tensor) for item in self.items for tensor in _tensors(item))


@dataclass
class _Group:
    """What is written, in order; from a device into one buffer, complete when these copies are."""

    items: deque[Piece | Scalar]
    buffer: torch.Tensor | None = None
    tickets: list[Ticket] = field(default_factory=list)


class Copies:
    """A device's states are copied on a stream of their own while training goes on, and whoever changes them waits for
    that. One stream makes them in order, so what waits for one copy waits for all before it: first comes what all that
    follows waits for, then flats in the order of their updates, each for its own update (`Flat.reader`). Host memory is
    copied at once.
    """

    def __init__(self, session: Session) -> None:
        self._link = session.link
        # Kept from save to save: to pin memory takes longer than to copy into it.
        self._pool = session.link.aside_pool
        self._groups: deque[_Group] = deque()

    def take_down(self, downs: Iterable[Down]) -> None:
        """Begin all copies from the device; those without a flat come first."""
        open_to_all: list[Ticket] = []
        ordered = True
        for down in downs:
            group = self._begin(down)
            if down.flat is None:
                open_to_all += group.tickets
                continue
            if ordered:
                Readers(self._link, open_to_all).wait()
                ordered = False
            readers = Readers(self._link, group.tickets)
            # What is done is of an earlier save.
            reader = down.flat.reader
            down.flat.reader = readers if reader.done() else TicketGroup([reader, readers])
        if ordered:
            Readers(self._link, open_to_all).wait()

    def take(self, items: Iterable[Piece | Scalar]) -> None:
        """From host memory. Each may change when the next is asked for."""
        self._groups.append(_Group(deque(map(copied, items))))

    def _begin(self, down: Down) -> _Group:
        room = down.nbytes
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

        for item in down.items:
            if isinstance(item, Piece):
                scales = copy(item.scales) if item.scales is not None else None
                item = replace(item, values=copy(item.values), scales=scales)
            group.items.append(item)
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


def copied(item: Piece | Scalar) -> Piece | Scalar:
    """From wherever it is, now."""
    if isinstance(item, Scalar):
        return item
    scales = host_copy(item.scales) if item.scales is not None else None
    return replace(item, values=host_copy(item.values), scales=scales)


# What is on the device, and what elsewhere.


def parted(session: Session, flat: Flat, cut: FlatCut) -> tuple[FlatCut, FlatCut]:
    """What this rank writes of a flat: that on a device apart from the host, and the rest."""
    if session.link.shared:
        return FlatCut(), cut
    segments, bare = _state_on_device(session, flat), flat.home is None
    here = FlatCut(cut.segments if segments else [], cut.bare if bare else [])
    return here, FlatCut([] if segments else cut.segments, [] if bare else cut.bare)


def _state_on_device(session: Session, flat: Flat) -> bool:
    if session.updater is None or flat not in session.states:
        return False
    return session.states[flat].bucket.tier is Tier.DEVICE


def sums_on_device(session: Session, flat: Flat) -> bool:
    """Whether the sums of an open window are on a device apart from the host."""
    gradient = session.gradient_of.get(flat)
    return not session.link.shared and gradient is not None and gradient.keeps


def what_goes_down(
    session: Session, cuts: Mapping[Flat, FlatCut], shares: Mapping[Flat, tuple[int, int]], plain: Iterable[Piece]
) -> list[Down]:
    """Everything on a device apart from the host, in the order in which it is to be copied."""
    if session.link.shared:
        return []
    first: list[Down] = []
    last: list[Down] = []
    for flat, cut in cuts.items():
        found = list(flat_pieces(session, flat, parted(session, flat, cut)[0]))
        sums = gradient_pieces(session, flat, shares[flat]) if sums_on_device(session, flat) else ()
        first.append(Down([*(item for item in found if _open_to_all(flat, item)), *sums]))
        last.append(Down([item for item in found if not _open_to_all(flat, item)], flat))
    first.append(Down(list(plain)))
    if session.updater is not None and session.updater.policy.when == "in_backward":
        last.reverse()
    return [down for down in (*first, *last) if down.items]


def _open_to_all(flat: Flat, item: Piece | Scalar) -> bool:
    """Whether others than the flat's update may change it: weights that the model's parameters show."""
    if isinstance(item, Scalar):
        return False
    shown = item.values.untyped_storage()._cdata == flat.whole.untyped_storage()._cdata
    return flat.resident and shown


def _tensors(item: Piece | Scalar) -> list[torch.Tensor]:
    if isinstance(item, Scalar):
        return []
    return [item.values] if item.scales is None else [item.values, item.scales]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


# Whether there is memory for it.


def host_bytes(
    session: Session,
    cuts: Mapping[Flat, FlatCut],
    shares: Mapping[Flat, tuple[int, int]],
    plain: Iterable[torch.Tensor],
) -> int:
    """What copies take on this rank of all that is in memory and does not go down from a device."""
    total = float(sum(tensor.nbytes for tensor in plain)) if session.link.shared else 0.0
    beside = held_batches(session, shares)
    total += sum(_held_bytes(session, batch, cuts) for batch in beside)
    for flat, whole in cuts.items():
        _, cut = parted(session, flat, whole)
        state = session.states.get(flat)
        if state is None or state.bucket not in beside:
            if state is not None:
                total += _segment_bytes(state, cut)
            if not flat.at_rest_on_disk:
                total += flat.dtype.itemsize * sum(stretch.run.numel for stretch in cut.bare)
        if not sums_on_device(session, flat):
            total += sum(piece.values.nbytes for piece in gradient_pieces(session, flat, shares[flat]))
    return round(total)


def _held_bytes(session: Session, batch: UpdateBucket, cuts: Mapping[Flat, FlatCut]) -> int:
    """Records on disk stay where they are; what rests in memory is copied whole."""
    left = {state: parted(session, state.flat, cuts.get(state.flat, FlatCut()))[1] for state in batch.states}
    whole = any(cut.segments for cut in left.values())
    total = batch.in_memory if whole and not batch.on_disk else 0
    for state, cut in left.items():
        if not state.flat.at_rest_on_disk:
            total += state.flat.shard_nbytes * (int(whole and batch.follows) + int(bool(cut.bare)))
    return total


def _segment_bytes(state: FlatState, cut: FlatCut) -> float:
    own = state.bucket.widths()[state.first : state.first + len(cut.segments)]
    pairs = zip(own, cut.segments, strict=True)
    return sum(width * stretch.run.numel for width, stretch in pairs if stretch is not None)


def shortage(session: Session, on_host: int, downs: Iterable[Down]) -> str | None:
    """Why copies cannot be had in the memory of some machine, in words, the same on every rank; None if they can.

    What earlier saves have pinned and left counts as had, as far as these copies can use it.
    """
    sizes = [nbytes for down in downs if (nbytes := down.nbytes)]
    wanted = on_host + sum(sizes) - session.link.aside_pool.idle_for(sizes)
    wanted_in: dict[str, int] = {}
    room_of: dict[str, Room] = {}
    for nbytes, told in session.comm.gather_objects((wanted, rooms())):
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
