"""A config written as DeepSpeed itself reads it: in its keys only, and with what would mean something else there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wherry.config import Config
from wherry.plan.write import tree_of

# What DeepSpeed does not have, or refuses, and what becomes of it there.
OWN_KEYS: Mapping[str, str] = {
    "$schema": "",
    "aio.checksum": "what rests on disk is read there as it comes",
    "wherry": "its update policy, units and formats are Wherry's own",
    "activation_checkpointing.policy": "the model's code makes the checkpoints there",
    "activation_checkpointing.every": "the model's code says which blocks are checkpointed there",
    "activation_checkpointing.save_operations": "a checkpoint is recomputed whole there",
    "activation_checkpointing.nvme_path": "checkpoints are kept on the device or in host memory there",
    "activation_checkpointing.offload_min_bytes": "",
    "activation_checkpointing.memory": "",
    "zero_optimization.grad_hooks": "it is refused there",
    "zero_optimization.offload_optimizer.buffer_size": "it is refused there",
}
# Keys that are read under another name there.
OTHER_NAMES: Mapping[str, str] = {"aio.thread_count": "intra_op_parallelism"}


def for_deepspeed(config: Config) -> tuple[dict[str, Any], list[str]]:
    """What was given, in DeepSpeed's keys, and notes of what could not be said in them."""
    notes: list[str] = []
    tree = _kept(tree_of(config), "", notes)
    if "gradient_clipping" not in tree:
        tree["gradient_clipping"] = config.gradient_clipping
        notes.append("gradient_clipping: written out, as its default is another there since 2026")
    notes += [f'{path}: "auto" is filled in by a Trainer only' for path in sorted(_autos(tree, ""))]
    return tree, notes


def _kept(tree: Mapping[str, Any], prefix: str, notes: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in OWN_KEYS:
            why = OWN_KEYS[path]
            notes += [f"{path}: left out; {why}"] if why else []
            continue
        if isinstance(value, Mapping):
            inner = _kept(value, f"{path}.", notes)
            if inner or not value:
                kept[name] = inner
        else:
            kept[OTHER_NAMES.get(path, name)] = value
    return kept


def _autos(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{name}.")
        elif value == "auto":
            yield f"{prefix}{name}"
