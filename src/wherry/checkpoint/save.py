"""Writing a checkpoint: every rank its own file, aside; then the manifest, and the name last."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.contents import Piece, Scalar, Values, encode_values, state_pieces, weight_pieces
from wherry.checkpoint.errors import CheckpointError, describe, on_first, together
from wherry.checkpoint.files import host_parts
from wherry.checkpoint.format import WEIGHT, Entry, Manifest
from wherry.checkpoint.rank_files import RankFiles, Rendezvous
from wherry.checkpoint.reshard import Run
from wherry.checkpoint.session import Session, aliases, plain_tensors
from wherry.checkpoint.staging import Staging, why_not_behind
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
        self.stall = 0.0
        self.seconds = 0.0
        self.bytes = 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

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
    _tell_of_window(session, what)
    encoded: list[Values] = []
    steps = session.optimizer_steps()
    # What cannot be stored is found before anything is written.
    together(comm, what, lambda: encoded.append(encode_values(session, options.client_state, steps)))
    plan = _Plan.of(session, options.exclude_frozen)
    behind = options.background
    if behind:
        reason = why_not_behind(session, plan.shares, (tensor for tensor, _ in plan.plain.values()))
        behind = reason is None
        if reason is not None and comm.rank == 0:
            session.log.warning("%s: training stands still meanwhile, as %s", what, reason)
    partial = on_first(comm, what, lambda: folders.begin(folder, tag))
    saved = Saved(folder / tag)
    job = _Job(session, plan, encoded[0], partial, tag, options, saved, begin)
    if behind:
        job.start(session, plan)
    else:
        job.run(session, plan)
        saved.stall = time.perf_counter() - begin
    return saved


def _tell_of_window(session: Session, what: str) -> None:
    """What is saved is of the last update, also within an accumulation window."""
    if not session.micro_batches:
        return
    if session.complete and session.updater is not None and session.updater.policy.when == "in_backward":
        raise CheckpointError(
            f"{what}: this window's backward has updated weights already (the update policy is in_backward), and its "
            "step() has not been called; call step() first, or save before the window's last backward"
        )
    if session.comm.rank == 0:
        session.log.warning(
            "%s: %d of the %d micro-batches of this accumulation window have run, and are not in it: it is of the last "
            "update, and the window begins anew where it is loaded",
            what, session.micro_batches, session.accumulation,
        )  # fmt: skip


def _agree_on_tag(session: Session, tag: str, validation: str) -> str:
    tags = together(session.comm, "save_checkpoint", lambda: folders.check_tag(tag))
    if len(set(tags)) > 1 and validation != "IGNORE":
        told = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(tags))
        if validation == "FAIL":
            raise CheckpointError(f"save_checkpoint: the ranks gave different tags ({told}); give one on every rank")
        if session.comm.rank == 0:
            session.log.warning("save_checkpoint: the ranks gave different tags (%s); rank 0's is used", told)
    return tags[0]


@dataclass
class _Plan:
    """What a rank writes, settled before it begins."""

    # Of each flat, what of this rank's shard.
    shares: dict[Flat, tuple[int, int]]
    # Buffers and the like that this rank writes, and the addend they go under.
    plain: dict[str, tuple[torch.Tensor, int | None]]
    entries: dict[str, Entry]
    header_room: int

    @classmethod
    def of(cls, session: Session, exclude_frozen: bool) -> _Plan:
        tensors = plain_tensors(session)
        for name in [name for name, tensor in tensors.items() if tensor.layout is not torch.strided]:
            del tensors[name]
            session.log.info("%s: a sparse buffer is not saved; it stays as the model makes it", name)
        names = [session.whole_name(slot.name) for flat in session.flats for slot in flat.layout.slots]
        room = sum((len(name) + _ENTRY_BYTES) * _STATES_OF_A_SLOT for name in names) + 4096
        entries = _entries(session, tensors, exclude_frozen)
        shares = {flat: share for flat, share in session.shares().items() if flat.trainable or not exclude_frozen}
        return cls(shares, _plain_share(session, tensors), entries, room)

    def plain_pieces(self) -> Iterator[Piece]:
        for name, (tensor, addend) in self.plain.items():
            values = tensor.detach().contiguous().reshape(-1)
            yield Piece(name, WEIGHT, Run.of(tuple(tensor.shape)), values, addend=addend)

    def pieces(self, session: Session) -> Iterator[Piece | Scalar]:
        """All that this rank writes; each is valid until the next is asked for."""
        total, rank = len(self.shares), session.comm.rank
        with Progress("saving", total, unit="flats", rank=rank) as progress:
            for flat, share in self.shares.items():
                yield from state_pieces(session, flat, share)
                yield from weight_pieces(session, flat, share)
                progress.advance()
        yield from self.plain_pieces()


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
    """One save, from an empty folder to a finished checkpoint. It keeps no session, which would keep an engine that is
    closed."""

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
        self.encoded = encoded
        self.partial = partial
        self.tag = tag
        self.options = options
        self.saved = saved
        self.begin = begin
        self.rank, self.ranks = session.comm.rank, session.comm.size
        self.log = session.log
        # Whether this is the first rank of a pipeline's stage, which knows of all that the stage holds.
        self.first_of_stage = session.data.rank == session.tensor.rank == 0
        # This rank's part; on rank 0 it becomes that of all.
        self.manifest = Manifest(
            tag=tag,
            created=datetime.now(UTC).isoformat(),
            versions=versions(),
            world_size=self.ranks,
            entries=plan.entries,
            engine={},
            ranks=[],
            config=session.config if self.rank == 0 else {},
            files={},
            placement=session.placement,
        )
        self.files = RankFiles(partial, self.rank, plan.header_room, self.manifest)
        self.rendezvous = Rendezvous(partial, self.rank)

    def run(self, session: Session, plan: _Plan) -> None:
        """Write it while training stands still."""
        comm, what = session.comm, f"saving {self.saved.path}"
        try:
            parts = together(comm, what, lambda: self._write(plan.pieces(session)))
            on_first(comm, what, lambda: self._commit(parts))
        except BaseException:
            self._abandon()
            raise

    def start(self, session: Session, plan: _Plan) -> None:
        """Copy everything, or begin to, and go on in a thread."""
        comm, path = session.comm, self.saved.path
        staging = Staging(session)
        try:
            together(comm, f"saving {path}", self.rendezvous.open)
            together(
                comm, f"copying states for {path}", lambda: staging.take(session, plan.shares, plan.plain_pieces())
            )
            self.encoded = self.encoded.copied()
        except BaseException:
            staging.release()
            self._abandon()
            raise
        # Not a daemon: a program that ends waits for its last checkpoint.
        thread = threading.Thread(target=self._behind, args=(staging,), name=f"save {self.tag}")
        self.saved.stall = time.perf_counter() - self.begin
        try:
            thread.start()
        except RuntimeError:  # no more threads; the other ranks are under way, so it is written here
            self._behind(staging)
            self.saved.wait()
            return
        self.saved._thread = thread

    def _behind(self, staging: Staging) -> None:
        """No collective may be called here, so the ranks meet in the folder: each leaves a record of its files."""
        try:
            self.rendezvous.report(self._write(staging.pieces()).to_text())
            if self.rank == 0:
                parts: list[Manifest] = []
                self.rendezvous.gather(
                    self.ranks,
                    self.options.timeout_s,
                    lambda text: parts.append(Manifest.from_text(text, self.partial)),
                )
                self._commit(parts)
        except Exception as error:
            self.saved._failure = error
            self.log.error("saving %s behind training has failed: %s", self.saved.path, describe(error))
            self._abandon()
            staging.release()  # the error's frames would keep the copies until somebody waits
            if self.rank:
                self.rendezvous.fail(describe(error))

    def _write(self, pieces: Iterable[Piece | Scalar]) -> Manifest:
        part, encoded = self.manifest, self.encoded
        scalars: dict[str, dict[str, float]] = {}
        for item in pieces:
            if isinstance(item, Scalar):
                scalars.setdefault(item.name, {})[item.state] = item.value
            else:
                self.files.put_piece(item)
        for name, tensor in encoded.tensors.items():
            part.tensors[name] = self.files.put(name, tensor.detach().contiguous())
        self.files.finish()
        part.ranks, part.engine = [encoded.rank], encoded.engine
        if scalars or "optimizer" in part.engine:
            part.engine.setdefault("optimizer", {})["scalars"] = scalars
        if not self.first_of_stage:
            part.entries = {name: entry for name, entry in part.entries.items() if entry.states}
        self.saved.bytes = part.bytes
        return part

    def _commit(self, parts: list[Manifest]) -> None:
        """On rank 0: the manifest from all parts, the name, the pointer; then old ones go."""
        manifest = parts[0]
        for part in parts[1:]:
            manifest.merge(part)
        manifest.engine["frozen_excluded"] = self.options.exclude_frozen
        manifest.check_complete()
        path = folders.commit(self.partial, self.tag, manifest, latest=self.options.save_latest)
        self.saved.seconds = time.perf_counter() - self.begin
        if self.options.keep_last is not None:
            for gone in folders.prune(path.parent, self.options.keep_last):
                self.log.info("%s: deleted, as the last %d are kept", path.parent / gone, self.options.keep_last)
        stall = f", training waited {self.saved.stall:.2f} s" if self.saved.stall else ""
        self.log.info("saved %s: %s in %.2f s%s", path, format_bytes(manifest.bytes), self.saved.seconds, stall)

    def _abandon(self) -> None:
        self.files.abandon()
        if self.rank == 0:
            folders.discard(self.partial)


@functools.cache
def _own_version() -> str:
    return metadata.version("wherry")  # which reads a file


def versions() -> dict[str, str]:
    return {"wherry": _own_version(), "torch": torch.__version__}
