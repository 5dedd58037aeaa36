"""Files under DeepSpeed's names in Wherry's checkpoints, for scripts that look for them or `torch.load` them.

No load needs them: they hold the counts, the client state, and the working weights where every rank has them whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherry.checkpoint import export as exporting
from wherry.checkpoint.format import Manifest
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed import VERSION

if TYPE_CHECKING:
    from wherry.engine import Engine

# Entries that an engine takes from a model file for itself.
TAKEN = ("module", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size")


def model_file(stage: int) -> str:
    return f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt"


def optimizer_file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write_model_file(engine: Engine, folder: Path, module: dict[str, Any]) -> None:
    """Write the working weights under `module`, and the counts."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(value: Any) -> Any:
        """Copy a tensor out of its flat, which the file would hold whole; tied ones once."""
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    with CheckpointReader(folder) as reader:
        states = model_states(reader.manifest, reader)
    states["module"] = {name: copied(value) for name, value in module.items()}
    exporting.write_torch(states, folder / model_file(engine.zero_optimization_stage()))


def without_weights(engine: Engine, exclude_frozen_parameters: bool) -> dict[str, Any]:
    """Make the state dict of stage 3, where no rank has a whole weight: empty tensors stand for weights."""
    weights = engine.module.named_parameters(remove_duplicate=False)
    kept = {
        name: torch.empty(0, dtype=p.dtype) for name, p in weights if p.requires_grad or not exclude_frozen_parameters
    }
    return {**engine.plain_tensors(), **kept}


def write_optimizer_file(engine: Engine, folder: Path, rank: int) -> None:
    """Write a rank's facts of the optimizer; its states are in the checkpoint's own files only."""
    prefix = "bf16_" if engine.working_dtype is torch.bfloat16 else ""
    states = optimizer_states(engine.zero_optimization_stage(), engine.dp_world_size, engine.config)
    exporting.write_torch(states, folder / f"{prefix}{optimizer_file(rank)}")


def model_states(manifest: Manifest, reader: CheckpointReader) -> dict[str, Any]:
    """Collect the entries of DeepSpeed's `*_model_states.pt`, except the model's tensors."""
    engine, entries, value = manifest.engine, manifest.entries, reader.value
    schedule = value(engine["lr_scheduler"], "lr_scheduler") if "lr_scheduler" in engine else None
    if isinstance(schedule, dict) and isinstance(last := schedule.get("last_epoch"), int):
        schedule = {"last_batch_iteration": last, **schedule}
    groups = [set(group["parameters"]) for group in engine.get("optimizer", {"groups": ()})["groups"]]
    return {
        "buffer_names": [name for name, entry in entries.items() if entry.kind == "buffer"],
        "param_shapes": [{n: torch.Size(e.shape) for n, e in entries.items() if n in group} for group in groups],
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
    """Read the entries of a checkpoint that the engine has not `taken`, which `load_checkpoint` returns."""
    with CheckpointReader(folder) as reader:
        states = model_states(reader.manifest, reader)
    return {key: value for key, value in states.items() if key not in {*taken}}


def optimizer_states(stage: int, ranks: int, config: dict[str, Any]) -> dict[str, Any]:
    """Collect the entries of DeepSpeed's `*_optim_states.pt`, except tensors and where each lies."""
    return {
        "optimizer_state_dict": {"zero_stage": stage, "partition_count": ranks},
        "ds_config": config,
        "ds_version": VERSION,
        "states": "in the safetensors files of this checkpoint, which engine.load_checkpoint loads; "
        "deepspeed.utils.zero_to_fp32 writes the weights for other programs",
    }
