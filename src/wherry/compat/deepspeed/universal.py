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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from wherry.checkpoint import export as exporting
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import write_text
from wherry.checkpoint.format import WEIGHT, Entry, Manifest, dtype_named
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed import VERSION
from wherry.compat.deepspeed.importing import LATEST_UNIVERSAL, AsOurs, is_theirs, is_universal
from wherry.engine import Engine
from wherry.errors import WherryError
from wherry.observe.log import say
from wherry.observe.progress import Progress

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


def write_model_file(engine: Engine, folder: Path, module: dict[str, Any], client_state: dict[str, Any]) -> None:
    """What scripts `torch.load` of a checkpoint: the working weights under `module`, and counts. No load needs it."""
    own: dict[tuple[Any, ...], torch.Tensor] = {}  # without the flat that it is a part of, and tied ones once

    def alone(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
        if key not in own:
            own[key] = value.detach().to("cpu", copy=True)
        return own[key]

    found = {
        **client_state,
        "module": {name: alone(value) for name, value in module.items()},
        "buffer_names": [name for name, _ in engine.module.named_buffers() if name in module],
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": 1,
        "ds_config": engine.config,
        "ds_version": VERSION,
    }
    exporting.write_torch(found, Path(get_model_ckpt_name_for_rank(folder, "00")))


def convert(source: Path, out: Path) -> None:
    """Write the checkpoint in the folder `source`, Wherry's or DeepSpeed's, as a universal one to `out`."""
    if out.exists() and not is_universal(out) and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there and is no universal checkpoint; give another folder, or move it away")
    with ExitStack() as stack:
        if source.is_dir() and is_theirs(source):
            ours = AsOurs(source.parent, source.name)
            stack.callback(ours.close)
            source = ours.folder / source.name
        folder = exporting.find(source)
        manifest = exporting.verified(folder)
        if "optimizer" not in manifest.engine:
            raise CheckpointError(
                f"{folder} holds no optimizer, which a universal checkpoint has; train a model with one"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)))
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
        # The groups of the optimizer, each with its parameters in the model's order.
        groups = [set(group["parameters"]) for group in self.optimizer["groups"]]
        self.groups = [[name for name in self.trained if name in group] for group in groups]

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
        # Where an engine at stage 3 looks for it.
        other = path.with_name(f"{ZERO_FILE_PREFIX}0_{path.name}")
        try:
            os.link(path, other)
        except OSError:  # of a disk that knows of no links
            shutil.copyfile(path, other)

    def _write_parameter(self, zero: Path, name: str, entry: Entry) -> None:
        if "/" in name or not name.strip("."):
            raise CheckpointError(f"{name!r}: a parameter's name is that of a folder here, which this one cannot be")
        (folder := zero / name).mkdir()
        for state in (WEIGHT, *self.manifest.state_names()):
            if state in entry.states:
                values = self.reader.tensor(name, state, torch.float32).view(entry.shape)
            else:  # of a parameter that has not been updated
                values = torch.zeros(entry.shape)
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
        if self.optimizer["scalars"]:
            say("%s keeps a number for each parameter, which is not in a universal checkpoint", self.optimizer["type"])
        return {
            "param_groups": groups,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "zero_stage": self.stage,
            "ds_version": VERSION,
            "loss_scale": self.manifest.engine.get("loss_scale"),
        }

    def _model_states(self) -> dict[str, Any]:
        engine, value = self.manifest.engine, self.reader.value
        if engine.get("extra_state"):
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
            **value(engine.get("client_state", {}), "client_state"),
            "module": module,
            "buffer_names": [name for name, entry in self.entries.items() if entry.kind == "buffer"],
            "optimizer": None,
            "param_shapes": [{name: torch.Size(self.trained[name].shape) for name in names} for names in self.groups],
            "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()} or None,
            "frozen_param_fragments": frozen or None,
            "shared_params": {other: n for n, e in self.trained.items() for other in e.aliases},
            "lr_scheduler": self._schedule(),
            "sparse_tensor_module_names": set(),
            "global_steps": engine.get("global_steps", 0),
            "global_samples": engine.get("samples", 0),
            "skipped_steps": engine.get("skipped_steps", 0),
            "dp_world_size": self.manifest.world_size,
            "mp_world_size": 1,
            "ds_config": self.manifest.config,
            "ds_version": VERSION,
        }

    def _schedule(self) -> Any:
        if "lr_scheduler" not in self.manifest.engine:
            return None
        state = self.reader.value(self.manifest.engine["lr_scheduler"], "lr_scheduler")
        if isinstance(state, dict) and isinstance(last := state.get("last_epoch"), int):
            state = {"last_batch_iteration": last, **state}
        return state


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
