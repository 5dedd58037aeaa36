"""Reading a checkpoint into an engine of any number of ranks, stage, tier and grouping."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from wherry.checkpoint import folder as folders
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.contents import random_state, restore_random_state, spread_random_state
from wherry.checkpoint.errors import CheckpointError, describe, on_first, together
from wherry.checkpoint.format import WEIGHT, Manifest
from wherry.checkpoint.reader import CheckpointReader
from wherry.checkpoint.session import Session, StepCounts, aliases, extra_states, plain_tensors
from wherry.errors import one_line
from wherry.native import Blocks8, quantize
from wherry.observe.progress import Progress
from wherry.sharding.layout import SegmentSpan, Slot
from wherry.sharding.quantized import scales
from wherry.sharding.unit import Flat
from wherry.update.optimizer_states import FlatState
from wherry.update.parameter_states import kept_fields, own_shape

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
    # Masters are what the working type makes of the weights.
    rounded: bool = False


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
        # What a program's own objects may refuse comes first, and is taken back if any rank's do.
        with ExitStack() as undo:
            together(comm, what, lambda: loader.load_values(undo))
            undo.pop_all()
        try:
            together(comm, what, loader.run)
            loader.refresh()
        except BaseException as error:  # of a disk, or Ctrl-C: all of it has been checked
            if session.updater is not None:
                session.updater.broken = CheckpointError(f"{what} was broken off ({describe(error)}); load one whole")
            raise
    ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size != 1)}"
    session.log.info("loaded %s: step %d, written by %s", path, manifest.step, ranks)
    return LoadedCheckpoint(path, loader.client_state, loader.counts if options.counts else None)


def _verified(session: Session, path: Path) -> Manifest:
    """The manifest, once every byte of the checkpoint has been checked; the ranks divide the bytes."""
    comm = session.comm

    read: list[Manifest] = []

    def check() -> list[str]:
        read.append(read_manifest(path))
        return folders.damage(path, read[0], comm.rank, comm.size)

    try:
        problems = [problem for found in together(comm, f"loading {path}", check) for problem in found]
        if problems:
            raise CheckpointError(f"loading {path}: {'; '.join(problems[:_LISTED])}")
    except CheckpointError as error:
        other = on_first(comm, "looking for a whole checkpoint", lambda: folders.offer(path.parent, path.name))
        raise CheckpointError(f"{error}. Nothing was loaded; {other}") from error
    return read[0]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(one_line, names[:_LISTED])) + more


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
    frozen |= {scale.name for scale in scales(session.module)}
    left_out = frozen if manifest.engine.get("frozen_excluded") else set()
    missing = [name for name in shapes if name not in names and name not in left_out]
    if options.strict and missing:
        raise CheckpointError(f"it lacks {_listed(missing)}; {_NOT_STRICT}")
    if options.optimizer and session.optimizer is not None:
        _check_optimizer(session, manifest, names)
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
    frozen = {session.whole_name(name) for name, p in session.module.named_parameters() if not p.requires_grad}
    dropped = [name for name, there in fits[0].items() if name in frozen and manifest.entries[there].moments]
    if dropped and options.optimizer and session.optimizer is not None:
        lines.append(
            f"its optimizer state of {_listed(dropped)} is not loaded, as these are frozen here; to train on with it, "
            "unfreeze them before load_checkpoint"
        )
    for line in lines if session.comm.rank == 0 else ():
        session.log.warning("%s: %s", path, line)


def _check_optimizer(session: Session, manifest: Manifest, names: dict[str, str]) -> None:
    hint = "load_optimizer_states=False loads the weights alone"
    saved = manifest.engine.get("optimizer")
    if saved is None:
        raise CheckpointError(f"it holds no optimizer; {hint}")
    assert session.optimizer is not None
    mine = type(session.optimizer.instance).__name__
    segments = [
        (flat, span, state.rule.whole, {field.name: field.shape for field in fields})
        for flat, state in session.states.items()
        for span, fields in zip(session.spans(flat), kept_fields(state, session.optimizer.param_groups), strict=True)
    ]
    wanted, there = {name for *_, kept in segments for name in kept}, set(manifest.state_names())
    scalars = {key for found in saved["scalars"].values() for key in found} & (wanted | there | {"master"})
    if scalars:
        raise CheckpointError(f"its {saved['type']} has one number for each parameter as {_listed(sorted(scalars))}")
    if wanted and not there and saved["steps"]:
        raise CheckpointError(f"its {saved['type']} keeps no state, {mine} keeps {_listed(sorted(wanted))}; {hint}")
    for flat, span, whole, kept in segments:
        logical = session.logical(flat.layout.slots[span.slot])
        if logical.name not in names:
            continue
        entry = manifest.entries[names[logical.name]]
        found = {state: entry.own_shape(state, logical.box) for state in entry.moments}
        # One of torch's that has made none takes what there is; shapes of their own, if it looks at all of it.
        alone = whole and span.stop - span.start == logical.box.numel
        expected = kept or (found if alone else dict.fromkeys(found))
        elsewhere = [state for state in found if found[state] is None and entry.has_own(state)]
        if found and (found != expected or elsewhere):
            parts = f" ({_listed(elsewhere)} of other parts of it: it was tiled otherwise)" if elsewhere else ""
            raise CheckpointError(
                f"{logical.name}: its optimizer is {saved['type']} with {_told(found)}{parts}, the engine's is {mine} "
                f"with {_told(expected)}; {hint}"
            )


def _told(states: Mapping[str, tuple[int, ...] | None]) -> str:
    """Names, with the shapes that are not the parameter's."""
    return _listed([f"{name} of shape {own}" if own else name for name, own in sorted(states.items())])


