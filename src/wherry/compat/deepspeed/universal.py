"""`deepspeed.checkpoint.ds_to_universal`: a checkpoint in the layout that DeepSpeed loads with any number of ranks.

OUT/zero/NAME/fp32.pt, exp_avg.pt, step.pt ...   a trained parameter's master, moments and count of updates
OUT/zero/optimizer_state.pt                      the options of its groups, and where the loss scale stands
OUT/mp_rank_00_model_states.pt                   everything else
OUT/../latest_universal                          the name of OUT

What Wherry has saved needs none of this to be loaded by Wherry: it is for DeepSpeed, and for scripts that go on from
such a folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherry.checkpoint import export as exporting
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import write_text
from wherry.checkpoint.format import WEIGHT, Entry, Manifest, dtype_named
from wherry.checkpoint.reader import CheckpointReader
from wherry.checkpoint.session import plain_tensors
from wherry.compat.deepspeed import VERSION
from wherry.compat.deepspeed.importing import LATEST_UNIVERSAL, import_checkpoint, is_theirs, is_universal
from wherry.errors import WherryError
from wherry.observe.log import say
from wherry.observe.progress import Progress

if TYPE_CHECKING:
    from wherry.engine import Engine

# Where programs look for what, in folders of checkpoints.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, BF16_ZERO_FILE_PREFIX = "zero_pp_rank_", "bf16_zero_pp_rank_"
OPTIM_FILE_SUFFIX = "_optim_states.pt"


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return os.path.join(base_folder, name)


# Beside Wherry's own files of a checkpoint, for scripts that look for these or `torch.load` them. No load needs them.


# What an engine takes from a model file for itself.
TAKEN = ("module", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size")


def write_model_file(engine: Engine, folder: Path, module: dict[str, Any]) -> None:
    """The working weights under `module`, and counts."""
    own: dict[tuple[Any, ...], torch.Tensor] = {}  # without the flat that it is a part of, and tied ones once

    def alone(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
        if key not in own:
            own[key] = value.detach().to("cpu", copy=True)
        return own[key]

    with CheckpointReader(folder) as reader:
        found = model_states(reader.manifest, reader)
    found["module"] = {name: alone(value) for name, value in module.items()}
    path = Path(get_model_ckpt_name_for_rank(folder, "00"))
    exporting.write_torch(found, _of_stage_3(path) if engine.zero_optimization_stage() == 3 else path)


def without_weights(engine: Engine, exclude_frozen_parameters: bool) -> dict[str, Any]:
    """The state dict at stage 3, where no weight of this rank's is whole: tensors without elements stand for them."""
    weights = engine.module.named_parameters(remove_duplicate=False)
    kept = {
        name: torch.empty(0, dtype=p.dtype) for name, p in weights if p.requires_grad or not exclude_frozen_parameters
    }
    return {**plain_tensors(engine._session()), **kept}


def write_optimizer_file(engine: Engine, folder: Path, rank: int) -> None:
    """What there is to know of a rank's part of the optimizer, whose states are in the checkpoint's own files alone."""
    path = Path(get_zero_ckpt_name_for_rank(folder, rank, 0))
    if engine.working_dtype is torch.bfloat16:
        path = path.with_name(f"bf16_{path.name}")
    states = optimizer_states(engine.zero_optimization_stage(), engine.dp_world_size, engine.config)
    exporting.write_torch(states, path)


