"""Checkpoints of DeepSpeed's, turned into Wherry's: its partitions of fp32 weights and moments, as named slices.

It has three layouts of what an optimizer trains: a partition of each rank (stages 1, 2 and 3), whole tensors in the
model's own file (stage 0), and a folder for each parameter (universal checkpoints).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import NAME, WEIGHT, Entry, Manifest, Piece, RankFiles, encode
from wherry.checkpoint.reshard import Run
from wherry.compat.deepspeed.files import (
    ModelFile,
    States,
    WholeOptimizer,
    WholeState,
    read_model,
    read_optimizer,
    read_universal_optimizer,
    read_universal_state,
    read_universal_step,
    read_whole_optimizer,
)
from wherry.errors import one_line
from wherry.observe.log import say
from wherry.observe.progress import Progress
from wherry.regular import read_regular

# What DeepSpeed itself puts beside the client state, and nothing here needs.
_UNREAD = {
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "loss_scaler", "universal_checkpoint_info", "autotp_info", "moe",
}  # fmt: skip
LATEST_UNIVERSAL = "latest_universal"
_LONGEST_TAG = 4096
_MODEL_FILE = "mp_rank_00_model_states.pt"


def pointed_to(path: Path) -> str | None:
    """The tag that a file names; None where there is no such file."""
    if not os.path.lexists(path):
        return None
    try:
        return folders.check_tag(read_regular(path, _LONGEST_TAG).decode("utf-8").strip())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} cannot be read: it is no text") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _find(source: Path, tag: str | None) -> Path:
    """The folder of a checkpoint, which must be one that can be read."""
    if tag is None:
        tag = pointed_to(source / folders.LATEST)
    if tag is None:
        tag = pointed_to(source / LATEST_UNIVERSAL)
    folder = source / folders.check_tag(tag) if tag is not None else source
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if os.path.lexists(folder / NAME):
        raise CheckpointError(f"{folder} is one of Wherry's already; load it as it is")
    if any(next(folder.glob(pattern), None) for pattern in ("mp_rank_01_*", "*_mp_rank_01_*", "layer_*")):
        raise CheckpointError(
            f"{folder} was written with tensor or pipeline parallelism, which is not read; make it a universal or a "
            "consolidated checkpoint with DeepSpeed first"
        )
    return folder


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """The files of all ranks, one each."""
    found: dict[int, Path] = {}
    for path in folder.glob(pattern):
        number = re.search(r"zero_pp_rank_(\d+)_", path.name)
        rank = int(number[1]) if number else 0
        if rank in found:
            raise CheckpointError(f"{found[rank]} and {path.name} are both of rank {rank}; move one of them away")
        found[rank] = path
    lacking = next((rank for rank in range(len(found)) if rank not in found), None)
    if lacking is not None:
        raise CheckpointError(f"{folder} has {pattern} of {len(found)} ranks, and none of rank {lacking}")
    return [found[rank] for rank in range(len(found))]


def _cut(flats: list[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Elements of flats that lie end to end."""
    parts, position = [], 0
    for flat in flats:
        parts.append(flat[max(start - position, 0) : max(stop - position, 0)])
        position += flat.numel()
    return torch.cat(parts)