def _check_objects(objects: Any, tensors: Collection[str], where: str) -> None:
    """They can stand beside the tensors of the same state."""
    if not isinstance(objects, dict) or not all(isinstance(name, str) for name in objects):
        raise CheckpointError(f"{where}: expected values by name, got a {type(objects).__name__}")
    for name, value in objects.items():
        if name in tensors or isinstance(value, torch.Tensor):
            raise CheckpointError(f"{where}: {name} is there as a tensor and as a value of its own")
        if name == "step" and not isinstance(value, int | float):
            raise CheckpointError(f"{where}: expected step to be a number, got a {type(value).__name__}")


class _Loader:
    def __init__(self, session: Session, reader: CheckpointReader, options: LoadOptions, names: dict[str, str]) -> None:
        self.session = session
        self.names = names
        self.reader = reader
        self.manifest = reader.manifest
        self.options = options
        self.optimizer = options.optimizer and session.optimizer is not None
        self.steps = self.manifest.engine["optimizer"]["steps"] if self.optimizer else 0
        self.client_state: dict[str, Any] = {}
        self.objects: dict[str, dict[str, Any]] = {}
        self.counts = StepCounts()

    @torch.no_grad()
    def run(self) -> None:
        """Weights and states, which have been checked."""
        session = self.session
        if self.optimizer:
            self._load_steps()  # before the states, which are of so many
        for unit in session.units:
            session.gatherer.release(unit)
        flats = list(session.flats)
        with Progress(f"loading {self.manifest.tag}", len(flats), unit="flats", rank=session.comm.rank) as progress:
            for flat in flats:
                self._load_flat(flat)
                progress.advance()
        for state, number, name in self._parameters() if self.optimizer else ():
            state.load_objects(number, self.objects.get(name, {}))
        self._load_plain()

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
        if self._has(slot):
            self._read(flat, slot, WEIGHT, values["master"], span.start, span.stop)
        if self.options.rounded:
            values["master"].copy_(values["master"].to(flat.dtype))
        if not (self._has(slot) and self.optimizer):
            return
        assert self.session.optimizer is not None
        group = self.session.optimizer.param_groups[span.group]
        there = self.manifest.entries[self._there(slot)].moments
        for name in values.keys() - {"master", *there}:
            # An optimizer of torch's makes its state at a parameter's first update: there was none.
            self.session.states[flat].begin_again(group, values, name)
        for name in there:
            target = values.get(name)
            if isinstance(target, Blocks8):
                self._load_blocks(flat, span, slot, name, target)
                continue
            if target is None or not target.is_contiguous():
                own = self.manifest.entries[self._there(slot)].own_shape(name, self.session.logical(slot).box)
                dtype = self.reader.dtype(self._there(slot), name)
                # Beside the master, which need not be on the device that computes.
                device = values["master"].device
                target = values[name] = torch.zeros(own or span.stop - span.start, dtype=dtype, device=device)
            self._read(flat, slot, name, target, span.start, span.stop)
        scalars = self.manifest.engine["optimizer"]["scalars"]
        # By parameter; by group in checkpoints that count steps for all parameters together.
        found = scalars.get(self._there(slot)) or scalars.get(str(span.group), {})
        values.update({name: torch.tensor(value) for name, value in found.items()})

    def _parameters(self) -> Iterator[tuple[FlatState, int, str]]:
        """The segments of this rank's shards that have something to load: their number, and the entry it is from."""
        for flat, state in self.session.states.items():
            for number, span in enumerate(self.session.spans(flat)):
                if self._has(slot := flat.layout.slots[span.slot]):
                    yield state, number, self._there(slot)

    def _read_objects(self) -> dict[str, dict[str, Any]]:
        """By parameter, what its optimizer kept that is no tensor: the rank that had the parameter has told it."""
        told: dict[str, Any] = {}
        for rank in self.manifest.ranks:
            given = rank.get("objects", {})
            if not isinstance(given, dict):
                raise CheckpointError(f"objects: expected them by parameter, got a {type(given).__name__}")
            told.update(given)
        found: dict[str, dict[str, Any]] = {}
        for state, _, name in self._parameters():
            if name in told and state.rule.keeps_objects:
                where = f"the optimizer's state of {name}"
                found[name] = self.reader.value(told[name], where)
                _check_objects(found[name], self.manifest.entries[name].moments, where)
        return found

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
            whole = own_shape(target, high - low) is not None
            part = target.view(-1) if whole else target[at - low : at - low + run.numel]
            self.reader.read(self._there(slot), state, run, part)

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

    def load_values(self, undo: ExitStack) -> None:
        """Everything but weights and states; `undo` gets how each is taken back."""
        session, engine, value = self.session, self.manifest.engine, self.reader.value
        self.client_state = value(engine.get("client_state", {}), "client_state")
        if not isinstance(self.client_state, dict):
            raise CheckpointError(f"client_state is a {type(self.client_state).__name__}, expected a dict")
        self._load_counts()
        if self.optimizer:
            self.objects = self._read_objects()
            self._load_groups(undo)
        extra = value(engine.get("extra_state", {}), "extra state of the model")
        for key, module in extra_states(session.module).items():
            if key in extra:
                undo.callback(module.set_extra_state, copy.deepcopy(module.get_extra_state()))
                module.set_extra_state(extra[key])
        if self.optimizer and session.scaler.dynamic:
            _take(session.scaler, engine.get("loss_scale"), "loss scale", undo)
        schedule = session.lr_scheduler
        if self.options.lr_scheduler and schedule is not None:
            if "lr_scheduler" in engine:
                found, what = value(engine["lr_scheduler"], "lr_scheduler"), "the state of the learning rate schedule"
                if isinstance(schedule, LRScheduler):
                    # It takes over whatever it is given, in the place of its own methods too.
                    own = schedule.state_dict() if type(schedule).__module__.startswith(("torch.", "wherry.")) else {}
                    _check_alike(own, found, what, optional=False)
                    methods = {key for key in found if callable(getattr(type(schedule), key, None))}
                    hidden = sorted(methods | (found.keys() & {"optimizer"}))
                    if hidden:
                        raise CheckpointError(f"{what} has {hidden[0]!r}, which is none of its own")
                _take(schedule, found, what, undo)
            else:
                session.log.warning(
                    "%s holds no learning rate schedule: the engine's stays as it is", self.reader.folder
                )
        if self.options.optimizer:
            self._load_rank_values(undo)

    def _load_groups(self, undo: ExitStack) -> None:
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
        for index, (group, given) in enumerate(zip(groups, saved, strict=True)):
            what = f"param_groups[{index}]"
            options = self.reader.value(given["options"], what)
            if "params" in options:
                raise CheckpointError(f"{what}: params are no option")
            _check_alike({key: group[key] for key in self.session.optimizer.defaults}, options, what, optional=False)
            undo.callback(group.update, dict(group))
            undo.callback(group.clear)
            group.update(options)

    def _load_rank_values(self, undo: ExitStack) -> None:
        session, ranks, value = self.session, self.manifest.ranks, self.reader.value
        if not ranks:
            return
        rank = session.comm.rank
        mine = ranks[rank] if rank < len(ranks) else None
        undo.callback(restore_random_state, random_state(session.device), session.device)
        data = ranks[min(rank, len(ranks) - 1)].get("data")
        if data is not None and hasattr(session.dataloader, "load_state_dict"):
            _take(session.dataloader, value(data, "data"), "the state of the training dataloader", undo)
        if mine is not None and "rng" in mine:
            restore_random_state(value(mine["rng"], "random state"), session.device)
        else:
            spread_random_state(hash((self.manifest.step, rank)) % 2**63, session.device)

    def _load_counts(self) -> None:
        """Those of the last update: an older checkpoint may have been saved within an accumulation window."""
        engine, value = self.manifest.engine, self.reader.value
        found = {key: value(engine[key], key) for key in StepCounts.__dataclass_fields__ if key in engine}
        window = value(engine.get("window", {}), "window")
        _check_alike(vars(StepCounts(norm=0.0)), found, "counts")
        _check_alike({"backwards": 0, "accumulation": 0, "steps": 0}, window, "window")
        self.counts = StepCounts(**found)
        if window.get("backwards") and self.session.comm.rank == 0:
            self.session.log.warning(
                "%s was saved after %d of the %d micro-batches of an accumulation window: it is loaded as of the last "
                "update before them, and the next window begins anew",
                self.reader.folder, window["backwards"], window["accumulation"],
            )  # fmt: skip
        self.counts.micro_steps -= window.get("steps", 0)


