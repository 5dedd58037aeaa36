"""Writing a checkpoint: every rank its own file, aside; then the manifest, and the name last."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.contents import Values, encode_values, state_pieces, weight_pieces
from wherry.checkpoint.errors import CheckpointError, TagsDiffer, describe, on_first, together
from wherry.checkpoint.files import byte_view, write_text
from wherry.checkpoint.format import WEIGHT, Entry, Manifest, Piece, RankFiles, Scalar
from wherry.checkpoint.reshard import Run
from wherry.checkpoint.session import Session, aliases, plain_tensors
from wherry.checkpoint.staging import Staging, why_not_behind
from wherry.native.checksum import crc32
from wherry.observe.memory import format_bytes
from wherry.observe.progress import Progress
from wherry.sharding.unit import Flat

if TYPE_CHECKING:
    from wherry.config import Config

# Bytes of header set aside for each tensor beside its name, and how many a slot is expected to have at most.
_ENTRY_BYTES = 160
_STATES_OF_A_SLOT = 6
# Seconds between looks of rank 0 for what the others have written behind training.
PAUSE = 0.02


def save(
    session: Session,
    config: Config,
    folder: Path,
    tag: str | None,
    client_state: dict[str, Any],
    keep: Callable[[Save], None],
    *,
    latest: bool = True,
    exclude_frozen: bool = False,
) -> None:
    """Write a checkpoint of everything; every rank calls it. `keep` gets what goes on to be written behind training."""
    begin = time.perf_counter()
    comm = session.comm
    tag = folders.step_tag(session.counts.global_steps) if tag is None else tag
    tag = _agree_on_tag(session, tag, config.checkpoint.tag_validation)
    what = f"saving {folder / tag}"
    _tell_of_window(session, what)
    encoded: list[Values] = []
    steps = session.optimizer_steps()
    # What cannot be stored is found before anything is written.
    together(comm, what, lambda: encoded.append(encode_values(session, client_state, steps, exclude_frozen)))
    plan = _SavePlan.of(session, exclude_frozen)
    behind = config.wherry.checkpoint.async_save
    if behind:
        reason = why_not_behind(session, plan.shares, (tensor for tensor, _ in plan.plain.values()))
        behind = reason is None
        if reason is not None and comm.rank == 0:
            session.log.warning("%s: training stands still meanwhile, as %s", what, reason)
    job = Save(session, config, plan, encoded[0], folder / tag, latest, begin)
    if not behind:
        job.run(session, plan)
        return
    keep(job)  # before it begins: Ctrl-C may come as soon as it has
    job.run_behind(session, plan)


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
            raise TagsDiffer(f"save_checkpoint: the ranks gave different tags ({told}); give one on every rank")
        if session.comm.rank == 0:
            session.log.warning("save_checkpoint: the ranks gave different tags (%s); rank 0's is used", told)
    return tags[0]


# What a rank writes.


@dataclass
class _SavePlan:
    """What a rank writes, settled before it begins."""

    # Of each flat, what of this rank's shard.
    shares: dict[Flat, tuple[int, int]]
    # Buffers and the like that this rank writes, and the addend they go under.
    plain: dict[str, tuple[torch.Tensor, int | None]]
    entries: dict[str, Entry]
    header_room: int

    @classmethod
    def of(cls, session: Session, exclude_frozen: bool) -> _SavePlan:
        tensors = plain_tensors(session, exclude_frozen=exclude_frozen)
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

    def pieces(self, session: Session, tag: str) -> Iterator[Piece | Scalar]:
        """All that this rank writes; each is valid until the next is asked for."""
        with Progress(f"saving {tag}", len(self.shares), unit="flats", rank=session.comm.rank) as progress:
            for flat, share in self.shares.items():
                yield from state_pieces(session, flat, share)
                yield from weight_pieces(session, flat, share)
                progress.advance()
        yield from self.plain_pieces()


def _entries(session: Session, tensors: dict[str, torch.Tensor], exclude_frozen: bool) -> dict[str, Entry]:
    tied = aliases(session.module)
    entries: dict[str, Entry] = {}

    def made(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Entry:
        return Entry(shape, str(dtype).removeprefix("torch."), kind, tuple(tied.get(name, ())))

    for flat in session.flats:
        kind = "parameter" if flat.trainable else "frozen"
        for slot in flat.layout.slots:
            whole = session.logical(slot)
            if entries.setdefault(whole.name, made(whole.name, whole.shape, flat.dtype, kind)).kind != kind:
                raise CheckpointError(
                    f"{whole.name}: some of its tiles are frozen and others are not; freeze all or none"
                )
    if exclude_frozen:
        entries = {name: entry for name, entry in entries.items() if entry.kind != "frozen"}
    for name, tensor in tensors.items():
        entries[name] = made(name, tuple(tensor.shape), tensor.dtype, "buffer")
    names = dict.fromkeys(session.whole_name(name) for name, _ in session.module.named_parameters())
    order = {name: place for place, name in enumerate(names)}
    return dict(sorted(entries.items(), key=lambda item: order.get(item[0], len(order))))


def _plain_share(session: Session, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int | None]]:
    """The first rank that has a buffer writes it; another does if its own differs, as statistics of its own data."""
    comm = session.comm
    if comm.size == 1:
        return {name: (tensor, None) for name, tensor in tensors.items()}
    mine = {name: crc32(byte_view(tensor.detach().to("cpu").contiguous())) for name, tensor in tensors.items()}
    shares: dict[str, tuple[torch.Tensor, int | None]] = {}
    digests = comm.gather_objects(mine)
    for name, tensor in tensors.items():
        first = next(rank for rank, theirs in enumerate(digests) if name in theirs)
        if first == comm.rank:
            shares[name] = (tensor, None)
        elif mine[name] != digests[first][name]:
            shares[name] = (tensor, comm.rank)
    return shares


# Writing it.


class Save:
    """One save, from an empty folder to a finished checkpoint. It keeps no session, which would keep an engine that is
    closed."""

    def __init__(
        self, session: Session, config: Config, plan: _SavePlan, encoded: Values, path: Path, latest: bool, begin: float
    ) -> None:
        self.path = path
        self._what = f"saving {path}"
        self._begin = begin
        self._encoded = encoded
        self._latest = latest
        self._keep_last = config.wherry.checkpoint.keep_last
        self._timeout = config.wherry.timeout_s
        self._log = session.log
        self._rank, self._ranks = session.comm.rank, session.comm.size
        # Whether this is the first rank of a pipeline's stage, which knows of all that the stage holds.
        self._first_of_stage = session.data.rank == session.tensor.rank == 0
        self._partial: folders.Partial | None = None  # of rank 0

        def begun() -> Path:
            self._partial = folders.Partial(path.parent, path.name)
            return self._partial.path

        try:
            partial = on_first(session.comm, self._what, begun)
        except BaseException:
            if self._partial is not None:
                self._partial.drop()
            raise
        # This rank's part; on rank 0 it becomes that of all.
        self._manifest = Manifest.of_now(
            path.name,
            self._ranks,
            plan.entries,
            config=session.config if self._rank == 0 else {},
            placement=session.placement,
        )
        self._files = RankFiles(partial, self._rank, plan.header_room, self._manifest)
        self._stall = ""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def wait(self) -> None:
        """Return when this rank's part is on the disk; on rank 0, when the checkpoint is complete."""
        if self._thread is not None and self._thread.ident is not None:  # else Ctrl-C came before it began
            self._thread.join()
        if self._failure is not None:
            raise CheckpointError(f"{self._what} in the background: {describe(self._failure)}") from self._failure

    def run(self, session: Session, plan: _SavePlan) -> None:
        """Write it while training stands still."""
        try:
            parts = together(session.comm, self._what, lambda: self._write(plan.pieces(session, self.path.name)))
            on_first(session.comm, self._what, lambda: self._commit(parts))
        except BaseException:
            self._abandon()
            raise

    def run_behind(self, session: Session, plan: _SavePlan) -> None:
        """Copy everything, or begin to, and go on in a thread."""
        staging = Staging(session)
        meeting = FileRendezvous(self._files.partial, self._rank)
        try:
            together(session.comm, self._what, meeting.come)
            copying = f"copying states for {self.path}"
            together(session.comm, copying, lambda: staging.take(session, plan.shares, plan.plain_pieces()))
            self._encoded = self._encoded.copied()
        except BaseException:
            staging.release()
            self._abandon()
            raise
        # Not a daemon: a program that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._behind, args=(staging, meeting), name=f"save {self.path.name}")
        self._stall = f", training waited {time.perf_counter() - self._begin:.2f} s"
        self._thread.start()

    def _behind(self, staging: Staging, meeting: FileRendezvous) -> None:
        """No collective may be called here, so the ranks meet in the folder: each leaves a record of its files."""
        try:
            meeting.report(self._write(staging.pieces()).to_text())
            if self._rank == 0:
                parts: list[Manifest] = []
                folder = self._files.partial
                meeting.gather(self._ranks, self._timeout, lambda text: parts.append(Manifest.from_text(text, folder)))
                self._commit(parts)
        except Exception as error:
            self._failure = error
            self._log.error("%s behind training has failed: %s", self._what, describe(error))
            self._abandon()
            staging.release()  # the error's frames would keep the copies until somebody waits
            meeting.give_up()

    def _write(self, pieces: Iterable[Piece | Scalar]) -> Manifest:
        part, encoded = self._manifest, self._encoded
        scalars: dict[str, dict[str, float]] = {}
        for item in pieces:
            if isinstance(item, Scalar):
                scalars.setdefault(item.name, {})[item.state] = item.value
            else:
                self._files.put_piece(item)
        for name, tensor in encoded.tensors.items():
            part.tensors[name] = self._files.put(name, tensor.detach().contiguous())
        self._files.finish()
        part.ranks, part.engine = [encoded.rank], encoded.engine
        if scalars or "optimizer" in part.engine:
            part.engine.setdefault("optimizer", {})["scalars"] = scalars
        if not self._first_of_stage:
            part.entries = {name: entry for name, entry in part.entries.items() if entry.states}
        return part

    def _commit(self, parts: list[Manifest]) -> None:
        """On rank 0: the manifest from all parts, the name, the pointer; then old ones go."""
        assert self._partial is not None
        manifest = parts[0]
        for part in parts[1:]:
            manifest.merge(part)
        self._partial.commit(manifest, latest=self._latest)
        if self._keep_last is not None:
            try:
                for gone in folders.prune(self.path.parent, self._keep_last, self.path.name):
                    self._log.info("%s: deleted, as the last %d are kept", self.path.parent / gone, self._keep_last)
            except (OSError, CheckpointError) as error:  # the checkpoint itself is there
                self._log.warning("%s: earlier checkpoints stay (%s)", self.path, describe(error))
        seconds = time.perf_counter() - self._begin
        self._log.info("saved %s: %s in %.2f s%s", self.path, format_bytes(manifest.bytes), seconds, self._stall)

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 may have given up before, and the folder be gone
            self._files.drop()
        if self._partial is not None:
            self._partial.drop()