def _is_reduced(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a state can be what is left of a parameter's shape once some dims are summed over."""
    rest = iter(shape)
    kept = len(own) == len(shape) and all(n in (1, of) for n, of in zip(own, shape, strict=True))
    return kept or (bool(own) and all(any(n == of for of in rest) for n in own))


class _Trained(Protocol):
    """What the optimizer trains, and what it keeps of it."""

    shapes: dict[str, tuple[int, ...]]
    steps: dict[str, int]
    # The options of each group of parameters, and its parameters.
    groups: list[tuple[dict[str, Any], list[str]]]
    loss_scale: dict[str, Any]

    # Whether a state may have not an element for each of its parameter's, such as sums of rows.
    shaped: bool

    def states(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The master and the moments of a parameter, whole, one at a time."""


class _Import:
    """One checkpoint, read from its files and written into Wherry's."""

    def __init__(self, folder: Path, groups: Sequence[Sequence[str]] | None) -> None:
        self.folder = folder
        self.universal = is_universal(folder)
        one = self.universal and os.path.lexists(folder / _MODEL_FILE)  # that of stage 3 beside it says the same
        models = _by_rank(folder, _MODEL_FILE if one else "*model_states.pt")
        if not models:
            raise CheckpointError(f"{folder} holds no *_model_states.pt: it is no checkpoint of DeepSpeed's")
        self.models: list[ModelFile] = [read_model(path) for path in models]
        self.model = self.models[0]
        self.optimizers = [] if self.universal else _by_rank(folder, "*zero_pp_rank_*optim_states.pt")
        # The groups of trained parameters: name -> shape.
        shapes = self.model.param_shapes if self.optimizers or self.universal else []
        if self.optimizers and not shapes:
            raise CheckpointError(
                f"{models[0]} has no param_shapes, and there are weights of optimizers in other files"
            )
        self.frozen = self.model.frozen_param_shapes if self.optimizers or self.universal else {}
        self.aliases: dict[str, list[str]] = {}
        for other, first in self.model.shared_params.items():
            self.aliases.setdefault(first, []).append(other)
        names = [*(name for group in shapes for name in group), *self.frozen, *self.model.shared_params]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise CheckpointError(f"{models[0]}: {twice[0]} is in two groups, or trained and frozen or tied at once")
        self.entries: dict[str, Entry] = {}
        self.trained: _Trained | None = None
        if self.universal:
            self.trained = _Universal(folder, shapes)
        elif self.optimizers:
            self.trained = _Partitions(folder, self.optimizers, shapes)
        else:
            self._find_ties()
            self.trained = _whole(self.model, models[0], groups)

    def _find_ties(self) -> None:
        """At stage 0 nothing says what is tied but the storage, which is in the file once."""
        first: dict[tuple[Any, ...], str] = {}
        for name, tensor in self.model.module.items():
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
            known = first.setdefault(key, name)
            if known != name:
                self.aliases.setdefault(known, []).append(name)

    def write(self, out: Path, tag: str | None) -> Path:
        name = folders.check_tag(tag or folders.step_tag(self.model.global_steps))
        partial = folders.Partial(out, name)
        manifest = Manifest.of_now(name, self.model.dp_world_size, self.entries)
        manifest.versions["deepspeed"] = str(self.model.ds_version)
        self.files = RankFiles(partial.path, 0, 1 << 20, manifest)
        try:
            manifest.engine = self._engine_values(self._write_tensors())
            self.files.finish()
            return partial.commit(manifest, latest=True)
        except BaseException:
            self.files.drop()
            partial.drop()
            raise

    def _write_tensors(self) -> dict[str, Any] | None:
        """Every tensor; returns what is known of the optimizer."""
        optimizer = self._write_trained(self.trained) if self.trained is not None else None
        for name, shape in self.frozen.items():
            self._write_frozen(name, shape)
        known = {*self.entries, *(other for others in self.aliases.values() for other in others)}
        buffers = set(self.model.buffer_names)
        for name, tensor in self.model.module.items():
            if name in known:
                continue
            if name in buffers:
                self._write_plain(name, tensor, "buffer")
            elif self.trained is None:
                self._write_plain(name, tensor, "parameter")
            elif tensor.numel():  # at stage 3 other names of trained weights are there too, empty
                self._write_plain(name, tensor, "frozen")
        return optimizer

    def _write_frozen(self, name: str, shape: tuple[int, ...]) -> None:
        """Ranks have a part each, the last one with padding."""
        fragments = (model.frozen_param_fragments.get(name) for model in self.models)
        parts = [fragment.reshape(-1) for fragment in fragments if fragment is not None]
        there, numel = sum(part.numel() for part in parts), math.prod(shape)
        if not parts or there < numel or len({part.dtype for part in parts}) > 1:
            raise CheckpointError(f"{self.folder}: {name}: of one dtype {there:,} of {numel:,} elements are there")
        self._write_plain(name, torch.cat(parts)[:numel].view(shape), "frozen")

    def _entry(self, name: str, shape: Any, dtype: torch.dtype, kind: str) -> None:
        spelled = str(dtype).removeprefix("torch.")
        self.entries[name] = Entry(tuple(shape), spelled, kind, tuple(self.aliases.get(name, ())))

    def _put(self, name: str, state: str, values: torch.Tensor, own: tuple[int, ...] | None = None) -> None:
        run = Run.of(self.entries[name].shape)
        self.files.put_piece(Piece(name, state, run, values.detach().contiguous().view(-1), own=own))

    def _write_plain(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        self._entry(name, tensor.shape, tensor.dtype, kind)
        self._put(name, WEIGHT, tensor)

    def _write_trained(self, trained: _Trained) -> dict[str, Any]:
        """Masters and moments; the files of all ranks are open, and one state of one parameter is in memory."""
        module = self.model.module
        with Progress(f"importing {self.folder}", len(trained.shapes), unit="parameters") as progress:
            for name, shape in trained.shapes.items():
                dtype = module[name].dtype if name in module else torch.float32
                if not dtype.is_floating_point:
                    raise CheckpointError(f"{self.folder}: {name} is trained, and its weight is of {dtype}")
                self._entry(name, shape, dtype, "parameter")
                for state, whole in trained.states(name):
                    own = tuple(whole.shape) if whole.numel() != math.prod(shape) else None
                    if own is not None and (state == WEIGHT or not trained.shaped or not _is_reduced(own, shape)):
                        there = f"{whole.numel()} of {math.prod(shape)} elements"
                        raise CheckpointError(f"{self.folder}: {name}: of {state} {there} are there")
                    self._put(name, state, whole, own)
                progress.advance()
        steps = max(trained.steps.values(), default=0)
        groups = []
        for options, names in trained.groups:
            kept = {key: value for key, value in options.items() if key not in _NO_OPTIONS}
            groups.append({"options": encode(kept, "param_groups", self._refuse_tensor), "parameters": sorted(names)})
        return {
            "type": "DeepSpeed",
            "steps": steps,
            "parameter_steps": {name: made for name, made in trained.steps.items() if made < steps},
            "groups": groups,
            "scalars": {},
        }

    def _refuse_tensor(self, _: torch.Tensor) -> str:
        raise CheckpointError(f"{self.folder}: param_groups: a tensor is not expected among the optimizer's options")

    def _engine_values(self, optimizer: dict[str, Any] | None) -> dict[str, Any]:
        """What an engine keeps beside tensors: its counts, the schedule's state and the client state."""

        def put(tensor: torch.Tensor) -> str:
            name = f"value:0:{len(self.files.part.tensors)}"
            self.files.part.tensors[name] = self.files.put(name, tensor.detach().contiguous())
            return name

        steps = self.model.global_steps
        client = {key: value for key, value in (self.model.model_extra or {}).items() if key not in _UNREAD}
        values = {
            "global_steps": steps,
            "micro_steps": steps,
            "skipped_steps": self.model.skipped_steps,
            "samples": self.model.global_samples,
            "norm": None,
            "applied": True,
            "window": {},
            "loss_scale": self.trained.loss_scale if self.trained is not None else _SCALE_1,
            "client_state": encode(client, "client_state", put),
            "extra_state": {},
            "frozen_excluded": False,
        }
        schedule = self.model.lr_scheduler
        if isinstance(schedule, dict):
            last = schedule.get("last_batch_iteration")
            if len(schedule) == 1 and isinstance(last, int):
                # DeepSpeed's schedules know their step alone; torch's count the same from it.
                schedule = {"last_batch_iteration": last, "last_epoch": last, "_step_count": last + 1}
            values["lr_scheduler"] = encode(schedule, "lr_scheduler", put)
        if optimizer is not None:
            values["optimizer"] = optimizer
        return values


# Of a group of parameters, what is no option of it. `step` is a count that some optimizers begin with.
_NO_OPTIONS = ("params", "step")
_SCALE_1: dict[str, Any] = {"scale": 1.0, "patience": 1, "good_steps": 0}


def _by_group(
    groups: Sequence[dict[str, Any]], parts: Sequence[Sequence[str]]
) -> list[tuple[dict[str, Any], list[str]]]:
    """Options of groups with their names: a group's `params` are numbers of parts, which are its own or sub-groups."""
    numbers = [group.get("params") for group in groups]
    listed = [number for own in numbers if isinstance(own, list) for number in own]
    if sorted(map(str, listed)) != sorted(map(str, range(len(parts)))):
        return [(group, list(part)) for group, part in zip(groups, parts, strict=False)]
    return [
        (group, [name for number in own for name in parts[int(number)]])
        for group, own in zip(groups, numbers, strict=True)
        if own is not None
    ]


def _loss_scale(scaler: Any, path: Path) -> dict[str, Any]:
    """Where a loss scaler of DeepSpeed's stands."""
    state = getattr(scaler, "state", None)
    found = state if isinstance(state, dict) else {}
    scale = found.get("cur_scale", 1.0)
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise CheckpointError(f"{path}: loss_scaler: expected a scale above 0, got {one_line(str(scale))}")
    keys = ("cur_iter", "last_overflow_iter", "scale_window", "cur_hysteresis")
    counts = [count for key in keys if isinstance(count := found.get(key), int)]
    if len(counts) < len(keys) or counts[2] < 1:
        return {**_SCALE_1, "scale": float(scale)}
    now, overflow, window, patience = counts
    return {"scale": float(scale), "patience": patience, "good_steps": _good_steps(now, overflow, window)}


def _good_steps(now: int, overflow: int, window: int) -> int:
    """Steps that count for the next doubling; the first one after an overflow, or at the start, does not."""
    good = now - overflow - 2
    return good % window if good > 0 else good


# Stages 1, 2 and 3.


class _Partitions:
    """The files of all ranks."""

    shaped = False

    def __init__(self, folder: Path, paths: list[Path], parts: list[dict[str, tuple[int, ...]]]) -> None:
        self.ranks = [_RankStates.of(path) for path in paths]
        self._check(paths, parts)
        first = self.ranks[0]
        self.shapes = {name: shape for part in parts for name, shape in part.items()}
        self.steps: dict[str, int] = {}
        # Of each parameter: its group, and where it begins in that; at stage 3, where its parts begin in what each
        # rank has, whose sub-groups cut that anew at parameters' borders.
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for index, part in enumerate(parts):
            at = at if first.stage_3 else 0
            for name, shape in part.items():
                self._places[name] = index, at
                at += -(-math.prod(shape) // len(self.ranks)) if first.stage_3 else math.prod(shape)
            made = [rank.steps[index] for rank in self.ranks if index < len(rank.steps)]
            self.steps.update(dict.fromkeys(part, max(made, default=0)))
        options = next((rank.options for rank in reversed(self.ranks) if rank.options), [])
        self.groups = _by_group(options, [list(part) for part in parts])
        self.loss_scale = self.ranks[-1].loss_scale

    def _check(self, paths: list[Path], parts: list[dict[str, tuple[int, ...]]]) -> None:
        """The states of all ranks fit each other and the groups of parameters."""
        first, count = self.ranks[0], len(parts)
        for path, rank in zip(paths, self.ranks, strict=True):
            if rank.stage_3 != first.stage_3:
                raise CheckpointError(f"{path} is of another ZeRO stage than {paths[0]}")
            if (len(rank.flats) < 1) if rank.stage_3 else (len(rank.flats) != count):
                raise CheckpointError(f"{path} has weights of {len(rank.flats)} groups, and the model has {count}")
            kept, others = (sorted({state for flat in each.flats for state in flat}) for each in (rank, first))
            if kept != others:
                raise CheckpointError(f"{path} has states {kept}; expected {others}, which {paths[0]} has")
            held = sum(flat.numel() for flat in rank.all_of(WEIGHT))
            shapes = (shape for group in parts for shape in group.values())
            wanted = sum(-(-math.prod(shape) // len(paths)) for shape in shapes)
            if rank.stage_3 and held != wanted:
                raise CheckpointError(f"{path} has {held:,} weights, and of {len(paths)} ranks each has {wanted:,}")

    def states(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        (index, at), numel = self._places[name], math.prod(self.shapes[name])
        first = self.ranks[0]
        part = -(-numel // len(self.ranks))
        for state in first.flats[0 if first.stage_3 else index]:
            if first.stage_3:
                # Every parameter is cut by itself, and a rank's parts lie end to end, each padded.
                own = [_cut(rank.all_of(state), at, at + part) for rank in self.ranks]
                yield state, torch.cat(own)[:numel]
            else:
                # A group's parameters lie end to end, and the whole is cut into equal partitions.
                partitions = [rank.flats[index][state] for rank in self.ranks if state in rank.flats[index]]
                yield state, _cut(partitions, at, at + numel)


@dataclass
class _RankStates:
    """What one rank has written: of each of its flats the weights and moments, in one dim."""

    flats: list[dict[str, torch.Tensor]]
    options: list[Any]
    steps: list[int]
    loss_scale: dict[str, Any]
    stage_3: bool

    @classmethod
    def of(cls, path: Path) -> _RankStates:
        saved = read_optimizer(path)
        stage_3 = saved.fp32_flat_groups is not None
        weights = saved.fp32_flat_groups if stage_3 else saved.single_partition_of_fp32_groups
        base = saved.optimizer_state_dict if stage_3 else saved.base_optimizer_state
        if weights is None or base is None:
            raise CheckpointError(f"{path} holds no fp32 weights with their states; ZeRO stages 1, 2 and 3 are read")
        options: list[Any] = []
        if isinstance(base, list):  # an elastic checkpoint: states alone
            states = base
        else:
            states = [base.state.get(index, States()) for index in range(len(weights))]
            options = base.param_groups
        if len(states) != len(weights):
            raise CheckpointError(f"{path} has {len(weights)} flat weights, and states of {len(states)}")
        flats = [{**state.tensors(), WEIGHT: weight} for weight, state in zip(weights, states, strict=True)]
        return cls(flats, options, [state.step for state in states], _loss_scale(saved.loss_scaler, path), stage_3)

    def all_of(self, state: str) -> list[torch.Tensor]:
        return [flat[state] for flat in self.flats if state in flat]


# Stage 0.


@dataclass
class _Whole:
    """Whole tensors, each of one parameter."""

    held: dict[str, dict[str, torch.Tensor]]
    shapes: dict[str, tuple[int, ...]]
    steps: dict[str, int]
    groups: list[tuple[dict[str, Any], list[str]]]
    loss_scale: dict[str, Any]
    shaped: bool

    def states(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.held[name].items()


def _whole(model: ModelFile, path: Path, groups: Sequence[Sequence[str]] | None) -> _Whole | None:
    """The optimizer of stage 0, or None. Its file numbers the parameters: `groups` are their names, in its order."""
    known = isinstance(model.optimizer, dict) and model.optimizer.keys() & {"state", "fp32_groups_flat"}
    saved = read_whole_optimizer(model, path) if known else None
    if saved is None:
        if model.optimizer:
            say("%s: its optimizer is of a form that is not read: the weights alone are taken over", path)
        return None
    options = saved.optimizer_state_dict.param_groups if isinstance(saved, WholeOptimizer) else saved.param_groups
    if groups is None:
        groups = _guessed_groups(model, saved)
    if groups is None or len(groups) != len(options):
        say(
            "%s: it does not say which parameters its optimizer has in which of %d groups, so the weights alone are "
            "taken over; engine.load_checkpoint of an engine with these groups loads it whole", path, len(options),
        )  # fmt: skip
        return None
    build = _from_flats if isinstance(saved, WholeOptimizer) else _from_states
    return build(saved, model, path, groups)  # type: ignore[arg-type]


def _guessed_groups(model: ModelFile, saved: WholeOptimizer | WholeState) -> list[list[str]] | None:
    """One group of all that may be trained, in the model's order, if that is as much as the optimizer has."""
    seen: set[int] = set()
    names = []
    for name, tensor in model.module.items():
        if name not in model.buffer_names and tensor.is_floating_point() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            names.append(name)
    if isinstance(saved, WholeState):
        shapes = [tuple(model.module[name].shape) for name in names]
        there = [
            next((tuple(value.shape) for value in states.tensors().values()), None)
            for _, states in sorted(saved.state.items())
        ]
        return [names] if len(saved.param_groups) == 1 and there == shapes else None
    numel = sum(model.module[name].numel() for name in names)
    return [names] if [flat.numel() for flat in saved.fp32_groups_flat] == [numel] else None


def _shape_of(model: ModelFile, name: str, path: Path) -> tuple[int, ...]:
    if name not in model.module:
        raise CheckpointError(f"{path}: it has no {name}, which the engine trains")
    return tuple(model.module[name].shape)


def _from_states(saved: WholeState, model: ModelFile, path: Path, groups: Sequence[Sequence[str]]) -> _Whole:
    """Each parameter has states of its own."""
    held: dict[str, dict[str, torch.Tensor]] = {}
    steps: dict[str, int] = {}
    named = []
    for options, names in zip(saved.param_groups, groups, strict=True):
        numbers = options.get("params")
        if not isinstance(numbers, list) or len(numbers) != len(names):
            there = len(numbers) if isinstance(numbers, list) else 0
            raise CheckpointError(f"{path}: a group of its optimizer has {there} parameters, the engine's {len(names)}")
        found = {name: saved.state.get(number) for name, number in zip(names, numbers, strict=True)}
        own = {name: states.step for name, states in found.items() if states is not None}
        if "step" in options:  # counted for the group; of some optimizers one parameter has the count
            own = dict.fromkeys(own, max(own.values(), default=0))
        steps |= own
        for name, states in found.items():
            tensors = {} if states is None else states.tensors()
            held[name] = {**tensors, WEIGHT: model.module[name]} if name in model.module else tensors
        named.append((options, list(names)))
    shapes = {name: _shape_of(model, name, path) for name in held}
    return _Whole(held, shapes, {name: steps.get(name, 0) for name in held}, named, _SCALE_1, shaped=True)


def _from_flats(saved: WholeOptimizer, model: ModelFile, path: Path, groups: Sequence[Sequence[str]]) -> _Whole:
    """A group's masters and moments lie end to end."""
    base = saved.optimizer_state_dict
    held: dict[str, dict[str, torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    steps: dict[str, int] = {}
    if len(saved.fp32_groups_flat) != len(groups):
        raise CheckpointError(f"{path} has weights of {len(saved.fp32_groups_flat)} groups, the engine {len(groups)}")
    for index, (flat, names) in enumerate(zip(saved.fp32_groups_flat, groups, strict=True)):
        states = base.state.get(index, States())
        flats, at = {**states.tensors(), WEIGHT: flat}, 0
        for name in names:
            shapes[name] = _shape_of(model, name, path)
            stop = at + math.prod(shapes[name])
            held[name] = {state: values[at:stop] for state, values in flats.items()}
            steps[name], at = states.step, stop
        if at != flat.numel():
            raise CheckpointError(
                f"{path}: group {index} of its optimizer has {flat.numel():,} elements, the engine's {at:,}"
            )
    named = [(options, list(names)) for options, names in zip(base.param_groups, groups, strict=True)]
    good = _good_steps(saved.cur_iter, saved.last_overflow_iter, saved.scale_window)
    return _Whole(held, shapes, steps, named, {**_SCALE_1, "scale": saved.cur_scale, "good_steps": good}, shaped=False)


# Universal checkpoints.


class _Universal:
    """A folder for each parameter."""

    shaped = True

    def __init__(self, folder: Path, parts: list[dict[str, tuple[int, ...]]]) -> None:
        self._zero = folder / "zero"
        path = self._zero / "optimizer_state.pt"
        saved = read_universal_optimizer(path)
        self.shapes = {name: shape for part in parts for name, shape in part.items()}
        there = sorted(each.name for each in self._zero.iterdir() if each.is_dir())
        lacking = next((name for name in self.shapes if name not in there), None)
        if lacking is not None:
            raise CheckpointError(f"{self._zero} has no folder of {lacking}, which is trained")
        for name in there:
            if not name.isprintable():
                raise CheckpointError(f"{self._zero}: {one_line(name)}: expected a name that can be printed")
            if name not in self.shapes:
                self.shapes[name] = tuple(read_universal_state(self._zero / name / "fp32.pt").shape)
        self.steps = {name: self._step(name, saved) for name in self.shapes}
        self.groups = _by_group(saved.param_groups, [list(part) for part in parts])
        self.loss_scale: dict[str, Any] = {**(saved.loss_scale or _loss_scale(saved.loss_scaler, path))}

    def _step(self, name: str, saved: Any) -> int:
        path = self._zero / name / "step.pt"
        if path.exists():
            return read_universal_step(path)
        base = saved.optimizer_state_dict
        return max((states.step for states in base.state.values()), default=0) if base is not None else 0

    def states(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted({self._zero / name / "fp32.pt", *(self._zero / name).glob("*.pt")}):
            if path.stem != "step":
                if path.stem != "fp32" and not path.stem.isidentifier():
                    raise CheckpointError(f"{path.parent}: {one_line(path.name)}: expected the name of a state")
                values = read_universal_state(path)
                if not values.is_floating_point():
                    raise CheckpointError(f"{path}: expected floating-point numbers, got {values.dtype}")
                yield (WEIGHT if path.stem == "fp32" else path.stem), values


def is_universal(folder: Path) -> bool:
    return os.path.lexists(folder / "zero" / "optimizer_state.pt")


def is_theirs(folder: Path) -> bool:
    """Whether DeepSpeed has written this checkpoint."""
    return not os.path.lexists(folder / NAME) and next(folder.glob("*_model_states.pt"), None) is not None


def import_checkpoint(
    source: Path, out: Path, tag: str | None = None, groups: Sequence[Sequence[str]] | None = None
) -> Path:
    """Write what a checkpoint of DeepSpeed's holds as one of Wherry's; returns its folder.

    Weights and moments come over bit for bit, with the step count, the schedule's state and the client state. The
    optimizer of stage 0 numbers its parameters: `groups` are their names, as the optimizer has them.
    """
    folder = _find(source, tag)
    return _Import(folder, groups).write(out, tag or (folder.name if folder != source else None))
