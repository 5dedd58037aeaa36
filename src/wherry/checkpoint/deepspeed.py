"""Checkpoints of DeepSpeed's, turned into Wherry's: its partitions of fp32 weights and moments, as named slices.

Its files are pickles. They are read with torch's `weights_only`, and the few classes of DeepSpeed's that stand in them
are replaced by inert ones, so that nothing in a file is run.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.contents import Piece
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import WEIGHT, Entry, Manifest, encode
from wherry.checkpoint.rank_files import RankFiles
from wherry.checkpoint.reshard import Run
from wherry.checkpoint.save import versions
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


@dataclass
class _Found:
    """The files of one checkpoint, rank by rank."""

    folder: Path
    models: list[Path]
    optimizers: list[Path]


def _find(source: Path, tag: str | None) -> _Found:
    if tag is None and (source / "latest").is_file():
        tag = (source / "latest").read_text(encoding="utf-8").strip()
    folder = source / tag if tag is not None else source
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if list(folder.glob("mp_rank_01_*")) or list(folder.glob("*_mp_rank_01_*")) or list(folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} was written with tensor or pipeline parallelism, which is not read; make it a universal or a "
            "consolidated checkpoint with DeepSpeed first"
        )
    models = _by_rank(folder, "*model_states.pt")
    if not models:
        raise CheckpointError(f"{folder} holds no *_model_states.pt: it is no checkpoint of DeepSpeed's")
    return _Found(folder, models, _by_rank(folder, "*zero_pp_rank_*optim_states.pt"))


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    def rank(path: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)_", path.name)
        return int(found[1]) if found else 0

    return sorted(folder.glob(pattern), key=rank)


@dataclass
class _Part:
    """What one rank holds of a group's parameters: name, whole shape, which elements, and where they lie in a flat."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int


def _parts_of_stage_2(shapes: dict[str, Any], partition: int, first: int) -> Iterator[_Part]:
    """Stage 1 and 2 lay a group's parameters end to end, and cut the whole into equal partitions."""
    position = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        start, stop = max(position, first), min(position + numel, first + partition)
        if start < stop:
            yield _Part(name, tuple(shape), start - position, stop - position, start - first)
        position += numel


