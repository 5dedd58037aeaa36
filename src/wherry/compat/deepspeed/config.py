"""Configs: how a script's is read, what scripts read of one, and one written in DeepSpeed's keys only."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from wherry import config as configs
from wherry.compat.deepspeed.constants import (
    GRADIENT_ALLREDUCE_OP_SUPPORTED,
    GRADIENT_CLIPPING_DEFAULT,
    JOB_NAME_DEFAULT,
    LOG_LEVEL_DEFAULT,
    WANDB_PROJECT_DEFAULT,
    ValidationMode,
)
from wherry.compat.deepspeed.leaf_modules import DeepSpeedZeroLeafModuleConfig
from wherry.config import Config
from wherry.config.blocks import OffloadOptimizer, OffloadParam, ZeroOptimization
from wherry.config.fields import ConfigBlock, block_of, key_names
from wherry.config.schema import ACCUMULATION, MICRO, TRAIN
from wherry.config.source import ConfigSource, copied, read
from wherry.config.without_effect import idle_keys_in
from wherry.errors import ConfigError
from wherry.observe.log import say, warn
from wherry.update.loss_scale import LossScaler

# Names of optimizers, as variables that scripts import.
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER = "adagrad", "adam", "adamw", "lion"
LAMB_OPTIMIZER, MUON_OPTIMIZER = "lamb", "muon"
ONEBIT_ADAM_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "onebitadam", "zerooneadam", "onebitlamb"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"
DEEPSPEED_OPTIMIZERS = [
    *(ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER),
    *(ZERO_ONE_ADAM_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER),
]
# What its Muon and the Adam beside it have where a config does not say it.
MUON_DEFAULTS: dict[str, Any] = {
    "lr": 0.02,
    "adamw_lr": 3e-4,
    "weight_decay": 0.0,
    "betas": (0.9, 0.95),
    "adamw_eps": 1e-10,
}
TORCH_ADAM_PARAM, ADAM_W_MODE, ADAM_W_MODE_DEFAULT = "torch_adam", "adam_w_mode", True
BF16_MASTERS, FP16_MASTERS = "bf16_master_weights_and_grads", "fp16_master_weights_and_grads"
FP32_STATES = "fp32_optimizer_states"

# Blocks that DeepSpeed reads key by key, so that it does not notice others; "" is the config itself.
_LENIENT = (
    *("", "optimizer", "scheduler", "flops_profiler", "activation_checkpointing", "data_types", "checkpoint"),
    *("torch_autocast", "aio"),
)


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A config that cannot be used. DeepSpeed raises errors of several kinds, and scripts may catch any."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`--deepspeed` and `--deepspeed_config FILE` on a script's own parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with the engine")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the engine's config, a JSON file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


# --- how a script's config is read ---


def given_to(args: Any, config: Any, config_params: Any) -> Any:
    """The one config that `initialize` was given, whichever way."""
    if config is None:
        config = config_params
    elif config_params is not None:
        say("initialize: config_params is left aside, as config is given too")
    old = getattr(args, "deepscale_config", None) or None
    flag = getattr(args, "deepspeed_config", None) or None  # a flag that was left out may be ""
    if old is not None:
        warn("--deepscale_config is an older spelling of --deepspeed_config")
        if flag is not None:
            raise DeepSpeedConfigError(
                "initialize: args has a deepscale_config and a deepspeed_config; give it once, as --deepspeed_config"
            )
        flag = args.deepspeed_config = old
        args.deepscale_config = None
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
    """A config with DeepSpeed's defaults, and without what DeepSpeed does not read in it.

    What of it is not part of Wherry is an error, or left out for scripts that read what else is there.
    """
    source: Config | ConfigSource
    if isinstance(config, Config):
        source, written = config, config.written
    else:
        source = read(config)
        written = source.given
        _check_reduction(written)
        for name, row in idle_keys_in("").items():
            if row.effect == "refused" and not refuses:
                written.pop(name, None)
        _moments_of_bf16(written)
        for unread in (_unknown, _offload_of_whole_parameters, _mode_of_adamw, _unused_scale, _same_anyway):
            for path, why in unread(written):
                _remove(written, path)
                tell = warn if unread is _unknown else say  # it may be misspelt
                tell("config: %s is left aside: %s", ".".join(path), why)
        _list_leaves(written)
        _of_stage_3(written)
    overrides = {key: value for key, value in _defaults(written) if _at(written, key) is None}
    try:
        loaded = configs.load(source, overrides=overrides)
    except ConfigError as error:
        raise DeepSpeedConfigError(str(error), error.problems) from None
    _check_masters(loaded)
    return loaded


_MONITORS = (
    ("tensorboard", "job_name", JOB_NAME_DEFAULT),
    ("csv_monitor", "job_name", JOB_NAME_DEFAULT),
    ("wandb", "project", WANDB_PROJECT_DEFAULT),
)


def _defaults(written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those that are others than Wherry's."""
    yield "gradient_clipping", GRADIENT_CLIPPING_DEFAULT
    yield "wherry.round_masters", True
    for block, key, name in _MONITORS:
        if isinstance(written.get(block), Mapping):
            yield f"{block}.{key}", name
    name, mode = str(_at(written, "optimizer.type")).lower(), _at(written, f"optimizer.params.{ADAM_W_MODE}")
    decoupled = name == ADAMW_OPTIMIZER or (name == ADAM_OPTIMIZER and mode in (None, True))
    if decoupled and _at(written, f"optimizer.params.{TORCH_ADAM_PARAM}"):
        yield "optimizer.params.weight_decay", 0.01  # torch's own, which differs from theirs
    if name == MUON_OPTIMIZER:
        rates = {"muon_lr": MUON_DEFAULTS["lr"], "adam_lr": MUON_DEFAULTS["adamw_lr"]}
        given = _at(written, "optimizer.params.lr") is not None
        for key, value in {
            **({} if given else rates),
            "weight_decay": MUON_DEFAULTS["weight_decay"],
            "betas": [*MUON_DEFAULTS["betas"]],
            "eps": MUON_DEFAULTS["adamw_eps"],
        }.items():
            yield f"optimizer.params.{key}", value


