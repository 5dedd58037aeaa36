"""The whole config: every key at the top, its blocks, and what follows from them together."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr

from wherry.config.blocks import (
    BF16,
    FP16,
    ActivationCheckpointing,
    Aio,
    Checkpoint,
    Comet,
    CommsLogger,
    CsvMonitor,
    DataTypes,
    FlopsProfiler,
    Mlflow,
    Own,
    TensorBoard,
    TorchAutocast,
    Wandb,
    ZeroOptimization,
)
from wherry.config.draft import Draft
from wherry.config.fields import ConfigBlock, Dtype, EverySteps, Flag, Integer, Number, Text, block, key, lowered
from wherry.config.optimizer import Optimizer
from wherry.config.problems import Problem, config_error
from wherry.config.scheduler import Scheduler
from wherry.config.source import ConfigSource
from wherry.errors import ConfigError
from wherry.placement import Placement, Tier

if TYPE_CHECKING:
    import torch

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
_TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_PLACING = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
)
# What ranks may have each for themselves, as it changes neither numbers nor what is sent nor where it lies in memory:
# what is written down and where, how a node's disk is asked, what a node may hold, and when somebody gives up.
MAY_DIFFER = (
    *("steps_per_print", "wall_clock_breakdown", "log_level", "comms_logger", "flops_profiler"),
    *("tensorboard", "csv_monitor", "wandb", "comet", "mlflow"),
    *("activation_checkpointing.profile", "wherry.run_dir", "wherry.profile"),
    *("aio", "wherry.host_memory", "wherry.timeout_s"),
)
# Folders may have other names on another node, but not be given on one and left out on another.
_FOLDERS = "nvme_path"
TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class BatchSizes(NamedTuple):
    """train == micro * accumulation * data-parallel ranks."""

    train: int
    micro: int
    accumulation: int


class Config(ConfigBlock):
    """A config, checked and resolved. `load` makes it; it does not change afterwards.

    >>> from wherry.config import load
    >>> load({"zero_optimization": {"stage": 2}}).placement().name
    'ZeRO-2'
    """

    model_config = ConfigDict(title="Wherry config")

    json_schema_link: Text | None = Field(
        None,
        alias="$schema",
        description="Where an editor finds the JSON schema of this file.",
        exclude=True,
    )

    train_batch_size: Integer | None = key(
        None, "Samples in one update, over all ranks. auto: what follows from the others.", ge=1
    )
    train_micro_batch_size_per_gpu: Integer | None = key(
        None, "Samples in one forward on one rank. auto: the planner chooses, given training_data to tell it by.", ge=1
    )
    gradient_accumulation_steps: Integer | None = key(
        None, "Micro-batches in one update. auto: as train_micro_batch_size_per_gpu.", ge=1
    )
    managed_gradient_accumulation: Flag = key(
        True,
        "Let the engine find the boundary, after gradient_accumulation_steps micro-batches. false: every step() is "
        "one, and updates from the backwards before it.",
    )

    optimizer: Optimizer | None = key(None, "The optimizer, where initialize() is given none.")
    scheduler: Scheduler | None = key(None, "The learning rate schedule, where initialize() is given none.")
    gradient_clipping: Number = key(
        0.0,
        "Clip gradients to this global L2 norm; 0 for no clipping. DeepSpeed changed its default from 0 to 1.0 in "
        "2026; here nothing is clipped that plain PyTorch would not clip.",
        ge=0,
    )

    zero_optimization: ZeroOptimization = block(ZeroOptimization, "What is partitioned, and on which tier it rests.")
    aio: Aio = block(Aio, "Reading and writing states that rest on disk.")

    fp16: FP16 = block(FP16, "Training in fp16.")
    bf16: BF16 = block(BF16, "Training in bf16.")
    torch_autocast: TorchAutocast = block(TorchAutocast, "Mixed precision by torch.autocast.")
    data_types: DataTypes = block(DataTypes, "Types of gradients, parameters and buffers.")

    communication_data_type: Dtype | None = key(
        None, "The type in which gradients are reduced. Unset: that of the gradients."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lowered)] = key(
        "mean", "Average gradients over ranks, or sum them. Over the micro-batches of a window they are averaged."
    )
    zero_allow_untested_optimizer: Flag = key(
        False,
        "Vouch that an optimizer Wherry does not know treats every parameter by itself. Its shards are of whole "
        "parameters.",
    )

    dataloader_drop_last: Flag = key(False, "Drop the last, incomplete batch of an epoch.")
    steps_per_print: EverySteps = key(None, "Log progress every so many steps. Unset, or inf: never.", ge=1)
    wall_clock_breakdown: Flag = key(False, "Log the time of forward, backward and update.")
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, BeforeValidator(lowered)] = (
        key(None, "Level of the logger `wherry`.")
    )
    tensorboard: TensorBoard = block(TensorBoard, "Metrics for TensorBoard.")
    csv_monitor: CsvMonitor = block(CsvMonitor, "Metrics as CSV.")
    wandb: Wandb = block(Wandb, "Metrics for Weights & Biases.")
    comet: Comet = block(Comet, "Metrics for Comet.")
    mlflow: Mlflow = block(Mlflow, "Metrics for MLflow.")
    comms_logger: CommsLogger = block(CommsLogger, "A log of what is sent, every steps_per_print steps (or 10).")
    flops_profiler: FlopsProfiler = block(FlopsProfiler, "A count of one step's floating-point operations.")

    activation_checkpointing: ActivationCheckpointing = block(
        ActivationCheckpointing, "What becomes of activations between forward and backward."
    )
    checkpoint: Checkpoint = block(Checkpoint, "How checkpoints are written and read.")

    wherry: Own = block(Own, "Wherry's own keys.")

    _draft: Draft = PrivateAttr(default_factory=lambda: Draft(ConfigSource({})))

    @property
    def given(self) -> dict[str, Any]:
        """What the user wrote, unchanged (a copy)."""
        return copy.deepcopy(self._draft.source.given)

    @property
    def written(self) -> dict[str, Any]:
        """What the user wrote, with dotted keys in their blocks and what was laid over it (a copy)."""
        return copy.deepcopy(self._draft.written)

    @property
    def notes(self) -> list[str]:
        """What the user should know and need not act on, one line each."""
        return list(self._draft.notes)

    def add_note(self, note: str) -> None:
        """One more, of whoever has settled what the config left open."""
        if note not in self._draft.notes:
            self._draft.notes.append(note)

    @property
    def news(self) -> list[str]:
        """The notes of keys that act, to be logged once by rank 0."""
        return [note for note in self._draft.notes if note not in self._draft.idle]

    @property
    def idle(self) -> list[str]:
        """The keys whose values have no effect, in words for one line, but those that ask for what is so."""
        return [named for named in self._draft.idle.values() if named]

    @property
    def auto(self) -> tuple[str, ...]:
        """The keys whose value was "auto"; each has its default here."""
        return (*self._draft.autos, *self._draft.chosen)

    @property
    def planned(self) -> list[str]:
        """Those of them that the planner chooses for the model and the machine when training begins."""
        return [path for path in self._draft.autos if path in _PLACING]

    def batch(self, dp_world_size: int, counted: str = "") -> BatchSizes:
        """The three batch sizes for so many data-parallel ranks. Raises `ConfigError` when they contradict.

        `counted` is for that error: who says how many ranks there are.

        >>> from wherry.config import load
        >>> load({"train_batch_size": 16, "gradient_accumulation_steps": 2}).batch(4)
        BatchSizes(train=16, micro=2, accumulation=2)
        """
        if dp_world_size < 1:
            raise ValueError(f"dp_world_size: expected 1 or more, got {dp_world_size}")
        dp_world_size = self.readers(dp_world_size)
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps
        one = micro or (max(1, train // ((accumulation or 1) * dp_world_size)) if train else 1)
        many = accumulation or (max(1, train // (micro * dp_world_size)) if train and micro else 1)
        if train not in (None, one * many * dp_world_size):
            message = _contradiction(train, micro, accumulation, dp_world_size, counted)
            source = self._draft.source
            raise config_error([Problem(TRAIN, source.lines.of((TRAIN,)), message)], source.name)
        return BatchSizes(one * many * dp_world_size, one, many)

    def readers(self, dp_world_size: int) -> int:
        """How many of so many data-parallel ranks read different samples."""
        together = self.wherry.context_parallel
        if dp_world_size % together:
            raise ConfigError(
                f"wherry.context_parallel: {together} does not divide the {dp_world_size} data-parallel ranks; give a "
                "divisor of their number"
            )
        return dp_world_size // together

    def shard_ranks(self, dp_world_size: int) -> int:
        """How many of so many data-parallel ranks share out one copy of what is partitioned.

        >>> from wherry.config import load
        >>> load({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}).shard_ranks(32)
        8
        """
        size = self.zero_optimization.mics_shard_size
        if size != -1 and dp_world_size % size:
            raise ConfigError(
                f"zero_optimization.mics_shard_size: {size} does not divide the {dp_world_size} data-parallel ranks; "
                "give a divisor of their number, such as the number of ranks in a node, or -1"
            )
        return dp_world_size if size == -1 else size

    def placement(self) -> Placement:
        """The row of the placement table that `zero_optimization` names."""
        zero = self.zero_optimization
        return Placement.of_stage(
            zero.stage, optimizer=_TIERS[zero.offload_optimizer.device], parameters=_TIERS[zero.offload_param.device]
        )

    def working_precision(self) -> str | None:
        """The type of the working weights by its name in a config; None to leave the model as it is."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else self.data_types.param_dtype

    def working_dtype(self) -> torch.dtype | None:
        """The same as torch knows it."""
        return _torch_dtype(self.working_precision())

    def autocast_dtype(self) -> torch.dtype | None:
        """The type that the engine's forward casts to; None where it does not run under torch.autocast."""
        return _torch_dtype(self.torch_autocast.dtype) if self.torch_autocast.enabled else None

    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16: the loss is scaled, and a step whose gradients overflow is skipped."""
        autocast = self.torch_autocast
        return self.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")

    def grad_accum_dtype(self) -> torch.dtype | None:
        """The type in which gradients are accumulated; None for that of the working weights."""
        return _torch_dtype(self.data_types.grad_accum_dtype)

    def buffer_dtype(self) -> torch.dtype | None:
        """The type of floating-point buffers; None to leave them as they are."""
        return _torch_dtype(self.data_types.buffer_dtype)

    def communication_dtype(self) -> torch.dtype | None:
        """The type in which gradients are reduced; None for that of the gradients."""
        return _torch_dtype(self.communication_data_type)

    def keeps_masters(self) -> bool:
        """Whether weights of 16 bits have fp32 masters."""
        halves = (
            self.bf16.enabled and self.bf16.bf16_master_weights_and_grads,
            self.fp16.enabled and self.fp16.fp16_master_weights_and_grads,
        )
        return not any(halves)

    def state_dtype(self) -> str:
        """How the optimizer's moments are stored: fp32, bf16 or int8."""
        if "state_dtype" not in self.wherry.model_fields_set and self.bf16.bf16_optimizer_states:
            return "bf16"
        return self.wherry.state_dtype

    def nonfinite(self) -> str:
        """What becomes of a step whose gradients are not finite: skip, raise or ignore."""
        if self.scales_loss() and not (self.fp16.enabled and self.fp16.loss_scale):
            return "skip"
        if self.wherry.nonfinite != "auto":
            return self.wherry.nonfinite
        return "ignore" if self.bf16.enabled and not self.bf16.check_grad_overflow else "skip"

    def described(self) -> Iterator[tuple[str, str]]:
        """What every rank must have alike: keys by their paths, with their values as JSON has them."""

        def keys(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
            for name, value in tree.items():
                path = prefix + name
                if path in MAY_DIFFER or value is None:
                    continue
                if isinstance(value, dict) and value:
                    yield from keys(value, path + ".")
                else:
                    yield path, "given" if name == _FOLDERS else json.dumps(value)

        yield from keys(self.to_dict())
        yield 'the keys left to "auto"', ", ".join(self.auto) or "none"

    def to_dict(self) -> dict[str, Any]:
        """The resolved config, every default written out, as JSON holds it. `load` takes it back unchanged."""
        return self.model_dump(mode="json")


def _torch_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    dtype = getattr(torch, _TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _contradiction(train: int, micro: int | None, accumulation: int | None, world: int, counted: str) -> str:
    ranks = f"{world} data-parallel rank{'s' if world != 1 else ''}{', ' * bool(counted)}{counted}"
    numbers = f"{TRAIN} {train}, {MICRO} {_or_unset(micro)}, {ACCUMULATION} {_or_unset(accumulation)} on {ranks}"
    rule = "must be micro-batch x accumulation x ranks"
    if micro is not None and accumulation is not None:
        product = micro * accumulation * world
        equation = f"{micro} x {accumulation} x {world} = {product}"
        change = f"set {TRAIN} to {product}, or leave one of the three out"
        return f"{train} {rule}, but {equation} ({numbers}); {change}"
    factor = (micro or accumulation or 1) * world
    near = [size for size in (train // factor * factor, (train // factor + 1) * factor) if size]
    change = f"set {TRAIN} to {' or '.join(map(str, near))}, or change the other size or the number of ranks"
    return f"{train} {rule}, but it is not divisible by {factor} ({numbers}); {change}"


def _or_unset(size: int | None) -> str:
    return "unset" if size is None else str(size)
