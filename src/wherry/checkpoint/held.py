"""States that are saved behind training as they were when it began: on disk never all in memory, on the host copied."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from wherry.checkpoint.collect import FlatCut, Piece, Scalar, pieces
from wherry.checkpoint.session import Session
from wherry.placement import Tier
from wherry.sharding.unit import Flat
from wherry.tiers.disk import DiskClone, DiskStore
from wherry.tiers.homes import DiskHome, Home, Kept, KeptMemory
from wherry.tiers.tickets import CallbackTicket, TicketGroup
from wherry.update.record import State
from wherry.update.state import Batch, KeptBatch


@dataclass
class _Item:
    """What is read at once: one record, of one flat or of small ones together."""

    batch: KeptBatch | None = None
    # Of each flat what is written, the first of its segments in the batch, and its shard where that is needed.
    flats: list[tuple[FlatCut, int, Kept | None]] = field(default_factory=list)

    @property
    def parts(self) -> list[Kept]:
        return [*(self.batch.parts if self.batch else []), *(shard for _, _, shard in self.flats if shard is not None)]

    def pieces(self) -> Iterator[Piece | Scalar]:
        with ExitStack() as stack:
            views: list[dict[str, State]] = stack.enter_context(self.batch.opened()) if self.batch else []
            for cut, first, kept in self.flats:
                shard = stack.enter_context(kept.opened()) if kept is not None else None
                yield from pieces(cut, views[first : first + len(cut.segments)], shard)


def held_batches(session: Session, shares: Mapping[Flat, tuple[int, int]]) -> list[Batch]:
    """Those whose states no copy is made of at once: anything of them rests on disk, or all of them in host memory that
    their update alone changes. In the order of their updates."""
    updater = session.updater
    if updater is None:
        return []
    found = [batch for batch in updater.batches if _on_disk(batch) or _is_apart(session, batch, shares)]
    return found[::-1] if updater.policy.when == "in_backward" else found


def _on_disk(batch: Batch) -> bool:
    return any(home.on_disk for home in batch.homes())


def _is_apart(session: Session, batch: Batch, shares: Mapping[Flat, tuple[int, int]]) -> bool:
    """Whether this rank writes all of a record in host memory: what it has a part of is copied in that part alone."""
    assert session.updater is not None
    if session.updater.holdings.tiers[batch] is Tier.DEVICE and not session.link.shared:
        return False
    return all(shares[state.flat] == (0, state.flat.layout.shard_numel) for state in batch.states)


class Held:
    """What rests on disk, and states in host memory that their update alone changes.

    Where the file system can share what files hold, the store is cloned, and training goes on unhindered; else an
    update that is about to write a record waits until that has been read. Host memory is copied first of all by the
    thread that writes, and an update waits for the copy of its own states.
    """

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._kept: list[Kept] = []
        self._clones: dict[DiskStore, DiskClone | None] = {}

    def take(self, session: Session, cuts: Mapping[Flat, FlatCut], shares: Mapping[Flat, tuple[int, int]]) -> set[Flat]:
        """Begin to hold everything as it is now; returns the flats that this is about. No update may be under way."""
        batches = held_batches(session, shares)
        alone = [flat for flat in cuts if flat not in session.states and flat.at_rest_on_disk]
        homes = [home for batch in batches for home in batch.homes()] + [flat.home for flat in alone]
        on_disk = [home for home in homes if isinstance(home, DiskHome)]
        for home in on_disk:
            home.written()
        for store in dict.fromkeys(home.shelf.store for home in on_disk):
            self._clones[store] = store.clone(session.comm.size)
        for batch in batches:
            own = [(state, cuts.get(state.flat, FlatCut())) for state in batch.states]
            first = len(self._kept)
            item = _Item(batch.keep(self._keep) if any(cut.segments for _, cut in own) else None)
            item.flats += [(cut, state.first, self._bare(state.flat, cut)) for state, cut in own]
            self._guard([state.flat for state in batch.states], self._kept[first:])
            self._items.append(item)
        self._items += [_Item(None, [(cuts[flat], 0, self._bare(flat, cuts[flat]))]) for flat in alone]
        return {*alone, *(state.flat for batch in batches for state in batch.states)}

    @property
    def waited(self) -> float:
        """Seconds that updates have waited."""
        return sum(kept.waited for kept in self._kept)

    @property
    def how(self) -> str:
        """What was done about states on disk, in words; nothing where there are none."""
        if not self._clones:
            return ""
        if None in self._clones.values():
            return "states on disk were read before updates wrote to them"
        return "states on disk were cloned by the file system"

    def _keep(self, home: Home) -> Kept:
        kept = home.keep(self._clones[home.shelf.store]) if isinstance(home, DiskHome) else home.keep()
        self._kept.append(kept)
        return kept

    def _bare(self, flat: Flat, cut: FlatCut) -> Kept | None:
        return flat.keep(self._keep) if cut.bare else None

    def _guard(self, flats: list[Flat], kept: list[Kept]) -> None:
        """Let updates of these flats wait for the copies of what rests in memory."""
        waits = [CallbackTicket(each.wait, each.done) for each in kept if isinstance(each, KeptMemory)]
        for flat in flats if waits else ():
            flat.reader = TicketGroup(waits if flat.reader.done() else [flat.reader, *waits])

    def copy(self) -> None:
        """Copy what rests in memory, in the thread that writes."""
        for kept in self._kept:
            kept.copy()

    def pieces(self) -> Generator[Piece | Scalar, None, None]:
        """All that is written of these flats, in whatever order lets updates wait least; each valid until the next."""
        while self._items:
            item = next((item for item in self._items if any(part.wanted for part in item.parts)), self._items[0])
            self._items.remove(item)
            yield from item.pieces()
            for part in item.parts:
                part.release()

    def release(self) -> None:
        """Let go of everything. Updates that wait go on, whatever has become of the save."""
        for kept in self._kept:
            kept.release()
        self._items.clear()
        for clone in self._clones.values():
            if clone is not None:
                clone.close()
