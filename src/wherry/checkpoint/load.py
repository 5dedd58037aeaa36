"""Reading a checkpoint into an engine of any number of ranks, stage, tier and grouping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.contents import is_scalar, restore_random_state, spread_random_state
from wherry.checkpoint.errors import CheckpointError, on_first, together
from wherry.checkpoint.format import WEIGHT, Manifest, read_manifest
from wherry.checkpoint.reader import CheckpointReader
from wherry.checkpoint.session import Session, StepCounts, aliases, extra_states, plain_tensors
from wherry.native import Blocks8, quantize
from wherry.observe.progress import Progress
from wherry.sharding.layout import SegmentSpan, Slot
from wherry.sharding.unit import Flat

# Names that an error lists before it only counts.
_LISTED = 8
_NOT_STRICT = "load_module_strict=False loads what both have"


@dataclass
class LoadOptions:
    """What a call asks of a load."""

    strict: bool = True
    optimizer: bool = True
    lr_scheduler: bool = True
    counts: bool = True


@dataclass
class LoadedCheckpoint:
    """What was loaded: from where, and what the engine has to take over."""

    path: Path
    client_state: dict[str, Any]
    counts: StepCounts | None


def load(session: Session, folder: Path, tag: str | None, options: LoadOptions) -> LoadedCheckpoint | None:
    """Load a checkpoint; every rank calls it. None where there is none. An engine is changed by a whole one only."""
    comm = session.comm
    if any(flat.pins for flat in session.flats):
        raise CheckpointError(f"loading from {folder}: inside wherry.gathered, which keeps the weights; leave it first")
    found = on_first(comm, f"loading from {folder}", lambda: folders.locate(folder, tag))
    if found is None:
        if tag is None:
            session.log.warning("%s holds no checkpoint: nothing is loaded", folder)
        return None
    path = folder / found
    what = f"loading {path}"
    manifest = _verified(session, path)
    fits = together(comm, what, lambda: _check_fits(session, manifest, options))
    _compare(session, path, manifest, fits, options)
    with CheckpointReader(path, manifest) as reader:
        loader = _Loader(session, reader, options, fits[comm.rank])
        together(comm, what, loader.run)
        loader.refresh()
        counts = loader.counts() if options.counts else None
        client_state = reader.value(manifest.engine.get("client_state", {}))
    session.log.info("loaded %s: step %d, written by %d ranks", path, manifest.step, manifest.world_size)
    return LoadedCheckpoint(path, client_state, counts)


def _verified(session: Session, path: Path) -> Manifest:
    """The manifest, once every byte of the checkpoint has been checked; the ranks divide the bytes."""
    comm = session.comm

    def check() -> list[str]:
        manifest = read_manifest(path)
        return folders.damage(path, manifest, comm.rank, comm.size)

    try:
        problems = [problem for found in together(comm, f"loading {path}", check) for problem in found]
        if problems:
            raise CheckpointError(f"loading {path}: {'; '.join(problems[:_LISTED])}")
    except CheckpointError as error:
        other = on_first(comm, "looking for a whole checkpoint", lambda: folders.offer(path.parent, path.name))
        raise CheckpointError(f"{error}. Nothing was loaded; {other}") from error
    return read_manifest(path)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _check_fits(session: Session, manifest: Manifest, options: LoadOptions) -> dict[str, str]:
    """The entry that each parameter and buffer of this rank is loaded from: its own, one that it was tied to there, or
    one that it is tied to here. Raises what does not fit, before anything is changed."""
    parameters = [session.logical(slot) for flat in session.flats for slot in flat.layout.slots]
    shapes = {logical.name: logical.shape for logical in parameters}
    shapes |= {n: tuple(t.shape) for n, t in plain_tensors(session).items() if t.layout is torch.strided}
    entries, tied = manifest.entries, aliases(session.module)
    known = {alias: name for name, entry in entries.items() for alias in entry.aliases}
    known |= {name: name for name in entries}
    names = {}
    for name in shapes:
        there = next((known[each] for each in (name, *tied.get(name, ())) if each in known), None)
        if there is not None:
            names[name] = there
    wrong = [
        f"{name} has shape {tuple(entries[there].shape)} in the checkpoint and {shapes[name]} in the model"
        for name, there in names.items()
        if entries[there].shape != shapes[name]
    ]
    if wrong:
        raise CheckpointError("; ".join(wrong[:_LISTED]))
    # Without the frozen ones: those of this engine that are frozen may lack.
    frozen = {session.whole_name(name) for name, p in session.module.named_parameters() if not p.requires_grad}
    left_out = frozen if manifest.engine.get("frozen_excluded") else set()
    missing = [name for name in shapes if name not in names and name not in left_out]
    if options.strict and missing:
        raise CheckpointError(f"it lacks {_listed(missing)}; {_NOT_STRICT}")
    if options.optimizer and session.optimizer is not None:
        _check_optimizer(session, manifest)
    return names


def _compare(
    session: Session, path: Path, manifest: Manifest, fits: list[dict[str, str]], options: LoadOptions
) -> None:
    """Raise for what the checkpoint has and no rank's part of the model; tell of what was tied and is not."""
    users: dict[str, dict[str, None]] = {}
    for fit in fits:
        for name, there in fit.items():
            users.setdefault(there, {})[name] = None
    tied = {other: name for name, others in aliases(session.module).items() for other in others}
    strangers = [
        f"{name} (which is {tied[name]} here)" if name in tied else name
        for name in manifest.entries
        if name not in users
    ]
    if strangers and options.strict:
        raise CheckpointError(f"loading {path}: it has {_listed(strangers)}, which the model has not; {_NOT_STRICT}")
    lines = [f"it has {_listed(strangers)}, which the model has not"] if strangers else []
    for there, names in users.items():
        if len(names) > 1:
            told = " and ".join(sorted(names, key=lambda name: name != there))
            lines.append(f"{told} were one tensor there and are not tied here: each begins with its values and state")
    for line in lines if session.comm.rank == 0 else ():
        session.log.warning("%s: %s", path, line)