Unread = Iterator[tuple[tuple[str, ...], str]]


def _unknown(written: Mapping[str, Any]) -> Unread:
    for path in _LENIENT:
        block = written.get(path) if path else written
        model = block_of(key_names(Config)[path]) if path else Config
        known = {*key_names(model or Config), *idle_keys_in(path)}
        for name in [*block] if isinstance(block, Mapping) else ():
            if name not in known and "." not in name:
                yield (*([path] if path else []), name), "DeepSpeed does not read it"


def _offload_of_whole_parameters(written: Mapping[str, Any]) -> Unread:
    zero = written.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage", 0) in (0, 1, 2):
        for name in ("offload_param", "cpu_offload_param", "cpu_offload_params"):
            if zero.get(name):
                yield ("zero_optimization", name), "parameters are whole on every rank below stage 3"


def _mode_of_adamw(written: Mapping[str, Any]) -> Unread:
    adamw = str(_at(written, "optimizer.type")).lower() == ADAMW_OPTIMIZER
    if adamw and _at(written, "optimizer.params.adam_w_mode") is False:
        yield ("optimizer", "params", ADAM_W_MODE), "the type AdamW decouples its weight decay in any case"


def _same_anyway(written: Mapping[str, Any]) -> Unread:
    """What DeepSpeed does in another way, with the same numbers."""
    # fp16 ones are not offered.
    if _at(written, f"optimizer.params.{FP32_STATES}") is False and not _at(written, f"fp16.{FP16_MASTERS}"):
        kept = "bf16" if _at(written, f"bf16.{BF16_MASTERS}") is True else "fp32"
        yield ("optimizer", "params", FP32_STATES), f"moments are of the type of the masters, which is {kept}"


