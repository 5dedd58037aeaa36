"""Convert DeepSpeed's checkpoints to Wherry's: its fp32 weights and moments become named tensors.

DeepSpeed has three layouts: one partition for each rank (stages 1, 2 and 3), whole tensors in the model's file
(stage 0), and one folder for each parameter (universal checkpoints).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import NAME, WEIGHT, Entry, Manifest, Piece, RankFiles, encode
from wherry.checkpoint.reshard import Run
from wherry.compat.deepspeed import files
from wherry.compat.deepspeed.files import BaseState, ModelFile, States, WholeOptimizer, WholeState
from wherry.errors import one_line
from wherry.observe.log import say
from wherry.observe.progress import Progress
from wherry.regular import read_regular

Shapes = dict[str, tuple[int, ...]]
Names = Sequence[Sequence[str]]
Groups = list[tuple[dict[str, Any], list[str]]]
Base = BaseState | list[States]
NamedStates = Iterable[tuple[str, torch.Tensor]]

LATEST_UNIVERSAL = "latest_universal"
_LONGEST_TAG = 4096
_MODEL_FILE = "mp_rank_00_model_states.pt"
# DeepSpeed's own entries beside the client state; nothing here needs them.
_UNREAD = {
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "loss_scaler", "universal_checkpoint_info", "autotp_info", "moe",
}  # fmt: skip
# Entries of a parameter group that are no options; some optimizers count updates in `step`.
_NO_OPTIONS = ("params", "step")


def is_theirs(folder: Path) -> bool:
    """Check whether DeepSpeed has written this checkpoint."""
    return not os.path.lexists(folder / NAME) and next(folder.glob("*_model_states.pt"), None) is not None


def import_checkpoint(source: Path, out: Path, tag: str | None = None, groups: Names | None = None) -> Path:
    """Write DeepSpeed's checkpoint as one of Wherry's; returns its folder.

    Weights and moments keep their bits; step counts, the schedule's state and the client state are kept too. The
    optimizer of stage 0 numbers its parameters: `groups` are their names, in the optimizer's order.
    """
    folder = _find(source, tag)
    return _Import(folder, groups).write(out, tag or (folder.name if folder != source else None))


def pointed_to(path: Path) -> str | None:
    """Read the tag in a file; None without the file."""
    if not os.path.lexists(path):
        return None
    try:
        return folders.check_tag(read_regular(path, _LONGEST_TAG).decode("utf-8").strip())
    except (OSError, ValueError) as error:  # a ValueError: no UTF-8, or no tag
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _find(source: Path, tag: str | None) -> Path:
    """Find the folder of a checkpoint that can be imported."""
    if tag is None:
        tag = pointed_to(source / folders.LATEST) or pointed_to(source / LATEST_UNIVERSAL)
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
    """List the files of all ranks, one for each."""
    paths: dict[int, Path] = {}
    for path in folder.glob(pattern):
        number = re.search(r"zero_pp_rank_(\d+)_", path.name)
        rank = int(number[1]) if number else 0
        if (other := paths.setdefault(rank, path)) is not path:
            raise CheckpointError(f"{other} and {path.name} are both of rank {rank}; move one of them away")
    if missing := set(range(len(paths))) - paths.keys():
        raise CheckpointError(f"{folder} has {pattern} of {len(paths)} ranks, and none of rank {min(missing)}")
    return [paths[rank] for rank in sorted(paths)]


def _cut(flats: list[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Join elements `start` to `stop` of flats that lie end to end."""
    parts, position = [], 0
    for flat in flats:
        parts.append(flat[max(start - position, 0) : max(stop - position, 0)])
        position += flat.numel()
    return torch.cat(parts)