def _check_optimizer(session: Session, manifest: Manifest) -> None:
    hint = "load_optimizer_states=False loads the weights alone"
    saved = manifest.engine.get("optimizer")
    if saved is None:
        raise CheckpointError(f"it holds no optimizer; {hint}")
    assert session.optimizer is not None
    mine = type(session.optimizer.instance).__name__
    wanted: set[str] = set()
    for state in session.states.values():
        if session.spans(state.flat):
            with state.opened() as segments:
                wanted |= {name for values in segments for name, value in values.items() if not is_scalar(value)}
            break
    wanted -= {"master"}
    there = set(manifest.state_names())
    if wanted and there and wanted != there:
        raise CheckpointError(
            f"its optimizer is {saved['type']} with {_listed(sorted(there))}, the engine's is {mine} with "
            f"{_listed(sorted(wanted))}; {hint}"
        )
    if wanted and not there and saved["steps"]:
        raise CheckpointError(f"its {saved['type']} keeps no state, {mine} keeps {_listed(sorted(wanted))}; {hint}")


class _Loader:
    def __init__(self, session: Session, reader: CheckpointReader, options: LoadOptions, names: dict[str, str]) -> None:
        self.session = session
        self.names = names
        self.reader = reader
        self.manifest = reader.manifest
        self.options = options
        self.optimizer = options.optimizer and session.optimizer is not None
        self.steps = int(self.manifest.engine["optimizer"]["steps"]) if self.optimizer else 0

    @torch.no_grad()
    def run(self) -> None:
        """Everything that this rank reads by itself."""
        session = self.session
        if self.optimizer:
            self._load_groups()
            self._load_steps()  # before the states, which are of so many
        for unit in session.units:
            session.gatherer.release(unit)
        flats = list(session.flats)
        with Progress(f"loading {self.reader.folder}", len(flats), unit="flats", rank=session.comm.rank) as progress:
            for flat in flats:
                self._load_flat(flat)
                progress.advance()
        self._load_plain()
        self._load_values()

    def _has(self, slot: Slot) -> bool:
        return self.session.whole_name(slot.name) in self.names

    def _there(self, slot: Slot) -> str:
        """The entry that a slot is loaded from."""
        return self.names[self.session.whole_name(slot.name)]

    # Weights and moments.

    def _load_flat(self, flat: Flat) -> None:
        state = self.session.states.get(flat)
        if state is not None:
            with state.opened(write=True) as segments:
                for span, values in zip(self.session.spans(flat), segments, strict=True):
                    self._load_segment(flat, span, values)
        stateless = [slot for slot in self.session.without_state(flat) if self._has(slot)]
        if stateless:
            with flat.opened(write=True) as shard:
                for slot in stateless:
                    self._read(flat, slot, WEIGHT, shard, 0, shard.numel())

    def _load_segment(self, flat: Flat, span: SegmentSpan, values: dict[str, Any]) -> None:
        slot = flat.layout.slots[span.slot]
        if not self._has(slot):
            return
        self._read(flat, slot, WEIGHT, values["master"], span.start, span.stop)
        if not self.optimizer:
            return
        assert self.session.optimizer is not None
        group = self.session.optimizer.param_groups[span.group]
        for name in self.manifest.state_names():
            target = values.get(name)
            if name not in self.manifest.entries[self._there(slot)].states:
                # An optimizer of torch's makes its state at a parameter's first update: there was none.
                self.session.states[flat].begin_again(group, values, name)
            elif isinstance(target, Blocks8):
                self._load_blocks(flat, span, slot, name, target)
            else:
                if target is None:
                    dtype = self.reader.dtype(self._there(slot), name)
                    # Beside the master, which need not be on the device that computes.
                    device = values["master"].device
                    target = values[name] = torch.zeros(span.stop - span.start, dtype=dtype, device=device)
                self._read(flat, slot, name, target, span.start, span.stop)
        scalars = self.manifest.engine["optimizer"]["scalars"]
        # By parameter; by group in checkpoints that count steps for all parameters together.
        found = scalars.get(self._there(slot)) or scalars.get(str(span.group), {})
        values.update({name: torch.tensor(value) for name, value in found.items()})

    def _load_blocks(self, flat: Flat, span: SegmentSpan, slot: Slot, name: str, target: Blocks8) -> None:
        found = self.session.run(flat, slot, span.start, span.stop)
        assert found is not None, (slot, span)
        if self.reader.read_codes(self._there(slot), name, found[0], target):
            return
        whole = torch.zeros(span.stop - span.start)
        self._read(flat, slot, name, whole, span.start, span.stop)
        quantize(whole, target)

    def _read(self, flat: Flat, slot: Slot, state: str, target: torch.Tensor, low: int, high: int) -> None:
        """Fill the part of a slot that lies in positions `low` to `high` of the shard, which `target` covers."""
        found = self.session.run(flat, slot, low, high)
        if found is not None:
            run, at = found
            self.reader.read(self._there(slot), state, run, target[at - low : at - low + run.numel])

    def refresh(self) -> None:
        """Make whole again what every rank holds whole and reads only its part of."""
        for flat in self.session.flats:
            if flat.resident and flat.layout.ranks > 1:
                self.session.gatherer.comm.all_gather(flat.whole, flat.shard_memory).wait()

    # Hyper-parameters.

    def _load_steps(self) -> None:
        fewer = self.manifest.engine["optimizer"].get("parameter_steps", {})
        for flat, state in self.session.states.items():
            for index, slot in enumerate(flat.layout.slots):
                if self._has(slot):
                    state.steps[index] = int(fewer.get(self._there(slot), self.steps))

    def _load_groups(self) -> None:
        """The groups' options, where the groups are the same; else the engine's own stay."""
        assert self.session.optimizer is not None
        saved = self.manifest.engine["optimizer"]["groups"]
        groups = self.session.optimizer.param_groups
        group_of = {name: index for index, group in enumerate(saved) for name in group["parameters"]}
        name_of = self.session.whole_name
        mine = {(name_of(slot.name), slot.group) for flat in self.session.states for slot in flat.layout.slots}
        if len(saved) != len(groups) or any(group_of.get(name, group) != group for name, group in mine):
            self.session.log.warning(
                "%s: its parameter groups are others than the engine's, whose learning rates and other options stay",
                self.reader.folder,
            )
            return
        for group, given in zip(groups, saved, strict=True):
            group.update(self.reader.value(given["options"]))

    # Everything else.

    def _load_plain(self) -> None:
        """Buffers; one that differed between the ranks goes back to the rank that wrote it, if there are as many."""
        rank = self.session.comm.rank
        same_ranks = self.manifest.world_size == self.session.comm.size
        for name, tensor in plain_tensors(self.session).items():
            if name in self.names and tensor.layout is torch.strided:
                there = self.names[name]
                own = same_ranks and rank in self.reader.addends(there, WEIGHT)
                tensor.copy_(self.reader.tensor(there, WEIGHT, addend=rank if own else None))

    def _load_values(self) -> None:
        session, engine = self.session, self.manifest.engine
        extra = self.reader.value(engine["extra_state"])
        for key, module in extra_states(session.module).items():
            if key in extra:
                module.set_extra_state(extra[key])
        if self.optimizer and session.scaler.dynamic:
            session.scaler.load_state_dict(engine["loss_scale"])
        if self.options.lr_scheduler and session.lr_scheduler is not None:
            if "lr_scheduler" in engine:
                session.lr_scheduler.load_state_dict(self.reader.value(engine["lr_scheduler"]))
            else:
                session.log.warning(
                    "%s holds no learning rate schedule: the engine's stays as it is", self.reader.folder
                )
        if self.options.optimizer:
            self._load_rank_values()

    def _load_rank_values(self) -> None:
        session, ranks = self.session, self.manifest.ranks
        if not ranks:
            return
        rank = session.comm.rank
        mine = ranks[rank] if rank < len(ranks) else None
        if mine is not None:
            restore_random_state(self.reader.value(mine["rng"]), session.device)
        else:
            spread_random_state(hash((self.manifest.step, rank)) % 2**63, session.device)
        take = getattr(session.dataloader, "load_state_dict", None)
        if take is not None and "data" in ranks[min(rank, len(ranks) - 1)]:
            take(self.reader.value(ranks[min(rank, len(ranks) - 1)]["data"]))

    def counts(self) -> StepCounts:
        """Those of the last update: an older checkpoint may have been saved within an accumulation window."""
        engine = self.manifest.engine
        counts = StepCounts(
            **{key: self.reader.value(engine[key]) for key in StepCounts.__dataclass_fields__ if key in engine}
        )
        window = self.reader.value(engine.get("window", {}))
        if window.get("backwards") and self.session.comm.rank == 0:
            self.session.log.warning(
                "%s was saved after %d of the %d micro-batches of an accumulation window: it is loaded as of the last "
                "update before them, and the next window begins anew",
                self.reader.folder, window["backwards"], window["accumulation"],
            )  # fmt: skip
        counts.micro_steps -= window.get("steps", 0)
        return counts