def _unused_scale(written: Mapping[str, Any]) -> Unread:
    """Settings of a dynamic loss scale where there is none."""
    fp16 = written.get("fp16")
    if isinstance(fp16, Mapping) and (fp16.get("enabled") is False or fp16.get("loss_scale", 0) not in (0, "auto")):
        for name in ("loss_scale_window", "min_loss_scale"):
            value = fp16.get(name, 1)
            if isinstance(value, int | float) and value <= 0:
                yield ("fp16", name), "the loss scale is not dynamic"


# Keys of zero_optimization that may be written without "stage3_".
_SHORT = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
    "use_all_reduce_for_fetch_params",
)


def _of_stage_3(written: Mapping[str, Any]) -> None:
    zero = written.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    for name in _SHORT:
        if name in zero:
            zero[f"stage3_{name}"] = zero.pop(name)


def _moments_of_bf16(written: dict[str, Any]) -> None:
    if _at(written, f"bf16.{BF16_MASTERS}") is True and _at(written, f"optimizer.params.{FP32_STATES}") is False:
        written["wherry"] = {"state_dtype": "bf16", **written.get("wherry", {})}


def _list_leaves(written: Mapping[str, Any]) -> None:
    leaves = _at(written, "zero_optimization.leaf_module")
    for name, value in [*leaves.items()] if isinstance(leaves, dict) else ():
        leaves[name] = [value] if isinstance(value, str) else value


def _at(tree: Any, dotted: str) -> Any:
    if isinstance(tree, Mapping) and tree.get(dotted) is not None:
        return tree[dotted]
    for name in dotted.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _remove(tree: dict[str, Any], path: tuple[str, ...]) -> None:
    for name in path[:-1]:
        tree = tree[name]
    del tree[path[-1]]


def loss_scaler(config: Config) -> LossScaler:
    """The loss scale of an engine, with DeepSpeed's timing.

    The first step after the start, or after an overflow, does not count for the window. Without ZeRO there is no
    hysteresis, and the scale stays at its minimum.
    """
    plain = {"hysteresis": 1, "stops_at_min": False} if config.zero_optimization.stage == 0 else {}
    return LossScaler.from_config(config.fp16, grace=1, **plain)


# --- what scripts read ---