def _parts_of_stage_3(shapes: dict[str, Any], rank: int, ranks: int) -> Iterator[_Part]:
    """Stage 3 cuts every parameter by itself, and lays a rank's parts end to end, each with its padding."""
    position = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        size = -(-numel // ranks)
        start, stop = min(rank * size, numel), min((rank + 1) * size, numel)
        if start < stop:
            yield _Part(name, tuple(shape), start, stop, position)
        position += size


def import_checkpoint(source: Path, out: Path, tag: str | None = None) -> Path:
    """Write what a checkpoint of DeepSpeed's holds as one of Wherry's; returns its folder.

    Weights and moments come over bit for bit, with the step count, the schedule's state and the client state.
    """
    found = _find(source, tag)
    models = [read(path) for path in found.models]
    model = models[0]
    if "module" not in model:
        raise CheckpointError(f"{found.models[0]} holds no module")
    step = int(model.get("global_steps", 0))
    name = folders.check_tag(tag or (found.folder.name if found.folder != source else folders.step_tag(step)))
    partial = folders.begin(out, name)
    files = RankFiles(partial, 0, 1 << 20)
    entries: dict[str, Entry] = {}
    try:
        optimizer = _write(found, models, files, entries)
        client = {key: value for key, value in model.items() if key not in _KNOWN}
        engine = _engine_values(model, optimizer, client, files)
        part = files.finish()
        manifest = Manifest(
            tag=name,
            created=datetime.now(UTC).isoformat(),
            versions={**versions(), "deepspeed": str(model.get("ds_version"))},
            world_size=int(model.get("dp_world_size", 1)),
            entries=entries,
            engine=engine,
            ranks=[],
            config={},
            files=part.files,
            tensors=part.tensors,
        )
        for parameter, state, piece in part.slices:
            entries[parameter].states.setdefault(state, []).append(piece)
        manifest.check_complete()
        return folders.commit(partial, name, manifest, latest=True)
    except BaseException:
        files.abandon()
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _engine_values(
    model: dict[str, Any], optimizer: dict[str, Any] | None, client: dict[str, Any], files: RankFiles
) -> dict[str, Any]:
    def put(tensor: torch.Tensor) -> str:
        name = f"value:0:{len(files.part.tensors)}"
        files.part.tensors[name] = files.put(name, tensor.detach().contiguous())
        return name

    schedule = model.get("lr_scheduler")
    if isinstance(schedule, dict) and set(schedule) == {"last_batch_iteration"}:
        # DeepSpeed's schedules know their step alone; torch's count the same from it.
        last = int(schedule["last_batch_iteration"])
        schedule = {"last_epoch": last, "_step_count": last + 1}
    return {
        "global_steps": int(model.get("global_steps", 0)),
        "micro_steps": int(model.get("global_steps", 0)),
        "skipped_steps": int(model.get("skipped_steps", 0)),
        "samples": int(model.get("global_samples", 0)),
        "norm": None,
        "applied": True,
        "window": {},
        "loss_scale": {"scale": (optimizer or {}).pop("loss_scale", 1.0), "patience": 1, "good_steps": 0},
        "client_state": encode(client, "client_state", put),
        "extra_state": {},
        "frozen_excluded": False,
        **({"lr_scheduler": encode(schedule, "lr_scheduler", put)} if isinstance(schedule, dict) else {}),
        **({"optimizer": optimizer} if optimizer is not None else {}),
    }


def _write(
    found: _Found, models: list[dict[str, Any]], files: RankFiles, entries: dict[str, Entry]
) -> dict[str, Any] | None:
    """Every tensor; returns what is known of the optimizer."""
    model = models[0]
    module: dict[str, torch.Tensor] = model["module"]
    aliases: dict[str, list[str]] = {}
    for other, first in dict(model.get("shared_params") or {}).items():
        aliases.setdefault(first, []).append(other)
    groups: list[dict[str, Any]] = [dict(shapes) for shapes in model.get("param_shapes") or []]
    if not found.optimizers or not groups:
        shared = {other for others in aliases.values() for other in others}
        buffers = set(model.get("buffer_names") or ())
        for name, tensor in module.items():
            if name not in shared:
                kind = "buffer" if name in buffers else "parameter"
                _put_whole(files, entries, name, tensor, kind, aliases)
        return None
    # What the state holds and neither names as a buffer nor trains: other names of trained weights, at stage 3.
    trained = {name for shapes in groups for name in shapes}
    frozen = dict(model.get("frozen_param_shapes") or {})
    buffers = set(model.get("buffer_names") or ())
    optimizer = _write_trained(found, groups, module, files, entries, aliases)
    for name, shape in frozen.items():
        parts = [dict(each.get("frozen_param_fragments") or {}).get(name) for each in models]
        whole = torch.cat([part.reshape(-1) for part in parts if part is not None])[: math.prod(shape)]
        _put_whole(files, entries, name, whole.view(tuple(shape)), "frozen", aliases)
    known = trained | set(frozen) | {other for others in aliases.values() for other in others}
    for name, tensor in module.items():
        if name in known:
            continue
        if name in buffers:
            _put_whole(files, entries, name, tensor, "buffer", aliases)
        elif tensor.numel():
            _put_whole(files, entries, name, tensor, "frozen", aliases)
    return optimizer


def _put_whole(
    files: RankFiles,
    entries: dict[str, Entry],
    name: str,
    tensor: torch.Tensor,
    kind: str,
    aliases: dict[str, list[str]],
) -> None:
    shape = tuple(tensor.shape)
    entries[name] = Entry(shape, _dtype(tensor), kind, tuple(aliases.get(name, ())))
    files.put_piece(Piece(name, WEIGHT, Run.of(shape), tensor.detach().contiguous().reshape(-1)), shape)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _write_trained(
    found: _Found,
    groups: list[dict[str, Any]],
    module: dict[str, torch.Tensor],
    files: RankFiles,
    entries: dict[str, Entry],
    aliases: dict[str, list[str]],
) -> dict[str, Any]:
    ranks = len(found.optimizers)
    for shapes in groups:
        for name, shape in shapes.items():
            dtype = _dtype(module[name]) if name in module else "float32"
            entries[name] = Entry(tuple(shape), dtype, "parameter", tuple(aliases.get(name, ())))
    steps = 0
    options: list[Any] = []
    scale = 1.0
    first = [0] * len(groups)
    with Progress(f"importing {found.folder}", ranks, unit="ranks") as progress:
        for rank, path in enumerate(found.optimizers):
            saved = read(path)["optimizer_state_dict"]
            stage_3 = "fp32_flat_groups" in saved
            key = "fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"
            if key not in saved:
                raise CheckpointError(f"{path} holds no {key}; ZeRO stages 1, 2 and 3 are read")
            scale = float(getattr(saved.get("loss_scaler"), "state", {}).get("cur_scale", scale))
            base = saved["optimizer_state_dict" if stage_3 else "base_optimizer_state"]
            weights: list[torch.Tensor] = list(saved[key])
            states, options = _states_of(base, len(weights), options, path)
            moments: list[dict[str, torch.Tensor]] = []
            for state, weight in zip(states, weights, strict=True):
                steps = max(steps, int(state.get("step", 0)))
                moments.append(
                    {n: v for n, v in state.items() if isinstance(v, torch.Tensor) and v.numel() >= weight.numel() > 1}
                )
            if stage_3:
                _put_stage_3(files, groups, weights, moments, rank, ranks)
            else:
                for index, (weight, state) in enumerate(zip(weights, moments, strict=True)):
                    parts = list(_parts_of_stage_2(groups[index], weight.numel(), first[index]))
                    first[index] += weight.numel()
                    _put_parts(files, parts, {WEIGHT: weight, **state}, rank)
            progress.advance()
    listed = [
        {"options": encode(each, "param_groups", _no_tensors), "parameters": sorted(shapes)}
        for each, shapes in zip(options, groups, strict=False)
    ]
    return {"type": "DeepSpeed", "steps": steps, "groups": listed, "scalars": {}, "loss_scale": scale}


def _no_tensors(tensor: torch.Tensor) -> float:
    raise CheckpointError("param_groups: a tensor is not expected among the optimizer's options")


def _states_of(base: Any, count: int, options: list[Any], path: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """The optimizer's state by flat, and its groups' options."""
    if isinstance(base, list):  # an elastic checkpoint: states alone
        return [dict(state) for state in base], options
    if not isinstance(base, dict) or "state" not in base:
        raise CheckpointError(f"{path}: the optimizer's state is not in a form that is known")
    given = [{k: v for k, v in group.items() if k != "params"} for group in base.get("param_groups", [])]
    state = base["state"]
    return [dict(state.get(index, {})) for index in range(count)], given


def _put_stage_3(
    files: RankFiles,
    groups: list[dict[str, Any]],
    weights: list[torch.Tensor],
    moments: list[dict[str, torch.Tensor]],
    rank: int,
    ranks: int,
) -> None:
    """Sub-groups cut the run of all parameters anew, at parameters' borders: laid end to end they are one."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    parts = list(_parts_of_stage_3(shapes, rank, ranks))
    position = 0
    left = iter(parts)
    part = next(left, None)
    for weight, state in zip(weights, moments, strict=True):
        mine = []
        while part is not None and part.at < position + weight.numel():
            mine.append(_Part(part.name, part.shape, part.start, part.stop, part.at - position))
            part = next(left, None)
        _put_parts(files, mine, {WEIGHT: weight, **state}, rank)
        position += weight.numel()


def _put_parts(files: RankFiles, parts: Iterable[_Part], flats: dict[str, torch.Tensor], rank: int) -> None:
    for part in parts:
        box = Run.of(part.shape).box
        for state, flat in flats.items():
            values = flat[part.at : part.at + part.stop - part.start].contiguous()
            files.put_piece(Piece(part.name, state, Run(box, part.start, part.stop), values), part.shape)