def _take(into: Any, state: Any, what: str, undo: ExitStack) -> None:
    """Let an object of a program's own take over a state."""
    undo.callback(into.load_state_dict, copy.deepcopy(into.state_dict()))
    try:
        into.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"{what} is not taken: {describe(error)}") from error


def _check_alike(own: Mapping[str, Any], loaded: Any, what: str, *, optional: bool = True) -> None:
    """Refuse a loaded value of another kind than the value that it replaces.

    `optional`: None may take the place of a number or a word, as of a norm that no step has had.
    """
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{what} is a {type(loaded).__name__}, expected a dict")
    for key, value in loaded.items():
        if key in own and not _alike(own[key], value, optional):
            raise CheckpointError(f"{what}: {key} is {str(value)[:80]!r}, expected the like of {str(own[key])[:80]}")


def _alike(own: Any, value: Any, optional: bool) -> bool:
    if value is None:
        # A flag such as `fused` may be left to torch.
        return own is None or isinstance(own, bool) or (optional and not isinstance(own, list | tuple | dict))
    if own is None:
        # A container that took the place of None would let no checkpoint with the None load again.
        return not isinstance(value, list | tuple | dict)
    if isinstance(own, list | tuple) and isinstance(value, list | tuple):
        return len(own) == len(value) and all(_alike(*each, optional) for each in zip(own, value, strict=True))
    if isinstance(own, dict) and isinstance(value, dict):
        return all(_alike(own[key], value[key], optional) for key in own.keys() & value.keys())
    return _kind(value) == _kind(own)


def _kind(value: Any) -> str:
    if isinstance(value, int | float | np.number | np.bool_) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    ):
        return "number"
    return type(value).__name__