def model_states(manifest: Manifest, reader: CheckpointReader) -> dict[str, Any]:
    """What DeepSpeed has in `*_model_states.pt`, but tensors of the model."""
    engine, entries, value = manifest.engine, manifest.entries, reader.value
    schedule = value(engine["lr_scheduler"], "lr_scheduler") if "lr_scheduler" in engine else None
    if isinstance(schedule, dict) and isinstance(last := schedule.get("last_epoch"), int):
        schedule = {"last_batch_iteration": last, **schedule}
    return {
        "buffer_names": [name for name, entry in entries.items() if entry.kind == "buffer"],
        "param_shapes": [{n: torch.Size(entries[n].shape) for n in names} for names in trained_groups(manifest)],
        "shared_params": {o: n for n, e in entries.items() if e.kind == "parameter" for o in e.aliases},
        "lr_scheduler": schedule,
        "global_steps": engine.get("global_steps", 0),
        "global_samples": engine.get("samples", 0),
        "skipped_steps": engine.get("skipped_steps", 0),
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "ds_config": manifest.config,
        "ds_version": VERSION,
        **value(engine.get("client_state", {}), "client_state"),
    }


def client_states(folder: Path, taken: Iterable[str]) -> dict[str, Any]:
    """What `load_checkpoint` returns of a checkpoint beside what the engine has `taken` from it."""
    with CheckpointReader(folder) as reader:
        found = model_states(reader.manifest, reader)
    for key in taken:
        found.pop(key, None)
    return found


