"""Checkpoints of DeepSpeed's, turned into Wherry's: its partitions of fp32 weights and moments, as named slices."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import WEIGHT, Entry, Manifest, Piece, RankFiles, encode
from wherry.checkpoint.reshard import Run
from wherry.compat.deepspeed.files import ModelFile, States, read_model, read_optimizer
from wherry.errors import one_line
from wherry.observe.progress import Progress
from wherry.regular import read_regular

# What DeepSpeed itself puts beside the client state, and nothing here needs.
_UNREAD = {
    "optimizer", "data_sampler", "random_ltd", "sparse_tensor_module_names", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "loss_scaler", "universal_checkpoint_info", "autotp_info", "moe",
}  # fmt: skip
_LONGEST_TAG = 4096


def _find(source: Path, tag: str | None) -> Path:
    """The folder of a checkpoint, which must be one that can be read."""
    latest = source / "latest"
    if tag is None and os.path.lexists(latest):
        try:
            tag = read_regular(latest, _LONGEST_TAG).decode("utf-8").strip()
        except OSError as error:
            raise CheckpointError(f"{latest} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CheckpointError(f"{latest} cannot be read: it is no text") from None
    folder = source / folders.check_tag(tag) if tag is not None else source
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
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


class _Import:
    """One checkpoint, read from its files and written into Wherry's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models = _by_rank(folder, "*model_states.pt")
        if not models:
            raise CheckpointError(f"{folder} holds no *_model_states.pt: it is no checkpoint of DeepSpeed's")
        self.models: list[ModelFile] = [read_model(path) for path in models]
        self.model = self.models[0]
        self.optimizers = _by_rank(folder, "*zero_pp_rank_*optim_states.pt")
        # The groups of trained parameters: name -> shape. Without optimizers' files all weights are in the module.
        self.groups = self.model.param_shapes if self.optimizers else []
        if self.optimizers and not self.groups:
            raise CheckpointError(
                f"{models[0]} has no param_shapes, and there are weights of optimizers in other files"
            )
        self.frozen = self.model.frozen_param_shapes if self.groups else {}
        self.aliases: dict[str, list[str]] = {}
        for other, first in self.model.shared_params.items():
            self.aliases.setdefault(first, []).append(other)
        names = [*(name for shapes in self.groups for name in shapes), *self.frozen, *self.model.shared_params]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise CheckpointError(f"{models[0]}: {twice[0]} is in two groups, or trained and frozen or tied at once")
        self.entries: dict[str, Entry] = {}

    def write(self, out: Path, tag: str | None) -> Path:
        name = folders.check_tag(tag or folders.step_tag(self.model.global_steps))
        ranks = self._ranks() if self.groups else []
        partial = folders.Partial(out, name)
        manifest = Manifest.of_now(name, self.model.dp_world_size, self.entries)
        manifest.versions["deepspeed"] = str(self.model.ds_version)
        self.files = RankFiles(partial.path, 0, 1 << 20, manifest)
        try:
            manifest.engine = self._engine_values(self._write_tensors(ranks))
            self.files.finish()
            return partial.commit(manifest, latest=True)
        except BaseException:
            self.files.drop()
            partial.drop()
            raise

    def _ranks(self) -> list[_RankStates]:
        """The states of all ranks, which fit each other and the groups of parameters."""
        ranks = [_RankStates.of(path) for path in self.optimizers]
        first, count = ranks[0], len(self.groups)
        for path, rank in zip(self.optimizers, ranks, strict=True):
            if rank.stage_3 != first.stage_3:
                raise CheckpointError(f"{path} is of another ZeRO stage than {self.optimizers[0]}")
            if (len(rank.flats) < 1) if rank.stage_3 else (len(rank.flats) != count):
                raise CheckpointError(f"{path} has weights of {len(rank.flats)} groups, and the model has {count}")
            held = sum(flat.numel() for flat in rank.all_of(WEIGHT))
            shapes = (shape for group in self.groups for shape in group.values())
            wanted = sum(-(-math.prod(shape) // len(ranks)) for shape in shapes)
            if rank.stage_3 and held != wanted:
                raise CheckpointError(f"{path} has {held:,} weights, and of {len(ranks)} ranks each has {wanted:,}")
        return ranks

    def _write_tensors(self, ranks: list[_RankStates]) -> dict[str, Any] | None:
        """Every tensor; returns what is known of the optimizer."""
        optimizer = self._write_trained(ranks) if ranks else None
        for name, shape in self.frozen.items():
            self._write_frozen(name, shape)
        known = {*self.entries, *(other for others in self.aliases.values() for other in others)}
        buffers = set(self.model.buffer_names)
        for name, tensor in self.model.module.items():
            if name in known:
                continue
            if name in buffers:
                self._write_plain(name, tensor, "buffer")
            elif not ranks:
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

    def _put(self, name: str, state: str, values: torch.Tensor) -> None:
        self.files.put_piece(
            Piece(name, state, Run.of(self.entries[name].shape), values.detach().contiguous().view(-1))
        )

    def _write_plain(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        self._entry(name, tensor.shape, tensor.dtype, kind)
        self._put(name, WEIGHT, tensor)

    def _write_trained(self, ranks: list[_RankStates]) -> dict[str, Any]:
        """Masters and moments; the files of all ranks are open, and one state of one parameter is in memory."""
        module = self.model.module
        part_at = 0  # of stage 3: where the parameter's parts begin in what each rank has
        with Progress(f"importing {self.folder}", sum(map(len, self.groups)), unit="parameters") as progress:
            for index, shapes in enumerate(self.groups):
                at = 0  # of stages 1 and 2: where the parameter begins in its group
                for name, shape in shapes.items():
                    dtype = module[name].dtype if name in module else torch.float32
                    if not dtype.is_floating_point:
                        raise CheckpointError(f"{self.folder}: {name} is trained, and its weight is of {dtype}")
                    self._entry(name, shape, dtype, "parameter")
                    numel, part = math.prod(shape), -(-math.prod(shape) // len(ranks))
                    for state in ranks[0].flats[0 if ranks[0].stage_3 else index]:
                        if ranks[0].stage_3:
                            # Every parameter is cut by itself, and a rank's parts lie end to end, each padded; its
                            # sub-groups cut that anew, at parameters' borders.
                            own = [_cut(rank.all_of(state), part_at, part_at + part) for rank in ranks]
                            whole = torch.cat(own)[:numel]
                        else:
                            # A group's parameters lie end to end, and the whole is cut into equal partitions.
                            partitions = [rank.flats[index][state] for rank in ranks if state in rank.flats[index]]
                            whole = _cut(partitions, at, at + numel)
                        if whole.numel() != numel:
                            raise CheckpointError(
                                f"{self.folder}: {name}: of {state} {whole.numel()} of {numel} elements are there"
                            )
                        self._put(name, state, whole)
                    at += numel
                    part_at += part
                    progress.advance()
        options = next((rank.options for rank in reversed(ranks) if rank.options), [])
        groups = [
            {"options": encode(each, "param_groups", _no_tensors), "parameters": sorted(shapes)}
            for each, shapes in zip(options, self.groups, strict=False)
        ]
        return {
            "type": "DeepSpeed",
            "steps": max(rank.steps for rank in ranks),
            "groups": groups,
            "scalars": {},
            "loss_scale": ranks[-1].loss_scale,
        }

    def _engine_values(self, optimizer: dict[str, Any] | None) -> dict[str, Any]:
        """What an engine keeps beside tensors: its counts, the schedule's state and the client state."""

        def put(tensor: torch.Tensor) -> str:
            name = f"value:0:{len(self.files.part.tensors)}"
            self.files.part.tensors[name] = self.files.put(name, tensor.detach().contiguous())
            return name

        steps = self.model.global_steps
        client = {key: value for key, value in (self.model.model_extra or {}).items() if key not in _UNREAD}
        scale = (optimizer or {}).pop("loss_scale", 1.0)
        values = {
            "global_steps": steps,
            "micro_steps": steps,
            "skipped_steps": self.model.skipped_steps,
            "samples": self.model.global_samples,
            "norm": None,
            "applied": True,
            "window": {},
            "loss_scale": {"scale": scale, "patience": 1, "good_steps": 0},
            "client_state": encode(client, "client_state", put),
            "extra_state": {},
            "frozen_excluded": False,
        }
        schedule = self.model.lr_scheduler
        if isinstance(schedule, dict):
            last = schedule.get("last_batch_iteration")
            if len(schedule) == 1 and isinstance(last, int):
                # DeepSpeed's schedules know their step alone; torch's count the same from it.
                schedule = {"last_epoch": last, "_step_count": last + 1}
            values["lr_scheduler"] = encode(schedule, "lr_scheduler", put)
        if optimizer is not None:
            values["optimizer"] = optimizer
        return values


def _no_tensors(tensor: torch.Tensor) -> float:
    raise CheckpointError("param_groups: a tensor is not expected among the optimizer's options")


@dataclass
class _RankStates:
    """What one rank has written: of each of its flats the weights and moments, in one dim."""

    flats: list[dict[str, torch.Tensor]]
    options: list[Any]
    steps: int
    loss_scale: float
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
            options = [{k: v for k, v in group.items() if k != "params"} for group in base.param_groups]
        if len(states) != len(weights):
            raise CheckpointError(f"{path} has {len(weights)} flat weights, and states of {len(states)}")
        flats = [{**state.tensors(), WEIGHT: weight} for weight, state in zip(weights, states, strict=True)]
        scaler = getattr(saved.loss_scaler, "state", None)
        scale = scaler.get("cur_scale", 1.0) if isinstance(scaler, dict) else 1.0
        if not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise CheckpointError(f"{path}: loss_scaler: expected a scale above 0, got {one_line(str(scale))}")
        return cls(flats, options, max((state.step for state in states), default=0), float(scale), stage_3)

    def all_of(self, state: str) -> list[torch.Tensor]:
        return [flat[state] for flat in self.flats if state in flat]


def import_checkpoint(source: Path, out: Path, tag: str | None = None) -> Path:
    """Write what a checkpoint of DeepSpeed's holds as one of Wherry's; returns its folder.

    Weights and moments come over bit for bit, with the step count, the schedule's state and the client state.
    """
    folder = _find(source, tag)
    return _Import(folder).write(out, tag or (folder.name if folder != source else None))
