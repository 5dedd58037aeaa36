"""Configs of scripts: read with DeepSpeed's defaults and rules, and written in DeepSpeed's keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from wherry import config as configs
from wherry.config import Config
from wherry.config.fields import block_of, key_names
from wherry.config.schema import MICRO, TRAIN
from wherry.config.source import ConfigSource, read
from wherry.config.without_effect import idle_keys_in
from wherry.errors import ConfigError
from wherry.observe.log import say, warn
from wherry.update.loss_scale import LossScaler

# Names of optimizers that scripts import as variables.
LAMB_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "lamb", "onebitlamb"
# DeepSpeed's defaults of Muon and of the AdamW beside it.
MUON_DEFAULTS: Mapping[str, Any] = {
    "lr": 0.02, "adamw_lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "adamw_eps": 1e-10,
}  # fmt: skip
# The monitors whose runs have another default name than Wherry's.
_RUN_NAMES = {
    "tensorboard": ("job_name", "DeepSpeedJobName"),
    "csv_monitor": ("job_name", "DeepSpeedJobName"),
    "wandb": ("project", "deepspeed"),
}
# Blocks of which DeepSpeed ignores unknown keys; "" is the config itself.
_LENIENT = (
    *("", "optimizer", "scheduler", "flops_profiler", "activation_checkpointing", "data_types", "checkpoint"),
    *("torch_autocast", "aio"),
)


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A config that cannot be used. DeepSpeed raises errors of several kinds, and scripts may catch any."""