def optimizer_states(stage: int, ranks: int, config: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed has in `*_optim_states.pt`, but weights, moments, and what says where in them a parameter is."""
    return {
        "optimizer_state_dict": {"zero_stage": stage, "partition_count": ranks},
        "ds_config": config,
        "ds_version": VERSION,
        "states": "in the safetensors files of this checkpoint, which engine.load_checkpoint loads; "
        "deepspeed.checkpoint.ds_to_universal and deepspeed.utils.zero_to_fp32 write them for other programs",
    }


def trained_groups(manifest: Manifest) -> list[list[str]]:
    """Of each group of the optimizer its parameters, in the model's order."""
    groups = [set(group["parameters"]) for group in manifest.engine.get("optimizer", {"groups": ()})["groups"]]
    return [[name for name in manifest.entries if name in group] for group in groups]


def _of_stage_3(path: Path) -> Path:
    """Where an engine at stage 3 looks for a rank's model file."""
    return path.with_name(f"{ZERO_FILE_PREFIX}0_{path.name}")


def convert(source: Path, out: Path) -> None:
    """Write the checkpoint in the folder `source`, Wherry's or DeepSpeed's, as a universal one to `out`."""
    if out.exists() and not is_universal(out) and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there and is no universal checkpoint; give another folder, or move it away")
    theirs = source.is_dir() and is_theirs(source)
    found = source if theirs else exporting.find(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        aside = Path(made)
        folder = import_checkpoint(source.parent, aside / "ours", source.name) if theirs else found
        manifest = exporting.verified(folder)
        if "optimizer" not in manifest.engine:
            raise CheckpointError(
                f"{found} holds no optimizer, which a universal checkpoint has; train a model with one"
            )
        with CheckpointReader(folder, manifest) as reader:
            _Universal(manifest, reader).write(aside / "whole")
        shutil.rmtree(out, ignore_errors=True)
        os.rename(aside / "whole", out)
    write_text(out.parent / LATEST_UNIVERSAL, out.name)


class _Universal:
    def __init__(self, manifest: Manifest, reader: CheckpointReader) -> None:
        self.manifest, self.reader = manifest, reader
        self.entries = manifest.entries
        self.trained = {name: entry for name, entry in self.entries.items() if entry.kind == "parameter"}
        self.optimizer = manifest.engine["optimizer"]
        self.stage = int(manifest.config.get("zero_optimization", {}).get("stage", 0))
        self.groups = trained_groups(manifest)
        # What of one that has not been updated would be zeros: the states that all others have.
        found = [set(entry.moments) for entry in self.trained.values() if entry.moments]
        self.common = set.intersection(*found) if found else set()

    def write(self, out: Path) -> None:
        zero = out / "zero"
        zero.mkdir(parents=True)
        with Progress(f"writing {out}", len(self.trained), unit="parameters") as progress:
            for name, entry in self.trained.items():
                self._write_parameter(zero, name, entry)
                progress.advance()
        torch.save(self._optimizer_state(), zero / "optimizer_state.pt")
        path = Path(get_model_ckpt_name_for_rank(out, "00"))
        torch.save(self._model_states(), path)
        try:
            os.link(path, _of_stage_3(path))
        except OSError:  # of a disk that knows of no links
            shutil.copyfile(path, _of_stage_3(path))

    def _write_parameter(self, zero: Path, name: str, entry: Entry) -> None:
        if "/" in name or not name.strip("."):
            raise CheckpointError(f"{name!r}: a parameter's name is that of a folder here, which this one cannot be")
        (folder := zero / name).mkdir()
        for state in (WEIGHT, *(entry.moments or sorted(self.common))):
            written = state in entry.states
            values = self.reader.tensor(name, state, torch.float32) if written else torch.zeros(entry.shape)
            file = "fp32" if state == WEIGHT else state
            torch.save({"param": values, "cat_dim": 0}, folder / f"{file}.pt")
        torch.save(self._steps(name), folder / "step.pt")

    def _steps(self, name: str) -> int:
        return int(self.optimizer.get("parameter_steps", {}).get(name, self.optimizer["steps"]))

    def _optimizer_state(self) -> dict[str, Any]:
        groups, states = [], {}
        for index, (group, names) in enumerate(zip(self.optimizer["groups"], self.groups, strict=True)):
            options = self.reader.value(group["options"], f"param_groups[{index}]")
            groups.append({**options, "params": [index]})
            states[index] = {"step": max(map(self._steps, names), default=0)}
        if self.optimizer["scalars"] or any("objects" in rank for rank in self.manifest.ranks):
            say(
                "%s keeps more of each parameter than tensors of elements, which is not in a universal checkpoint",
                self.optimizer["type"],
            )
        return {
            "param_groups": groups,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "zero_stage": self.stage,
            "ds_version": VERSION,
            "loss_scale": self.manifest.engine.get("loss_scale"),
        }

    def _model_states(self) -> dict[str, Any]:
        if self.manifest.engine.get("extra_state"):
            say("the extra state of the model's modules is not in a universal checkpoint")
        module: dict[str, torch.Tensor] = {}
        frozen: dict[str, torch.Tensor] = {}
        for name, entry in self.entries.items():
            # At stage 3 nobody holds the whole model.
            empty = self.stage == 3 and entry.kind != "buffer"
            dtype = dtype_named(entry.dtype)
            tensor = torch.empty(0, dtype=dtype) if empty else self.reader.tensor(name, WEIGHT, dtype)
            module.update(dict.fromkeys((name, *entry.aliases), tensor))
            if self.stage == 3 and entry.kind == "frozen":
                frozen[name] = self.reader.tensor(name, WEIGHT, dtype)
        return {
            **model_states(self.manifest, self.reader),
            "module": module,
            "optimizer": None,
            "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()} or None,
            "frozen_param_fragments": frozen or None,
            "sparse_tensor_module_names": set(),
        }


def main(args: Any = None) -> int:
    """The command `ds_to_universal`, with a list of arguments; or what it does, with an object that has them."""
    if hasattr(args, "input_folder"):
        convert(Path(args.input_folder), Path(args.output_folder))
        return 0
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Write a checkpoint in the layout that DeepSpeed calls universal."
    )
    parser.add_argument("--input_folder", required=True, help="folder of one checkpoint, like path/global_step12")
    parser.add_argument("--output_folder", required=True, help="like path/global_step12_universal")
    ignored = "taken, and not needed: one parameter after the other is written, and nothing beside"
    for name, default in (("--num_extract_workers", 4), ("--num_merge_workers", 2)):
        parser.add_argument(name, type=int, default=default, help=ignored)
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help=ignored)
    given = parser.parse_args(args)
    try:
        convert(Path(given.input_folder), Path(given.output_folder))
    except (WherryError, OSError) as error:
        print(f"ds_to_universal: {error}", file=sys.stderr)
        return 2
    return 0
