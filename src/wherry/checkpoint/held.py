"""States on disk that are saved behind training: never all in memory, and as they were when the save began."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from wherry.checkpoint.collect import FlatCut, Piece, Scalar, pieces
from wherry.checkpoint.session import Session
from wherry.sharding.unit import Flat
from wherry.tiers.disk import DiskClone, DiskStore
from wherry.tiers.homes import DiskHome, Home, Kept
from wherry.update.record import State
from wherry.update.state import KeptBatch


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


class Held:
    """The flats of which anything rests on disk. Where the file system can share what files hold, the store is cloned,
    and training goes on unhindered; else an update that is about to write a record waits until that has been read.
    """

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._kept: list[Kept] = []
        self._clones: dict[DiskStore, DiskClone | None] = {}

    def take(self, session: Session, cuts: dict[Flat, FlatCut]) -> set[Flat]:
        """Begin to hold everything as it is now; returns the flats that this is about. No update may be under way."""
        batches = [
            batch
            for batch in (session.updater.batches if session.updater is not None else [])
            if any(home.on_disk for home in batch.homes())
        ]
        alone = [flat for flat in cuts if flat not in session.states and flat.at_rest_on_disk]
        homes = [home for batch in batches for home in batch.homes()] + [flat.home for flat in alone]
        on_disk = [home for home in homes if isinstance(home, DiskHome)]
        for home in on_disk:
            home.written()
        for store in dict.fromkeys(home.shelf.store for home in on_disk):
            self._clones[store] = store.clone(session.comm.size)
        for batch in batches:
            item = _Item(batch.keep(self._keep))
            for state in batch.states:
                cut = cuts.get(state.flat, FlatCut())
                item.flats.append((cut, state.first, self._bare(state.flat, cut)))
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