def _is_reduced(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Check whether summing over some dims of a parameter's shape can give a state's shape."""
    rest = iter(shape)
    kept = len(own) == len(shape) and all(n in (1, of) for n, of in zip(own, shape, strict=True))
    return kept or (bool(own) and all(any(n == of for of in rest) for n in own))


def _ties(module: dict[str, torch.Tensor]) -> dict[str, str]:
    """Map other names of tied weights to the first, by their storage, which a file of stage 0 holds once."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in module.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if (known := first.setdefault(key, name)) != name:
            ties[name] = known
    return ties


@dataclass
class _Trained:
    """The trained parameters with the states of their optimizer."""

    shapes: Shapes
    steps: dict[str, int]
    # The options of each parameter group, and its parameters.
    groups: Groups
    loss_scale: dict[str, Any]
    # The master and the moments of a parameter, whole, one at a time.
    states: Callable[[str], NamedStates]
    # Some optimizers keep sums over a parameter's dims.
    reduced: bool = True


class _Import:
    """One checkpoint that is read from DeepSpeed's files and written to Wherry's."""

    def __init__(self, folder: Path, groups: Names | None) -> None:
        self.folder = folder
        universal = os.path.lexists(folder / "zero" / "optimizer_state.pt")
        # A universal checkpoint may hold the same file once more, under its name at stage 3.
        one = universal and os.path.lexists(folder / _MODEL_FILE)
        paths = _by_rank(folder, _MODEL_FILE if one else "*model_states.pt")
        if not paths:
            raise CheckpointError(f"{folder} holds no *_model_states.pt: it is no checkpoint of DeepSpeed's")
        self.models = [files.read_model(path) for path in paths]
        self.model = model = self.models[0]
        optimizers = [] if universal else _by_rank(folder, "*zero_pp_rank_*optim_states.pt")
        self.frozen, parts, tied = model.frozen_param_shapes, model.param_shapes, model.shared_params
        if whole := not universal and not optimizers:
            self.frozen, parts, tied = {}, [], _ties(model.module)
        if optimizers and not parts:
            raise CheckpointError(f"{paths[0]} has no param_shapes, and there are weights of optimizers in other files")
        names = Counter([*(name for part in parts for name in part), *self.frozen, *model.shared_params])
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise CheckpointError(f"{paths[0]}: {twice} is in two groups, or trained and frozen or tied at once")
        self.aliases: dict[str, list[str]] = defaultdict(list)
        for other, first in tied.items():
            self.aliases[first].append(other)
        self.entries: dict[str, Entry] = {}
        self.trained: _Trained | None
        if universal:
            self.trained = _of_universal(folder / "zero", parts)
        elif whole:
            self.trained = _of_stage_0(model, paths[0], groups)
        else:
            self.trained = _of_partitions([_read_rank(path) for path in optimizers], optimizers, parts)

    def write(self, out: Path, tag: str | None) -> Path:
        """Write the checkpoint to `out`; returns its folder."""
        name = folders.check_tag(tag or folders.step_tag(self.model.global_steps))
        partial = folders.Partial(out, name)
        manifest = Manifest.of_now(name, self.model.dp_world_size, self.entries)
        manifest.versions["deepspeed"] = str(self.model.ds_version)
        self.files = RankFiles(partial.path, 0, 1 << 20, manifest)
        try:
            optimizer = {} if self.trained is None else {"optimizer": self._write_trained(self.trained)}
            self._write_others()
            manifest.engine = self._engine_values() | optimizer
            self.files.finish()
            return partial.commit(manifest, latest=True)
        except BaseException:
            self.files.drop()
            partial.drop()
            raise

    def _write_trained(self, trained: _Trained) -> dict[str, Any]:
        """Write masters and moments, one state in memory at a time; returns the record of the optimizer."""
        module = self.model.module
        with Progress(f"importing {self.folder}", len(trained.shapes), unit="parameters") as progress:
            for name, shape in trained.shapes.items():
                dtype = module[name].dtype if name in module else torch.float32
                if not dtype.is_floating_point:
                    raise CheckpointError(f"{self.folder}: {name} is trained, and its weight is of {dtype}")
                self._write(name, "parameter", shape, dtype, trained.states(name))
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

    def _write_others(self) -> None:
        """Write frozen weights, of which ranks have parts, and the rest of the model's file."""
        for name, shape in self.frozen.items():
            fragments = (model.frozen_param_fragments.get(name) for model in self.models)
            parts = [fragment.reshape(-1) for fragment in fragments if fragment is not None]
            held, numel = sum(part.numel() for part in parts), math.prod(shape)
            if not parts or held < numel or len({part.dtype for part in parts}) > 1:
                raise CheckpointError(f"{self.folder}: {name}: of one dtype {held:,} of {numel:,} elements are there")
            # The last part is padded.
            self._write(name, "frozen", shape, parts[0].dtype, [(WEIGHT, torch.cat(parts)[:numel])])
        written = {*self.entries, *(other for others in self.aliases.values() for other in others)}
        rest, buffers = "parameter" if self.trained is None else "frozen", {*self.model.buffer_names}
        for name, tensor in self.model.module.items():
            kind = "buffer" if name in buffers else rest
            # Stage 3 lists other names of trained weights too, as tensors without elements.
            if name not in written and (kind != "frozen" or tensor.numel()):
                self._write(name, kind, tuple(tensor.shape), tensor.dtype, [(WEIGHT, tensor)])

    def _write(self, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, states: NamedStates) -> None:
        """Write the states of one tensor."""
        self.entries[name] = Entry(shape, str(dtype).removeprefix("torch."), kind, tuple(self.aliases[name]))
        numel = math.prod(shape)
        for state, values in states:
            own = tuple(values.shape) if values.numel() != numel else None
            may_be_reduced = state != WEIGHT and self.trained is not None and self.trained.reduced
            if own is not None and not (may_be_reduced and _is_reduced(own, shape)):
                held = f"{values.numel()} of {numel} elements"
                raise CheckpointError(f"{self.folder}: {name}: of {state} {held} are there")
            flat = values.detach().contiguous().view(-1)
            self.files.put_piece(Piece(name, state, Run.of(shape), flat, own=own))

    def _engine_values(self) -> dict[str, Any]:
        """Collect the engine's values beside tensors: its counts, the schedule's state and the client state."""

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
            "applied": True,
            "window": {},
            "loss_scale": _loss_scale(None, self.folder) if self.trained is None else self.trained.loss_scale,
            "client_state": encode(client, "client_state", put),
        }
        schedule = self.model.lr_scheduler
        if isinstance(schedule, dict):
            last = schedule.get("last_batch_iteration")
            if len(schedule) == 1 and isinstance(last, int):
                # DeepSpeed's schedules save their step only; torch's derive their counts from it.
                schedule = {"last_batch_iteration": last, "last_epoch": last, "_step_count": last + 1}
            values["lr_scheduler"] = encode(schedule, "lr_scheduler", put)
        return values