class DeepSpeedConfigModel(BaseModel):
    """Blocks that scripts declare: "auto" is the default, and a field may be an older spelling of another.

    Such a field has `json_schema_extra={"deprecated": True, "new_param": NAME}`, with a `new_param_fn` for its value.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {name: value for name, value in data.items() if value != "auto"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._move(name, extra)

    def _move(self, name: str, extra: Mapping[str, Any]) -> None:
        newer, told = str(extra.get("new_param", "")), str(extra.get("deprecated_msg", ""))
        warn("config: %s is an older spelling%s. %s", name, f" of {newer}" if newer else "", told)
        if not newer or not extra.get("set_new_param", True):
            return
        value = getattr(self, name)
        *around, last = newer.split(".")
        block: Any = self
        for each in around:
            block = getattr(block, each)
        if last in block.model_fields_set:
            raise DeepSpeedConfigError(f"{name} is an older spelling of {newer}, which is given too; remove one")
        change: Callable[[Any], Any] = extra.get("new_param_fn", lambda given: given)
        delattr(self, name)
        setattr(block, last, change(value))


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    return param_dict.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)


def get_log_level(param_dict: Mapping[str, Any]) -> Any:
    return param_dict.get("log_level", LOG_LEVEL_DEFAULT)


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """`fp16`."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _number(cls, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"it must be a number, and finite; got {value!r}")
        return number

    @model_validator(mode="after")
    def _scale(self) -> DeepSpeedFP16Config:
        if self.loss_scale < 0:
            raise ValueError("loss_scale must be 0 or more, and 0 is a dynamic one")
        if self.enabled and self.loss_scale == 0 and min(self.loss_scale_window, self.min_loss_scale) <= 0:
            raise ValueError("loss_scale_window and min_loss_scale must be above 0 where the loss scale is dynamic")
        return self

    def initial_dynamic_scale(self) -> int:
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """`bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    block = param_dict.get("bf16")
    return DeepSpeedBF16Config(**(param_dict.get("bfloat16", {}) if block is None else block))


class _WithIdleKeys(ConfigBlock):
    """A block that scripts make and read: its keys without effect are there too, with what was given or the default."""

    model_config = ConfigDict(extra="allow", frozen=False)

    path: ClassVar[str]
    """Where the block is in a config."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        given = cls._renamed(given)
        idle = {name: row for name, row in idle_keys_in(cls.path).items() if name not in cls.model_fields}
        unknown = [name for name in given if name not in idle and name not in cls.model_fields]
        if unknown:
            raise ValueError(f"{unknown[0]}: there is no such key in {cls.__name__}")
        checked = {name: idle[name].checker.validate_python(value) for name, value in given.items() if name in idle}
        defaults = {name: row.default for name, row in idle.items() if row.effect != "renamed"}
        return defaults | given | checked

    @classmethod
    def _renamed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if value != "auto"}

    def _also(self, name: str, value: Any) -> None:
        assert self.__pydantic_extra__ is not None
        self.__pydantic_extra__[name] = value


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizer, _WithIdleKeys):
    """`zero_optimization.offload_optimizer`."""

    path: ClassVar[str] = "zero_optimization.offload_optimizer"

    @model_validator(mode="after")
    def _pipeline(self) -> DeepSpeedZeroOffloadOptimizerConfig:
        extra = self.__pydantic_extra__ or {}
        self._also("pipeline", bool(extra.get("pipeline_read") or extra.get("pipeline_write")))
        return self


class DeepSpeedZeroOffloadParamConfig(OffloadParam, _WithIdleKeys):
    """`zero_optimization.offload_param`."""

    path: ClassVar[str] = "zero_optimization.offload_param"


class DeepSpeedZeroConfig(ZeroOptimization, _WithIdleKeys):
    """`zero_optimization`. Keys that begin with `stage3_` are attributes without it as well."""

    path: ClassVar[str] = "zero_optimization"
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None  # type: ignore[assignment]
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None  # type: ignore[assignment]
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @classmethod
    def _renamed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        read, known = {}, {*cls.model_fields, *idle_keys_in(cls.path)}
        for name, value in super()._renamed(given).items():
            newer = f"stage3_{name}" if name not in known and f"stage3_{name}" in known else name
            row = idle_keys_in(cls.path).get(newer)
            if row is not None and row.effect == "renamed":
                newer, device = row.why.removeprefix(f"{cls.path}.").partition(".device")[:2]
                if newer == "offload_optimizer.pin_memory":
                    continue
                if device:
                    value = {"device": "cpu"} if value else None
            read[newer] = value
        return read

    @model_validator(mode="after")
    def _names(self) -> DeepSpeedZeroConfig:
        extra = self.__pydantic_extra__ or {}
        if extra.get("overlap_comm") is None:
            self._also("overlap_comm", self.stage == 3)
        if self.stage == 3 and extra.get("elastic_checkpoint"):
            warn(
                "zero_optimization.elastic_checkpoint: ZeRO-3 elastic checkpointing is deprecated; leave it out, as "
                "checkpoints load on any number of ranks"
            )
        for name, value in [*self.__dict__.items(), *extra.items()]:
            if name.startswith("stage3_"):
                self._also(name.removeprefix("stage3_"), value)
        return self


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    block = param_dict.get("zero_optimization") or {}
    return DeepSpeedZeroConfig(**({"stage": int(block)} if isinstance(block, bool) else block))