class FileRendezvous:
    """How ranks that write behind training meet: by small files in the folder that is written, never by a collective.

    Each has a file as long as it may still come. A disk that takes nothing new still lets go of it.
    """

    def __init__(self, partial: Path, rank: int) -> None:
        self._partial = partial
        self._rank = rank

    def come(self) -> None:
        self._note(self._rank).touch()

    def report(self, text: str) -> None:
        """This rank has written its part; `text` is its record of it."""
        write_text(self._record(self._rank), text)

    def give_up(self) -> None:
        """This rank will not come. It tells why itself."""
        with contextlib.suppress(OSError):  # the folder may be gone
            self._note(self._rank).unlink(missing_ok=True)

    def gather(self, ranks: int, timeout: float, take: Callable[[str], None]) -> None:
        """Hand every rank's record to `take`, in rank order. Raises as soon as any rank has given up, and names it;
        and names those that are not there when none has come for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        waited = list(range(ranks))
        while waited:
            there = {path.name for path in self._partial.iterdir()}
            late = [rank for rank in waited if self._record(rank).name not in there]
            gone = [rank for rank in late if self._note(rank).name not in there]
            if gone:
                raise CheckpointError(f"rank {gone[0]} could not write its part")
            if waited[0] not in late:
                rank = waited.pop(0)
                take(self._record(rank).read_text(encoding="utf-8"))
                self._record(rank).unlink()
                self._note(rank).unlink()
                deadline = time.monotonic() + timeout
            elif time.monotonic() > deadline:
                who = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late[:8]))} have"
                raise CheckpointError(
                    f"{who} not written {'its' if len(late) == 1 else 'their'} part in {timeout:g} s; if the disk is "
                    'only slow, raise "wherry": {"timeout_s": ...}'
                )
            else:
                time.sleep(PAUSE)

    def _note(self, rank: int) -> Path:
        return self._partial / f"{rank}.writing"

    def _record(self, rank: int) -> Path:
        return self._partial / f"{rank}.part"
