"""Writing a checkpoint: every rank its own file, aside; then the manifest, and the name last."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.collect import FlatCut, Piece, Scalar, cut_flat, flat_pieces, gradient_pieces
from wherry.checkpoint.copies import Copies, Down, host_bytes, parted, shortage, sums_on_device, what_goes_down
from wherry.checkpoint.errors import CheckpointError, describe, on_first, together
from wherry.checkpoint.files import host_parts
from wherry.checkpoint.held import Held
from wherry.checkpoint.manifest import WEIGHT, Entry, Manifest
from wherry.checkpoint.meeting import Meeting
from wherry.checkpoint.rank_files import Part, RankFiles
from wherry.checkpoint.session import Session, aliases, plain_tensors
from wherry.checkpoint.slices import Run
from wherry.checkpoint.state import Values, encode_values
from wherry.native.checksum import crc32
from wherry.observe.memory import format_bytes
from wherry.observe.progress import Progress
from wherry.sharding.unit import Flat

# Bytes of header set aside for each tensor beside its name, and how many a slot is expected to have at most.
_ENTRY_BYTES = 160
_STATES_OF_A_SLOT = 6


@dataclass
class SaveOptions:
    """What a config and a call ask of a save."""

    client_state: dict[str, Any] = field(default_factory=dict)
    save_latest: bool = True
    exclude_frozen: bool = False
    keep_last: int | None = None
    tag_validation: str = "WARN"
    background: bool = False
    timeout_s: float = 600.0


class Saved:
    """A save under way or done: where it is, how long training stood still for it, and what it took altogether."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Seconds; bytes are this rank's.
        self.stood = 0.0
        self.waited = 0.0
        self.seconds = 0.0
        self.bytes = 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def stall(self) -> float:
        """Seconds that training stood still: in the call, and where updates waited for states on disk to be read."""
        return self.stood + self.waited

    @property
    def behind(self) -> bool:
        """Whether it was left to be written behind training, and nobody has waited for it."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when this rank's part is on the disk; on rank 0, when the checkpoint is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"saving {self.path} in the background: {describe(failure)}") from failure


def save(session: Session, folder: Path, tag: str, options: SaveOptions) -> Saved:
    """Write a checkpoint of everything; every rank calls it. Returns once it is there, or being written behind."""
    begin = time.perf_counter()
    comm = session.comm
    tag = _agree_on_tag(session, tag, options.tag_validation)
    what = f"saving {folder / tag}"
    encoded: list[Values] = []
    steps, absent = session.optimizer_steps(), session.without_gradient()
    # What cannot be stored is found before anything is written.
    together(comm, what, lambda: encoded.append(encode_values(session, options.client_state, steps, absent)))
    plan = _Plan.of(session, options.exclude_frozen)
    downs: list[Down] = []
    behind = options.background and _has_room(session, plan, downs, what)
    partial = on_first(comm, what, lambda: folders.begin(folder, tag))
    saved = Saved(folder / tag)
    job = _Job(session, plan, encoded[0], partial, tag, options, saved, begin)
    if behind:
        job.start(downs)
    else:
        job.run()
        saved.stood = time.perf_counter() - begin
    return saved


def _agree_on_tag(session: Session, tag: str, validation: str) -> str:
    tags = together(session.comm, "save_checkpoint", lambda: folders.check_tag(tag))
    if len(set(tags)) > 1 and validation != "IGNORE":
        told = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(tags))
        if validation == "FAIL":
            raise CheckpointError(f"save_checkpoint: the ranks gave different tags ({told}); give one on every rank")
        if session.comm.rank == 0:
            session.log.warning("save_checkpoint: the ranks gave different tags (%s); rank 0's is used", told)
    return tags[0]


def _has_room(session: Session, plan: _Plan, downs: list[Down], what: str) -> bool:
    """Whether every machine has the memory to write behind training; the same on all ranks. Adds what goes down."""

    def look() -> int:
        downs.extend(what_goes_down(session, plan.cuts, plan.shares, plan.plain_pieces()))
        plain = (tensor for tensor, _ in plan.plain.values())
        return host_bytes(session, plan.cuts, plan.shares, plain)

    on_host = together(session.comm, what, look)[session.comm.rank]
    short = shortage(session, on_host, downs)
    if short is not None and session.comm.rank == 0:
        session.log.warning("%s: training stands still meanwhile, as %s", what, short)
    return short is None


@dataclass
class _Plan:
    """What a rank writes, settled before it begins."""

    shares: dict[Flat, tuple[int, int]]
    cuts: dict[Flat, FlatCut]
    # Buffers and the like that this rank writes, and the addend they go under.
    plain: dict[str, tuple[torch.Tensor, int | None]]
    entries: dict[str, Entry]
    header_room: int

    def plain_pieces(self) -> Iterator[Piece]:
        for name, (tensor, addend) in self.plain.items():
            values = tensor.detach().contiguous().reshape(-1)
            yield Piece(name, WEIGHT, Run.of(tuple(tensor.shape)), values, addend=addend)

    @classmethod
    def of(cls, session: Session, exclude_frozen: bool) -> _Plan:
        tensors = plain_tensors(session)
        for name in [name for name, tensor in tensors.items() if tensor.layout is not torch.strided]:
            del tensors[name]
            session.log.info("%s: a sparse buffer is not saved; it stays as the model makes it", name)
        names = [session.whole_name(slot.name) for flat in session.flats for slot in flat.layout.slots]
        room = sum((len(name) + _ENTRY_BYTES) * _STATES_OF_A_SLOT for name in names) + 4096
        entries = _entries(session, tensors, exclude_frozen)
        shares = session.shares()
        flats = [flat for flat in session.flats if flat.trainable or not exclude_frozen]
        cuts = {flat: cut_flat(session, flat, shares[flat]) for flat in flats}
        return cls(shares, cuts, _plain_share(session, tensors), entries, room)


def _entries(session: Session, tensors: dict[str, torch.Tensor], exclude_frozen: bool) -> dict[str, Entry]:
    tied = aliases(session.module)
    entries: dict[str, Entry] = {}
    for flat in session.flats:
        kind = "parameter" if flat.trainable else "frozen"
        for slot in flat.layout.slots:
            logical = session.logical(slot)
            other = entries.setdefault(
                logical.name,
                Entry(logical.shape, _dtype_name(flat.dtype), kind, tuple(tied.get(logical.name, ()))),
            )
            if other.kind != kind:
                raise CheckpointError(
                    f"{logical.name}: some of its tiles are frozen and others are not; freeze all or none"
                )
    if exclude_frozen:
        entries = {name: entry for name, entry in entries.items() if entry.kind != "frozen"}
    for name, tensor in tensors.items():
        entries[name] = Entry(tuple(tensor.shape), _dtype_name(tensor.dtype), "buffer", tuple(tied.get(name, ())))
    names = dict.fromkeys(session.whole_name(name) for name, _ in session.module.named_parameters())
    order = {name: place for place, name in enumerate(names)}
    return dict(sorted(entries.items(), key=lambda item: order.get(item[0], len(order))))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_share(session: Session, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int | None]]:
    """The first rank that has a buffer writes it; another does if its own differs, as statistics of its own data."""
    comm = session.comm
    if comm.size == 1:
        return {name: (tensor, None) for name, tensor in tensors.items()}
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    shares: dict[str, tuple[torch.Tensor, int | None]] = {}
    digests = comm.gather_objects(mine)
    for name, tensor in tensors.items():
        first = next(rank for rank, theirs in enumerate(digests) if name in theirs)
        if first == comm.rank:
            shares[name] = (tensor, None)
        elif mine[name] != digests[first][name]:
            shares[name] = (tensor, comm.rank)
    return shares


def _digest(tensor: torch.Tensor) -> int:
    crc = 0
    for part in host_parts(tensor.contiguous()):
        crc = crc32(part, crc)
    return crc


class _Job:
    """One save, from an empty folder to a finished checkpoint."""

    def __init__(
        self,
        session: Session,
        plan: _Plan,
        encoded: Values,
        partial: Path,
        tag: str,
        options: SaveOptions,
        saved: Saved,
        begin: float,
    ) -> None:
        self.session: Session | None = session
        self.plan = plan
        self.encoded = encoded
        self.partial = partial
        self.tag = tag
        self.options = options
        self.saved = saved
        self.begin = begin
        self.rank, self.ranks = session.comm.rank, session.comm.size
        self.log = session.log
        self.manifest = Manifest(
            tag=tag,
            created=datetime.now(UTC).isoformat(),
            versions=versions(),
            world_size=self.ranks,
            entries={},
            engine={},
            ranks=[],
            config=session.config,
            files={},
            placement=session.placement,
        )
        self.files = RankFiles(partial, self.rank, plan.header_room)
        self.meeting = Meeting(partial, self.rank)
        # What a save behind training did about states on disk.
        self.how = ""
        self.behind = False
        if session.data.rank == session.tensor.rank == 0:
            self.files.part.entries = plan.entries

    # While training stands still.

    def run(self) -> None:
        assert self.session is not None
        comm, what = self.session.comm, f"saving {self.saved.path}"
        try:
            parts = together(comm, what, lambda: self._write(self._pieces()))
            on_first(comm, what, lambda: self._commit(parts))
        except BaseException:
            self._abandon()
            raise

    # Behind training.

    def start(self, downs: list[Down]) -> None:
        """Begin copies of what rests in memory, hold what rests on disk as it is, and go on writing in a thread."""
        assert self.session is not None
        session = self.session
        copies = Copies(session)
        held = Held()
        self.behind = True

        def take() -> None:
            copies.take_down(downs)
            left = {flat: parted(session, flat, cut)[1] for flat, cut in self.plan.cuts.items()}
            beside = held.take(session, left, self.plan.shares)
            for flat, cut in left.items():
                if flat not in beside:
                    copies.take(flat_pieces(session, flat, cut))
                if not sums_on_device(session, flat):
                    copies.take(gradient_pieces(session, flat, self.plan.shares[flat]))
            if session.link.shared:
                copies.take(self.plan.plain_pieces())

        try:
            together(self.session.comm, f"saving {self.saved.path}", self.meeting.open)
            together(self.session.comm, f"copying states for {self.saved.path}", take)
            self.encoded = self.encoded.copied()
        except BaseException:
            copies.release()
            held.release()
            self._abandon()
            raise
        # The thread has copies and records alone: a session would keep an engine that is closed.
        self.session, self.plan = None, replace(self.plan, shares={}, cuts={}, plain={})
        # Not a daemon: a program that ends waits for its last checkpoint.
        thread = threading.Thread(target=self._behind, args=(held, copies), name=f"save {self.tag}")
        self.saved.stood = time.perf_counter() - self.begin
        try:
            thread.start()
        except RuntimeError:  # no more threads; the other ranks are under way, so it is written here
            self._behind(held, copies)
            self.saved.wait()
            return
        self.saved._thread = thread

    def _behind(self, held: Held, copies: Copies) -> None:
        """No collective may be called here, so the ranks meet in the folder: each leaves a record of its part."""
        try:
            beside = held.pieces()
            try:
                held.copy()
                part = self._write(chain(beside, copies.pieces()))
            finally:
                beside.close()  # gives back what it was reading into, while there is a pool
                held.release()
                self.saved.waited = held.waited
                self.how = held.how
            self.meeting.report(part.to_text())
            if self.rank == 0:
                parts: list[Part] = []
                self.meeting.gather(self.ranks, self.options.timeout_s, lambda text: parts.append(Part.from_text(text)))
                self._commit(parts)
        except Exception as error:
            self.saved._failure = error
            copies.release()  # the error's frames would keep them until somebody waits
            self.log.error("saving %s behind training has failed: %s", self.saved.path, describe(error))
            self._abandon()
            if self.rank:
                self.meeting.fail(describe(error))

    # Both.

    def _pieces(self) -> Iterator[Piece | Scalar]:
        """All that this rank writes; each is valid until the next is asked for."""
        session, plan = self.session, self.plan
        assert session is not None
        with Progress(f"saving {self.tag}", len(plan.cuts), unit="flats", rank=self.rank) as progress:
            for flat, cut in plan.cuts.items():
                yield from flat_pieces(session, flat, cut)
                yield from gradient_pieces(session, flat, plan.shares[flat])
                progress.advance()
        yield from plan.plain_pieces()

    def _write(self, pieces: Iterable[Piece | Scalar]) -> Part:
        part = self.files.part
        for item in pieces:
            if isinstance(item, Scalar):
                part.scalars.setdefault(item.name, {})[item.state] = item.value
            else:
                self.files.put_piece(item, self.plan.entries[item.name].shape)
        for name, tensor in self.encoded.tensors.items():
            part.tensors[name] = self.files.put(name, tensor.detach().contiguous())
        part.engine, part.rank_values = self.encoded.engine, self.encoded.rank
        part = self.files.finish()
        self.saved.bytes = sum(record.bytes for record in part.files.values())
        return part

    def _commit(self, parts: list[Part]) -> None:
        """On rank 0: the manifest from all parts, the name, the pointer; then old ones go."""
        manifest = self.manifest
        manifest.engine = parts[0].engine
        scalars: dict[str, dict[str, float]] = {}
        tensors: dict[str, str] = {}
        for part in parts:
            manifest.entries.update(part.entries)
        for part in parts:
            manifest.files.update(part.files)
            manifest.ranks.append(part.rank_values)
            tensors.update(part.tensors)
            for name, found in part.scalars.items():
                scalars.setdefault(name, {}).update(found)
            for name, state, piece in part.slices:
                manifest.entries[name].states.setdefault(state, []).append(piece)
        manifest.tensors = tensors
        manifest.engine["frozen_excluded"] = self.options.exclude_frozen
        if "optimizer" in manifest.engine:
            manifest.engine["optimizer"]["scalars"] = scalars
        manifest.check_complete()
        path = folders.commit(self.partial, self.tag, manifest, latest=self.options.save_latest)
        self.saved.seconds = time.perf_counter() - self.begin
        if self.options.keep_last is not None:
            for gone in folders.prune(path.parent, self.options.keep_last):
                self.log.info("%s: deleted, as the last %d are kept", path.parent / gone, self.options.keep_last)
        behind = f", training waited {self.saved.stall:.2f} s" if self.behind else ""
        how = f"; {self.how}" if self.how else ""
        self.log.info("saved %s: %s in %.2f s%s%s", path, format_bytes(manifest.bytes), self.saved.seconds, behind, how)

    def _abandon(self) -> None:
        self.files.abandon()
        if self.rank == 0:
            folders.discard(self.partial)


@functools.cache
def _own_version() -> str:
    return metadata.version("wherry")  # which reads a file


def versions() -> dict[str, str]:
    return {"wherry": _own_version(), "torch": torch.__version__}
