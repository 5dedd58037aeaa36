"""States in memory that are saved behind training: what they were when the save began, in host memory."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from wherry.checkpoint.collect import FlatCut, Piece, Scalar, flat_pieces, gradient_pieces
from wherry.checkpoint.manifest import BEHIND
from wherry.checkpoint.session import Session
from wherry.observe.memory import format_bytes
from wherry.placement import Tier
from wherry.sharding.unit import Flat
from wherry.tiers.budget import free_host_memory
from wherry.tiers.streams import Readers
from wherry.tiers.tickets import Ticket, TicketGroup

# Of the memory that is free, what copies may take: training wants some as well.
SHARE_OF_FREE = 0.9
# Copies of a device begin at multiples of this many bytes: a cache line.
ALIGNMENT = 64


@dataclass
class _Group:
    """What is written, in order; from a device into one buffer, complete when these copies are."""

    items: deque[Piece | Scalar]
    buffer: torch.Tensor | None = None
    tickets: list[Ticket] = field(default_factory=list)


class Copies:
    """Host memory is copied at once. A device's is copied on a stream of its own while training goes on, and whoever
    changes it waits for that: the next update of a flat for the copy of that flat (`Flat.reader`), and what is not the
    engine's to change alone, as buffers and weights that are whole on every rank, for its own copy at once.
    """

    def __init__(self, session: Session) -> None:
        self._link = session.link
        # Kept from save to save: to pin memory takes longer than to copy into it.
        self._pool = session.link.pool(pin=True)
        self._groups: deque[_Group] = deque()

    def take_flat(self, session: Session, flat: Flat, cut: FlatCut) -> None:
        """A flat's weights, masters and moments."""
        apart = not self._link.shared
        parts = (
            (FlatCut(cut.segments), apart and _on_device(session, flat)),
            (FlatCut(bare=cut.bare), apart and flat.home is None),
        )
        for part, on_device in parts:
            items = flat_pieces(session, flat, part)
            if not on_device:
                self.take(items)
                continue
            found = list(items)
            self.take_down([item for item in found if not _open_to_all(flat, item)], flat)
            self.take_down([item for item in found if _open_to_all(flat, item)])

    def take_rest(self, items: Iterable[Piece | Scalar], *, on_device: bool) -> None:
        """What belongs to no flat's state: sums of gradients, buffers."""
        if on_device and not self._link.shared:
            self.take_down(items)
        else:
            self.take(items)

    def take(self, items: Iterable[Piece | Scalar]) -> None:
        """From host memory. Each may change when the next is asked for."""
        self._groups.append(_Group(deque(map(copied, items))))

    def take_down(self, items: Iterable[Piece | Scalar], flat: Flat | None = None) -> None:
        """From the device. With a `flat`, its next change waits for the copy; without, all that comes next does."""
        found = list(items)
        if not found:
            return
        room = sum(_room(tensor) for item in found for tensor in _tensors(item))
        group = _Group(deque(), buffer=self._pool.take(room) if room else None)
        self._groups.append(group)
        at = 0

        def down(source: torch.Tensor) -> torch.Tensor:
            nonlocal at
            assert group.buffer is not None
            target = group.buffer[at : at + source.nbytes].view(source.dtype)
            at += _room(source)
            if source.numel():
                group.tickets.append(self._link.aside(target, source.detach()))
            return target

        for item in found:
            if isinstance(item, Piece):
                scales = down(item.scales) if item.scales is not None else None
                item = replace(item, values=down(item.values), scales=scales)
            group.items.append(item)
        readers = Readers(self._link, group.tickets)
        if flat is None:
            readers.wait()
        else:
            # What is done is of an earlier save.
            flat.reader = readers if flat.reader.done() else TicketGroup([flat.reader, readers])

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
    scales = item.scales.to("cpu", copy=True) if item.scales is not None else None
    return replace(item, values=item.values.detach().to("cpu", copy=True), scales=scales)


def _on_device(session: Session, flat: Flat) -> bool:
    """Whether a flat's optimizer state rests on the device."""
    if session.updater is None or flat not in session.states:
        return False
    return session.updater.tiers[session.states[flat].batch] is Tier.DEVICE


def _open_to_all(flat: Flat, item: Piece | Scalar) -> bool:
    """Whether others than the flat's update may change it: weights that the model's parameters show, or late ones."""
    if isinstance(item, Scalar):
        return False
    shown = item.values.untyped_storage()._cdata == flat.whole.untyped_storage()._cdata
    return item.state == BEHIND or (flat.resident and shown)


def _tensors(item: Piece | Scalar) -> list[torch.Tensor]:
    if isinstance(item, Scalar):
        return []
    return [item.values] if item.scales is None else [item.values, item.scales]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


# Whether there is memory for it.


def needed_bytes(
    session: Session, cuts: dict[Flat, FlatCut], shares: dict[Flat, tuple[int, int]], plain: Iterable[torch.Tensor]
) -> int:
    """Host memory that a save behind training takes on this rank: for all that is in memory, once more."""
    total = float(sum(tensor.nbytes for tensor in plain))
    alone = {flat for flat in cuts if flat not in session.states}
    for batch in session.updater.batches if session.updater is not None else []:
        widths = batch.widths()
        on_disk = any(home.on_disk for home in batch.homes())
        for state in batch.states:
            cut = cuts.get(state.flat, FlatCut())
            if on_disk:
                # Records stay where they are; weights in memory that belong to them are copied whole.
                in_memory = 0 if state.flat.at_rest_on_disk else state.flat.shard_nbytes
                total += in_memory * (int(batch.follows) + int(bool(cut.bare)))
                continue
            own = widths[state.first : state.first + len(cut.segments)]
            for width, (_, members) in zip(own, cut.segments, strict=True):
                total += width * sum(stretch.run.numel for stretch in members)
            total += _bare_bytes(state.flat, cut)
    total += sum(_bare_bytes(flat, cuts[flat]) for flat in alone if not flat.at_rest_on_disk)
    for flat in cuts:
        total += sum(piece.values.nbytes for piece in gradient_pieces(session, flat, shares[flat]))
    return round(total)


def _bare_bytes(flat: Flat, cut: FlatCut) -> int:
    return flat.dtype.itemsize * sum(stretch.run.numel for _, stretch in cut.bare)


def shortage(session: Session, needed: int) -> str | None:
    """Why copies cannot be had in the memory of some machine, in words, the same on every rank; None if they can.

    What earlier saves have pinned and nobody uses counts as had.
    """
    counted = session.link.pool(pin=True).counters
    idle = 0 if session.link.shared else counted.allocated - counted.in_use
    told = session.comm.gather_objects((socket.gethostname(), max(0, needed - idle), free_host_memory()))
    for machine in dict.fromkeys(name for name, _, _ in told):
        wanted = sum(nbytes for name, nbytes, _ in told if name == machine)
        free = min(nbytes for name, _, nbytes in told if name == machine)
        if wanted > SHARE_OF_FREE * free:
            return (
                f"copies of the states take {format_bytes(wanted)} of host memory on {machine}, and "
                f"{format_bytes(free)} are free there, of which a tenth is left alone"
            )
    return None