def _by_group(groups: Sequence[dict[str, Any]], parts: Sequence[Iterable[str]]) -> Groups:
    """Pair the options of groups with their names; `params` of a group number its parts, which else are the groups."""
    listed = sorted(str(number) for group in groups for number in _numbers(group))
    if listed != sorted(map(str, range(len(parts)))):
        return [(group, list(part)) for group, part in zip(groups, parts, strict=False)]
    numbered = [group for group in groups if group.get("params") is not None]
    return [(group, [name for number in _numbers(group) for name in parts[int(number)]]) for group in numbered]


def _numbers(group: dict[str, Any]) -> list[Any]:
    numbers = group.get("params")
    return numbers if isinstance(numbers, list) else []


def _loss_scale(scaler: Any, path: Path) -> dict[str, Any]:
    """Convert the state of a loss scaler, or of the optimizer that has one's attributes at stage 0."""
    state = scaler if isinstance(scaler, dict) else getattr(scaler, "state", None)
    values = state if isinstance(state, dict) else {}
    scale = values.get("cur_scale", 1.0)
    if not isinstance(scale, int | float) or not 0 < scale < 1e300:
        # An int may have 10^6 digits.
        text = str(scale) if isinstance(scale, float) or scale in (0, -1) else type(scale).__name__
        raise CheckpointError(f"{path}: loss_scaler: expected a scale above 0 and below 1e300, got {text}")
    counts: list[Any] = [values.get(key) for key in ("cur_iter", "last_overflow_iter", "scale_window")]
    good, patience = 0, values.get("cur_hysteresis")
    if all(isinstance(count, int) for count in counts) and -1 <= counts[1] < counts[0] and counts[2] > 0:
        now, overflow, window = counts
        # The first good step after an overflow, or at the start, does not count toward the next doubling.
        good = now - overflow - 2
        good = good % window if good > 0 else good
    return {"scale": float(scale), "patience": patience if isinstance(patience, int) else 1, "good_steps": good}


# Stages 1, 2 and 3.


class _Rank(NamedTuple):
    """One rank's partitions: the weights and moments of each of its flats, in one dim."""

    flats: list[dict[str, torch.Tensor]]
    options: list[Any]
    steps: list[int]
    loss_scale: dict[str, Any]
    is_stage_3: bool

    def all_of(self, state: str, index: int) -> list[torch.Tensor]:
        """List the parts of the group `index`; at stage 3 of all groups."""
        flats = self.flats if self.is_stage_3 else self.flats[index : index + 1]
        return [flat[state] for flat in flats if state in flat]


def _read_rank(path: Path) -> _Rank:
    saved = files.read_valid(files.OptimizerFile, path).optimizer_state_dict
    is_stage_3 = saved.fp32_flat_groups is not None
    weights = saved.fp32_flat_groups if is_stage_3 else saved.single_partition_of_fp32_groups
    base = saved.optimizer_state_dict if is_stage_3 else saved.base_optimizer_state
    if weights is None or base is None:
        raise CheckpointError(f"{path} holds no fp32 weights with their states; ZeRO stages 1, 2 and 3 are read")
    return _rank_of(weights, base, saved.loss_scaler, path, is_stage_3=is_stage_3)


