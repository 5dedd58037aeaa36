"""Checkpoints of DeepSpeed's, turned into Wherry's: its partitions of fp32 weights and moments, as named slices.

Its files are pickles. They are read with torch's `weights_only`, and the few classes of DeepSpeed's that stand in them
are replaced by inert ones, so that nothing in a file is run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import WEIGHT, Entry, Manifest, Piece, RankFiles, encode
from wherry.checkpoint.reshard import Run
from wherry.observe.progress import Progress

_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
    "ds_version", "loss_scaler", "universal_checkpoint_info", "autotp_info", "moe",
}  # fmt: skip


class _Inert:
    """Takes whatever a pickle gives it, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_in(name: str) -> type:
    return type(name.rpartition(".")[2], (_Inert,), {"__module__": name.rpartition(".")[0]})


# Classes that DeepSpeed pickles beside tensors.
_STAND_INS = {
    name: _stand_in(name)
    for name in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
}


def read(path: Path) -> Any:
    """A file of DeepSpeed's, without running anything in it."""
    safe: list[Any] = [(stand_in, name) for name, stand_in in _STAND_INS.items()]
    try:
        with torch.serialization.safe_globals(safe):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except Exception as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            told = f"it holds an object of {foreign[1]}, which is not loaded: nothing in a checkpoint is run"
        raise CheckpointError(f"{path} cannot be read: {told}") from error