@contextmanager
def _as_theirs() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise DeepSpeedConfigError(str(error), error.problems) from None


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine")
    group.add_argument("--deepspeed_config", help="the engine's config, a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)  # BingBertGlue reads it
    return parser


def given_to(args: Any, config: Any, config_params: Any) -> Any:
    """Select the one config among the arguments of `initialize`."""
    if config is None:
        config = config_params
    elif config_params is not None:
        say("initialize: config_params is left aside, as config is given too")
    flag = getattr(args, "deepspeed_config", None) or None  # a flag that was left out may be ""
    if flag is not None and config is not None:
        raise DeepSpeedConfigError(
            "initialize: the config was given 2 times, as config and as args.deepspeed_config; give it once"
        )
    if flag is None and config is None:
        raise DeepSpeedConfigError(
            "deepspeed.initialize requires a config: give config= (a dict or a path), or --deepspeed_config FILE"
        )
    return config if flag is None else flag


def load(config: Any, *, refuses: bool = True) -> Config:
    """Load a config with DeepSpeed's defaults, without the keys that DeepSpeed ignores.

    With `refuses=False` blocks of features that Wherry lacks are dropped rather than refused.
    """
    source: Config | ConfigSource
    if isinstance(config, Config):
        source, written = config, config.written
    else:
        source = read(config)
        written = source.given
        for name, row in idle_keys_in("").items():
            if row.effect == "refused" and not refuses:
                written.pop(name, None)
        for path in [*_unknown(written)]:
            _pop(written, path)  # which may be misspelled, so the line is a warning
            warn("config: %s is left aside: DeepSpeed does not read it", path)
        for path, why in [*_ignored(written)]:
            _pop(written, path)
            say("config: %s is left aside: %s", path, why)
        if isinstance(zero := written.get("zero_optimization"), dict):
            known = _known("zero_optimization")
            zero |= {f"stage3_{name}": zero.pop(name) for name in [*zero] if f"stage3_{name}" in known}
            if isinstance(leaves := zero.get("leaf_module"), dict):
                leaves |= {name: [value] for name, value in leaves.items() if isinstance(value, str)}
    overrides = {key: value for key, value in _defaults(written) if _at(written, key) is None}
    with _as_theirs():
        loaded = configs.load(source, overrides=overrides)
    _check(loaded)
    return loaded


def _known(path: str) -> set[str]:
    """Collect the keys of a block; "" is the config itself."""
    model = block_of(key_names(Config)[path]) if path else Config
    return {*key_names(model or Config), *idle_keys_in(path)}


def _unknown(written: Mapping[str, Any]) -> Iterator[str]:
    for path in _LENIENT:
        block = written.get(path) if path else written
        if isinstance(block, Mapping):
            names = (name for name in block if "." not in name and name not in _known(path))
            yield from (f"{path}.{name}" if path else name for name in names)


def _ignored(written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    zero = written.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage", 0) in (0, 1, 2):
        for name in ("offload_param", "cpu_offload_param", "cpu_offload_params"):
            if zero.get(name):
                yield f"zero_optimization.{name}", "parameters are whole on every rank below stage 3"
    is_adamw = str(_at(written, "optimizer.type")).lower() == "adamw"
    if is_adamw and _at(written, mode := "optimizer.params.adam_w_mode") is False:
        yield mode, "the type AdamW decouples its weight decay in any case"


def _defaults(written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield DeepSpeed's defaults that differ from Wherry's."""
    yield "gradient_clipping", 1.0
    yield "wherry.round_masters", True
    for block, (key, name) in _RUN_NAMES.items():
        if isinstance(written.get(block), Mapping):
            yield f"{block}.{key}", name
    params = "optimizer.params"
    optimizer, mode = str(_at(written, "optimizer.type")).lower(), _at(written, f"{params}.adam_w_mode")
    is_decoupled = optimizer == "adamw" or (optimizer == "adam" and mode in (None, True))
    if is_decoupled and _at(written, f"{params}.torch_adam"):
        yield f"{params}.weight_decay", 0.01  # torch's own default, which DeepSpeed's optimizers do not share
    if optimizer == "muon":
        if _at(written, f"{params}.lr") is None:
            yield f"{params}.muon_lr", MUON_DEFAULTS["lr"]
            yield f"{params}.adam_lr", MUON_DEFAULTS["adamw_lr"]
        yield f"{params}.weight_decay", MUON_DEFAULTS["weight_decay"]
        yield f"{params}.betas", [*MUON_DEFAULTS["betas"]]
        yield f"{params}.eps", MUON_DEFAULTS["adamw_eps"]


def _at(tree: Any, dotted: str) -> Any:
    if isinstance(tree, Mapping) and tree.get(dotted) is not None:
        return tree[dotted]
    for name in dotted.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _pop(tree: dict[str, Any], dotted: str) -> None:
    *blocks, name = [dotted] if dotted in tree else dotted.split(".")
    for block in blocks:
        tree = tree[block]
    del tree[name]


def _check(config: Config) -> None:
    """Refuse combinations that DeepSpeed refuses."""
    stage, bf16 = config.zero_optimization.stage, config.bf16
    if config.gradient_allreduce_op == "sum" and stage == 3:
        raise DeepSpeedConfigError("gradient_allreduce_op 'sum' is not supported with ZeRO stage 3; use mean")
    needs_zero = {
        "fp16.fp16_master_weights_and_grads": config.fp16.fp16_master_weights_and_grads,
        "bf16.bf16_master_weights_and_grads": bf16.bf16_master_weights_and_grads,
        "bf16.bf16_optimizer_states": bf16.bf16_optimizer_states,
    }
    for path in filter(needs_zero.get, needs_zero) if stage == 0 else ():
        raise DeepSpeedConfigError(f"{path} is only supported with ZeRO Stage 1, 2, or 3")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        raise DeepSpeedConfigError(
            "bf16.bf16_optimizer_states requires bf16.bf16_master_weights_and_grads to be enabled"
        )


def check_batch(config: Config, *, may_be_auto: bool = True) -> None:
    """Refuse a config without a batch size; "auto" is one where a Trainer fills it in."""
    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu)
    if sizes == (None, None) and not (may_be_auto and {TRAIN, MICRO} & {*config.auto}):
        raise DeepSpeedConfigError(f"Either {TRAIN} or {MICRO} needs to be provided")


def loss_scaler(config: Config) -> LossScaler:
    """Build the loss scale of an engine, with DeepSpeed's timing.

    The first step after the start, or after an overflow, does not count for the window. Without ZeRO there is no
    hysteresis, and the scale stays at its minimum.
    """
    plain = {"hysteresis": 1, "stops_at_min": False} if config.zero_optimization.stage == 0 else {}
    return LossScaler.from_config(config.fp16, grace=1, **plain)


class DeepSpeedConfig:
    """The values of a config that published scripts read."""

    def __init__(self, config: Any) -> None:
        from wherry.compat.deepspeed.comm import get_world_size  # with torch, which `wherry config` does without

        loaded = load(config, refuses=False)
        check_batch(loaded, may_be_auto=False)
        with _as_theirs():
            sizes = loaded.batch(get_world_size())
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes
        self.fp16_enabled = loaded.fp16.enabled
        self.monitor_config = SimpleNamespace(comet=loaded.comet)
        for block, (key, name) in _RUN_NAMES.items():
            own = getattr(loaded, block)
            named = own if block in loaded.written else own.model_copy(update={key: name})
            setattr(self.monitor_config, block, named)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"DeepSpeedConfig.{name} is not part of Wherry; read it in the config's own dict")


# Keys that DeepSpeed lacks or refuses, and why a note says so.
OWN_KEYS: Mapping[str, str] = {
    "$schema": "",
    "aio.checksum": "what rests on disk is read there as it comes",
    "mlflow": "it does not send there",
    "wherry": "its update policy, units and formats are Wherry's own",
    "activation_checkpointing.policy": "the model's code makes the checkpoints there",
    "activation_checkpointing.every": "the model's code says which blocks are checkpointed there",
    "activation_checkpointing.save_operations": "a checkpoint is recomputed whole there",
    "activation_checkpointing.nvme_path": "checkpoints are kept on the device or in host memory there",
    "activation_checkpointing.offload_min_bytes": "",
    "activation_checkpointing.memory": "",
    **dict.fromkeys(
        [f"optimizer.params.{name}" for name in ("ns_steps", "ns_coefficients", "ns_eps", "adjust_lr_fn")],
        "Muon has it fixed there",
    ),
    "zero_optimization.grad_hooks": "it is refused there",
    "zero_optimization.offload_optimizer.buffer_size": "it is refused there",
}
# Keys that DeepSpeed reads under another name.
OTHER_NAMES: Mapping[str, str] = {"aio.thread_count": "intra_op_parallelism"}


def for_deepspeed(config: Config) -> tuple[dict[str, Any], list[str]]:
    """Write a config in DeepSpeed's keys; returns it, with notes on what those keys cannot express."""
    notes: list[str] = []
    tree = _kept(config.written, "", notes)
    if "gradient_clipping" not in tree:
        tree["gradient_clipping"] = config.gradient_clipping
        notes.append("gradient_clipping: written out, as its default is another there since 2026")
    notes += [f'{path}: "auto" is filled in by a Trainer only' for path in sorted(config.auto) if _at(tree, path)]
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