def _rank_of(weights: list[torch.Tensor], base: Base, scaler: Any, path: Path, *, is_stage_3: bool = False) -> _Rank:
    # With zero_optimization.elastic_checkpoint states are saved without options.
    options = [] if isinstance(base, list) else base.param_groups
    states = base if isinstance(base, list) else [base.state.get(i, States()) for i in range(len(weights))]
    if len(states) != len(weights):
        raise CheckpointError(f"{path} has {len(weights)} flat weights, and states of {len(states)}")
    flats = [{**state.tensors(), WEIGHT: weight} for weight, state in zip(weights, states, strict=True)]
    return _Rank(flats, options, [state.step for state in states], _loss_scale(scaler, path), is_stage_3)


def _of_partitions(ranks: list[_Rank], paths: list[Path], parts: list[Shapes]) -> _Trained:
    """Join the partitions of all ranks."""
    _check_partitions(ranks, paths, parts)
    is_stage_3 = ranks[0].is_stage_3
    shapes = {name: shape for part in parts for name, shape in part.items()}
    steps: dict[str, int] = {}
    # A group's parameters lie end to end, and the whole is cut into equal partitions. Stage 3 cuts every parameter by
    # itself, and a rank's parts lie end to end, each padded, through all of its sub-groups.
    starts: dict[str, tuple[int, int]] = {}
    at = 0
    for index, part in enumerate(parts):
        at = at if is_stage_3 else 0
        for name, shape in part.items():
            starts[name] = index, at
            at += -(-math.prod(shape) // len(ranks)) if is_stage_3 else math.prod(shape)
        made = [rank.steps[index] for rank in ranks if index < len(rank.steps)]
        steps.update(dict.fromkeys(part, max(made, default=0)))

    def states(name: str) -> NamedStates:
        (index, at), numel = starts[name], math.prod(shapes[name])
        share = -(-numel // len(ranks))
        for state in ranks[0].flats[0 if is_stage_3 else index]:
            held = [rank.all_of(state, index) for rank in ranks]
            if is_stage_3:
                yield state, torch.cat([_cut(own, at, at + share) for own in held])[:numel]
            else:
                yield state, _cut([flat for own in held for flat in own], at, at + numel)

    options: list[Any] = next((rank.options for rank in reversed(ranks) if rank.options), [])
    return _Trained(shapes, steps, _by_group(options, parts), ranks[-1].loss_scale, states, reduced=False)


def _check_partitions(ranks: list[_Rank], paths: list[Path], parts: list[Shapes]) -> None:
    """Check that the states of all ranks fit each other and the groups of parameters."""
    first, count = ranks[0], len(parts)
    names, *others = [sorted({state for flat in rank.flats for state in flat}) for rank in ranks]
    wanted = sum(-(-math.prod(shape) // len(ranks)) for part in parts for shape in part.values())
    for path, rank, own in zip(paths, ranks, [names, *others], strict=True):
        if rank.is_stage_3 != first.is_stage_3:
            raise CheckpointError(f"{path} is of another ZeRO stage than {paths[0]}")
        if not rank.flats or (not rank.is_stage_3 and len(rank.flats) != count):
            raise CheckpointError(f"{path} has weights of {len(rank.flats)} groups, and the model has {count}")
        if own != names:
            raise CheckpointError(f"{path} has states {own}; expected {names}, which {paths[0]} has")
        held = sum(flat[WEIGHT].numel() for flat in rank.flats)
        if rank.is_stage_3 and held != wanted:
            raise CheckpointError(f"{path} has {held:,} weights, and of {len(paths)} ranks each has {wanted:,}")


# Stage 0.


def _of_stage_0(model: ModelFile, path: Path, groups: Names | None) -> _Trained | None:
    """Read the optimizer of stage 0; None, with a line in the log, if its parameters cannot be named."""
    saved = files.whole_optimizer(model, path)
    if saved is None:
        if model.optimizer:
            say("%s: its optimizer is of a form that is not read: the weights alone are taken over", path)
        return None
    options = (saved.optimizer_state_dict if isinstance(saved, WholeOptimizer) else saved).param_groups
    groups = _guess_groups(model, saved) if groups is None else groups
    if groups is None or len(groups) != len(options):
        say(
            "%s: it does not say which parameters its optimizer has in which of %d groups, so the weights alone are "
            "taken over; engine.load_checkpoint of an engine with these groups loads it whole", path, len(options),
        )  # fmt: skip
        return None
    shapes = {name: tuple(model.module[name].shape) for names in groups for name in names if name in model.module}
    if missing := next((name for names in groups for name in names if name not in shapes), None):
        raise CheckpointError(f"{path}: it has no {missing}, which the engine trains")
    if isinstance(saved, WholeOptimizer):
        # The masters and moments of a group are flats, like those of stage 1 on one rank.
        for index, (flat, names) in enumerate(zip(saved.fp32_groups_flat, groups, strict=False)):
            if flat.numel() != (wanted := sum(math.prod(shapes[name]) for name in names)):
                held = f"group {index} of its optimizer has {flat.numel():,} elements"
                raise CheckpointError(f"{path}: {held}, the engine's {wanted:,}")
        rank = _rank_of(saved.fp32_groups_flat, saved.optimizer_state_dict, saved.model_extra, path)
        return _of_partitions([rank], [path], [{name: shapes[name] for name in names} for names in groups])
    states: dict[str, dict[str, torch.Tensor]] = {}
    steps: dict[str, int] = {}
    for group, names in zip(options, groups, strict=True):
        numbers = [number for number in _numbers(group) if isinstance(number, int)]
        if len(numbers) != len(names):
            held = f"a group of its optimizer has {len(numbers)} parameters"
            raise CheckpointError(f"{path}: {held}, the engine's {len(names)}")
        # An optimizer that counts for the whole group leaves the count with one of its parameters.
        kept = {name: saved.state.get(number) for name, number in zip(names, numbers, strict=True)}
        shared = max((own.step for own in kept.values() if own), default=0) if "step" in group else None
        for name, own in kept.items():
            states[name] = {**(own.tensors() if own else {}), WEIGHT: model.module[name]}
            steps[name] = 0 if own is None else own.step if shared is None else shared
    named = [(group, list(names)) for group, names in zip(options, groups, strict=True)]
    return _Trained(shapes, steps, named, _loss_scale(None, path), lambda name: states[name].items())


def _guess_groups(model: ModelFile, saved: WholeOptimizer | WholeState) -> Names | None:
    """Put all weights, in the model's order, into one group; None if the optimizer has other shapes."""
    others = {*model.buffer_names, *_ties(model.module)}
    weights = {n: weight for n, weight in model.module.items() if n not in others and weight.is_floating_point()}
    if isinstance(saved, WholeOptimizer):
        fits = [flat.numel() for flat in saved.fp32_groups_flat] == [sum(each.numel() for each in weights.values())]
    else:
        tensors = [[*states.tensors().values()] for _, states in sorted(saved.state.items())]
        shapes = [own[0].shape if own else None for own in tensors]
        fits = len(saved.param_groups) == 1 and shapes == [weight.shape for weight in weights.values()]
    return [[*weights]] if fits else None


# Universal checkpoints.


def _of_universal(zero: Path, parts: list[Shapes]) -> _Trained:
    """Read a folder for each parameter, with a file for each of its states."""
    path = zero / "optimizer_state.pt"
    saved = files.read_valid(files.UniversalOptimizer, path)
    shapes = {name: shape for part in parts for name, shape in part.items()}
    names = sorted(each.name for each in zero.iterdir() if each.is_dir())
    if missing := next((name for name in shapes if name not in names), None):
        raise CheckpointError(f"{zero} has no folder of {missing}, which is trained")
    for name in names:
        if not name.isprintable():
            raise CheckpointError(f"{zero}: {one_line(name)}: expected a name that can be printed")
        if name not in shapes:
            shapes[name] = tuple(files.read_universal_state(zero / name / "fp32.pt").shape)
    # Stage 3 leaves the count in the optimizer's states only.
    base = saved.optimizer_state_dict.state.values() if saved.optimizer_state_dict is not None else ()
    common = max((states.step for states in base), default=0)
    counts = {name: zero / name / "step.pt" for name in shapes}
    steps = {name: files.read_universal_step(file) if file.exists() else common for name, file in counts.items()}

    def states(name: str) -> NamedStates:
        for file in sorted({zero / name / "fp32.pt", *(zero / name).glob("*.pt")}):
            if file.stem == "step":
                continue
            if not file.stem.isidentifier():
                raise CheckpointError(f"{file.parent}: {one_line(file.name)}: expected the name of a state")
            values = files.read_universal_state(file)
            if not values.is_floating_point():
                raise CheckpointError(f"{file}: expected floating-point numbers, got {values.dtype}")
            yield (WEIGHT if file.stem == "fp32" else file.stem), values

    groups, scale = _by_group(saved.param_groups, parts), _loss_scale(saved.loss_scaler, path)
    return _Trained(shapes, steps, groups, scale, states)