def _find(source: Path, tag: str | None) -> Path:
    """The folder of a checkpoint, which must be one that can be read."""
    if tag is None and (source / "latest").is_file():
        tag = (source / "latest").read_text(encoding="utf-8").strip()
    folder = source / tag if tag is not None else source
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if any(next(folder.glob(pattern), None) for pattern in ("mp_rank_01_*", "*_mp_rank_01_*", "layer_*")):
        raise CheckpointError(
            f"{folder} was written with tensor or pipeline parallelism, which is not read; make it a universal or a "
            "consolidated checkpoint with DeepSpeed first"
        )
    return folder


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    def rank(path: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)_", path.name)
        return int(found[1]) if found else 0

    return sorted(folder.glob(pattern), key=rank)


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
        self.models: list[dict[str, Any]] = [read(path) for path in models]
        self.model = self.models[0]
        if "module" not in self.model:
            raise CheckpointError(f"{models[0]} holds no module")
        self.optimizers = _by_rank(folder, "*zero_pp_rank_*optim_states.pt")
        # The groups of trained parameters: name -> shape.
        self.groups: list[dict[str, Any]] = [dict(shapes) for shapes in self.model.get("param_shapes") or []]
        self.aliases: dict[str, list[str]] = {}
        for other, first in dict(self.model.get("shared_params") or {}).items():
            self.aliases.setdefault(first, []).append(other)
        self.entries: dict[str, Entry] = {}

    def write(self, out: Path, tag: str | None) -> Path:
        step = int(self.model.get("global_steps", 0))
        name = folders.check_tag(tag or folders.step_tag(step))
        partial = folders.Partial(out, name)
        manifest = Manifest.of_now(name, int(self.model.get("dp_world_size", 1)), self.entries)
        manifest.versions["deepspeed"] = str(self.model.get("ds_version"))
        self.files = RankFiles(partial.path, 0, 1 << 20, manifest)
        try:
            manifest.engine = self._engine_values(self._write_tensors())
            self.files.finish()
            manifest.check_complete()
            return partial.commit(manifest, latest=True)
        except BaseException:
            self.files.drop()
            partial.drop()
            raise

    def _write_tensors(self) -> dict[str, Any] | None:
        """Every tensor; returns what is known of the optimizer."""
        partitioned = bool(self.optimizers and self.groups)
        optimizer = self._write_trained() if partitioned else None
        trained = {name for shapes in self.groups for name in shapes} if partitioned else set()
        frozen = dict(self.model.get("frozen_param_shapes") or {}) if partitioned else {}
        for name, shape in frozen.items():
            parts = [dict(model.get("frozen_param_fragments") or {}).get(name) for model in self.models]
            whole = torch.cat([part.reshape(-1) for part in parts if part is not None])[: math.prod(shape)]
            self._write_plain(name, whole.view(tuple(shape)), "frozen")
        known = {*trained, *frozen, *(other for others in self.aliases.values() for other in others)}
        buffers = set(self.model.get("buffer_names") or ())
        for name, tensor in self.model["module"].items():
            if name in known:
                continue
            if name in buffers:
                self._write_plain(name, tensor, "buffer")
            elif not partitioned:
                self._write_plain(name, tensor, "parameter")
            elif tensor.numel():  # at stage 3 other names of trained weights are there too, empty
                self._write_plain(name, tensor, "frozen")
        return optimizer

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

    def _write_trained(self) -> dict[str, Any]:
        """Masters and moments; the files of all ranks are open, and one state of one parameter is in memory."""
        ranks = [_RankStates.of(path) for path in self.optimizers]
        module: dict[str, torch.Tensor] = self.model["module"]
        part_at = 0  # of stage 3: where the parameter's parts begin in what each rank has
        with Progress(f"importing {self.folder}", sum(map(len, self.groups)), unit="parameters") as progress:
            for index, shapes in enumerate(self.groups):
                at = 0  # of stages 1 and 2: where the parameter begins in its group
                for name, shape in shapes.items():
                    self._entry(name, shape, module[name].dtype if name in module else torch.float32, "parameter")
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

        steps = int(self.model.get("global_steps", 0))
        client = {key: value for key, value in self.model.items() if key not in _KNOWN}
        scale = (optimizer or {}).pop("loss_scale", 1.0)
        values = {
            "global_steps": steps,
            "micro_steps": steps,
            "skipped_steps": int(self.model.get("skipped_steps", 0)),
            "samples": int(self.model.get("global_samples", 0)),
            "norm": None,
            "applied": True,
            "window": {},
            "loss_scale": {"scale": scale, "patience": 1, "good_steps": 0},
            "client_state": encode(client, "client_state", put),
            "extra_state": {},
            "frozen_excluded": False,
        }
        schedule = self.model.get("lr_scheduler")
        if isinstance(schedule, dict):
            if set(schedule) == {"last_batch_iteration"}:
                # DeepSpeed's schedules know their step alone; torch's count the same from it.
                last = int(schedule["last_batch_iteration"])
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
        saved = read(path)["optimizer_state_dict"]
        stage_3 = "fp32_flat_groups" in saved
        key = "fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"
        if key not in saved:
            raise CheckpointError(f"{path} holds no {key}; ZeRO stages 1, 2 and 3 are read")
        weights: list[torch.Tensor] = list(saved[key])
        base = saved["optimizer_state_dict" if stage_3 else "base_optimizer_state"]
        options: list[Any] = []
        if isinstance(base, list):  # an elastic checkpoint: states alone
            states = base
        elif isinstance(base, dict) and "state" in base:
            states = [base["state"].get(index, {}) for index in range(len(weights))]
            options = [{k: v for k, v in group.items() if k != "params"} for group in base.get("param_groups", [])]
        else:
            raise CheckpointError(f"{path}: the optimizer's state is not in a form that is known")
        flats = [
            {WEIGHT: weight}
            | {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
            for weight, state in zip(weights, states, strict=True)
        ]
        scale = float(getattr(saved.get("loss_scaler"), "state", {}).get("cur_scale", 1.0))
        return cls(flats, options, max((int(state.get("step", 0)) for state in states), default=0), scale, stage_3)

    def all_of(self, state: str) -> list[torch.Tensor]:
        return [flat[state] for flat in self.flats if state in flat]


def import_checkpoint(source: Path, out: Path, tag: str | None = None) -> Path:
    """Write what a checkpoint of DeepSpeed's holds as one of Wherry's; returns its folder.

    Weights and moments come over bit for bit, with the step count, the schedule's state and the client state.
    """
    folder = _find(source, tag)
    return _Import(folder).write(out, tag or (folder.name if folder != source else None))
