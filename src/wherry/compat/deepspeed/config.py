"""Configs: what scripts read of one, and one written in DeepSpeed's keys only, with what would mean otherwise there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from wherry import config as configs
from wherry.config import Config
from wherry.config.blocks import OffloadOptimizer, OffloadParam, ZeroOptimization
from wherry.config.fields import ConfigBlock
from wherry.config.scheduler import SCHEDULES
from wherry.config.without_effect import idle_keys_in

LR_SCHEDULE = "lr_schedule"
VALID_LR_SCHEDULES = list(SCHEDULES)
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`--deepspeed` and `--deepspeed_config FILE` on a script's own parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with the engine")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the engine's config, a JSON file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


class _WithIdleKeys(ConfigBlock):
    """A block that scripts make and read: its keys without effect are there too, with what was given or the default."""

    model_config = ConfigDict(extra="allow")

    path: ClassVar[str]
    """Where the block is in a config."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: dict[str, Any]) -> dict[str, Any]:
        idle = idle_keys_in(cls.path)
        unknown = [name for name in given if name not in idle and name not in cls.model_fields]
        if unknown:
            raise ValueError(f"{unknown[0]}: there is no such key in {cls.__name__}")
        checked = {name: idle[name].checker.validate_python(value) for name, value in given.items() if name in idle}
        return {name: row.default for name, row in idle.items()} | given | checked


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizer, _WithIdleKeys):
    """`zero_optimization.offload_optimizer`."""

    path: ClassVar[str] = "zero_optimization.offload_optimizer"


class DeepSpeedZeroOffloadParamConfig(OffloadParam, _WithIdleKeys):
    """`zero_optimization.offload_param`."""

    path: ClassVar[str] = "zero_optimization.offload_param"


class DeepSpeedZeroConfig(ZeroOptimization, _WithIdleKeys):
    """`zero_optimization`."""

    path: ClassVar[str] = "zero_optimization"
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig = Field(default_factory=DeepSpeedZeroOffloadOptimizerConfig)
    offload_param: DeepSpeedZeroOffloadParamConfig = Field(default_factory=DeepSpeedZeroOffloadParamConfig)


def _with_idle_keys(block: ConfigBlock, written: Any, path: str) -> dict[str, Any]:
    """A resolved block's values, and those that were written for its keys without effect."""
    written = written if isinstance(written, dict) else {}
    found = {name: written[name] for name in idle_keys_in(path) if name in written}
    for name, value in block:
        inner = isinstance(value, ConfigBlock)
        found[name] = _with_idle_keys(value, written.get(name), f"{path}.{name}") if inner else value
    return found


class DeepSpeedConfig:
    """A config, checked; its values under the names that scripts read."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        from wherry.compat.deepspeed.comm import get_world_size

        self.config = configs.load(config)
        self._param_dict = self.config.given
        sizes = self.config.batch(get_world_size(), "as the world size says")
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes
        zero = self.config.zero_optimization
        written = self._param_dict.get("zero_optimization")
        self.zero_config = DeepSpeedZeroConfig(**_with_idle_keys(zero, written, "zero_optimization"))
        self.zero_optimization_stage = zero.stage
        self.zero_enabled = zero.stage > 0
        self.gradient_clipping = self.config.gradient_clipping
        self.fp16_enabled = self.config.fp16.enabled
        self.bfloat16_enabled = self.config.bf16.enabled


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
    tree = _kept(config.written, "", notes)
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