class DeepSpeedConfig:
    """A config, checked; its values under the names that scripts read."""

    def __init__(
        self, config: str | os.PathLike[str] | dict[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        from wherry.compat.deepspeed.comm import get_rank, get_world_size

        source = read(config)
        self._param_dict: dict[str, Any] = config if isinstance(config, dict) else copied(source.given)
        self.config = loaded = load(source, refuses=False)
        self.global_rank = get_rank()
        data = getattr(mpu, "get_data_parallel_world_size", None)
        self.world_size: int = data() if data is not None else get_world_size()
        given = self._param_dict
        self.train_batch_size = loaded.train_batch_size
        self.train_micro_batch_size_per_gpu = loaded.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps = loaded.gradient_accumulation_steps
        self._read(loaded, given)
        self._configure_train_batch_size()

    def _read(self, loaded: Config, given: Mapping[str, Any]) -> None:
        from wherry.compat.deepspeed.monitor import get_monitor_config

        self.zero_config = get_zero_config(loaded.written)
        self.zero_optimization_stage = loaded.zero_optimization.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.mics_shard_size = loaded.zero_optimization.mics_shard_size
        self.float16_config = get_float16_config(given)
        self.bfloat16_config = get_bfloat16_config(given)
        self.fp16_enabled, self.bfloat16_enabled = loaded.fp16.enabled, loaded.bf16.enabled
        self.torch_autocast_enabled = loaded.torch_autocast.enabled
        self.torch_autocast_dtype = loaded.autocast_dtype()
        self.amp_enabled = False
        types = given.get("data_types") or {}
        self.grad_accum_dtype, self.param_dtype = types.get("grad_accum_dtype"), types.get("param_dtype")
        self.buffer_dtype = types.get("buffer_dtype")
        self.communication_data_type = loaded.communication_dtype()
        self.gradient_clipping = loaded.gradient_clipping
        self.gradient_allreduce_op = loaded.gradient_allreduce_op
        self.managed_gradient_accumulation = loaded.managed_gradient_accumulation
        self.prescale_gradients = given.get("prescale_gradients", False)
        self.gradient_predivide_factor = given.get("gradient_predivide_factor", 1.0)
        self.sparse_gradients_enabled = given.get("sparse_gradients", False)
        self.zero_allow_untested_optimizer = loaded.zero_allow_untested_optimizer
        for name in ("optimizer", "scheduler"):
            block = given.get(name) or {}
            setattr(self, f"{name}_name", block.get("type"))
            setattr(self, f"{name}_params", block.get("params"))
        self.optimizer_name: str | None
        if self.optimizer_name is not None and self.optimizer_name.lower() in DEEPSPEED_OPTIMIZERS:
            self.optimizer_name = self.optimizer_name.lower()
        self.steps_per_print, self.log_level = loaded.steps_per_print, given.get("log_level")
        self.wall_clock_breakdown = loaded.wall_clock_breakdown or loaded.flops_profiler.enabled
        self.memory_breakdown, self.dump_state = given.get("memory_breakdown", False), given.get("dump_state", False)
        self.dataloader_drop_last = loaded.dataloader_drop_last
        self.activation_checkpointing_config = loaded.activation_checkpointing
        self.flops_profiler_config, self.comms_config, self.aio_config = loaded.flops_profiler, loaded, loaded.aio
        monitors = loaded.model_dump(include={"tensorboard", "wandb", "csv_monitor"}, exclude_unset=True)
        self.monitor_config, self.checkpoint_config = get_monitor_config({**given, **monitors}), loaded.checkpoint
        self.checkpoint_tag_validation_enabled = loaded.checkpoint.tag_validation != ValidationMode.IGNORE
        self.checkpoint_tag_validation_fail = loaded.checkpoint.tag_validation == ValidationMode.FAIL
        self.load_universal_checkpoint = (given.get("checkpoint") or {}).get("load_universal", False)
        self.use_node_local_storage = False
        # Of what is not part of Wherry.
        self.pld_enabled = self.curriculum_enabled_legacy = self.data_efficiency_enabled = False
        self.eigenvalue_enabled = self.eigenvalue_verbose = self.elasticity_enabled = self.disable_allgather = False

    def _configure_train_batch_size(self) -> None:
        """What is left out of the three sizes follows from the others; they must agree."""
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            self.world_size,
        )

    def print(self, name: str) -> None:
        for key, value in sorted(vars(self).items()):
            say("%s: %s = %s", name, key, value)

    print_user_config = print


def batch_sizes(train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> tuple[int, int, int]:
    """The three batch sizes, of which any may be left out but the first two at once.

    >>> batch_sizes(32, None, 2, 2)
    (32, 8, 2)
    """
    if train is None and micro is None:
        raise DeepSpeedConfigError(f"Either {TRAIN} or {MICRO} needs to be provided")
    if micro is None:
        assert train is not None
        micro = train // ranks // (accumulation or 1)
    if accumulation is None:
        accumulation = train // micro // ranks if train is not None and micro else 1
    if train is None:
        train = micro * accumulation * ranks
    for name, size in ((TRAIN, train), (MICRO, micro), (ACCUMULATION, accumulation)):
        if size <= 0:
            raise DeepSpeedConfigError(f"{name}: {size} has to be greater than 0; on {ranks} ranks {TRAIN} is {train}")
    if train != micro * accumulation * ranks:
        raise DeepSpeedConfigError(
            f"{TRAIN} is not equal to {MICRO} * {ACCUMULATION} * ranks: {train} != {micro} * {accumulation} * {ranks}; "
            "change one of them, or leave it out"
        )
    return train, micro, accumulation


def check_batch(config: Config) -> None:
    """An engine's config says how large batches are, unless a Trainer was to."""
    if (config.train_batch_size, config.train_micro_batch_size_per_gpu) != (None, None):
        return
    if not {TRAIN, MICRO} & {*config.auto}:
        raise DeepSpeedConfigError(f"Either {TRAIN} or {MICRO} needs to be provided")


def _check_reduction(given: Mapping[str, Any]) -> None:
    op = given.get("gradient_allreduce_op", "mean")
    op = op.lower() if isinstance(op, str) else op
    if op not in GRADIENT_ALLREDUCE_OP_SUPPORTED:
        raise DeepSpeedConfigError(
            f"Invalid gradient_allreduce_op: expected one of {list(GRADIENT_ALLREDUCE_OP_SUPPORTED)}, got {op!r}"
        )
    zero = given.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    compiled = isinstance(given.get("compile"), Mapping) and given["compile"].get("deepcompile")
    excluded = {"ZeRO stage 3": zero.get("stage") == 3, "ZenFlow": "zenflow" in zero, "DeepCompile": compiled}
    for name, asked in excluded.items():
        if op == "sum" and asked:
            raise DeepSpeedConfigError(f"gradient_allreduce_op 'sum' is not supported with {name}; use mean")


def _check_masters(config: Config) -> None:
    """Where DeepSpeed can do without fp32 masters, or states."""
    asked = {f"fp16.{FP16_MASTERS}": config.fp16.fp16_master_weights_and_grads}
    asked[f"bf16.{BF16_MASTERS}"] = masters = config.bf16.bf16_master_weights_and_grads
    asked["bf16.bf16_optimizer_states"] = states = config.bf16.bf16_optimizer_states
    for path, given in asked.items():
        if given and config.zero_optimization.stage == 0:
            raise DeepSpeedConfigError(f"{path} is only supported with ZeRO Stage 1, 2, or 3")
    if states and not masters:
        raise DeepSpeedConfigError(f"bf16.bf16_optimizer_states requires bf16.{BF16_MASTERS} to be enabled")


# What DeepSpeed does not have, or refuses, and what becomes of it there.
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
