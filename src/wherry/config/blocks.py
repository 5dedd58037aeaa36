"""The blocks of a config: what is partitioned and where it rests, precision, and what is around training."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from wherry.config.fields import (
    Bucket,
    Bytes,
    ConfigBlock,
    Dtype,
    Flag,
    Folders,
    Integer,
    Memory,
    Number,
    Share,
    Size,
    Steps,
    Text,
    block,
    key,
    lowered,
    to_dtype,
    uppered,
)
from wherry.config.problems import shown

# --- zero_optimization ---

Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lowered)]


def _stage(value: Any) -> Any:
    """`true` and `false` are spellings of stages 1 and 0 from before there were stages."""
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value


class OffloadParam(ConfigBlock):
    device: Device = key(
        "none",
        "Where parameters rest between uses: none (the device), cpu or nvme. Needs stage 3. auto: the planner chooses, "
        "nvme only with an nvme_path.",
    )
    nvme_path: Folders | None = key(None, "Folder, or list of folders, for parameters on disk.")
    buffer_count: Integer = key(
        5,
        "Units of parameters in host memory at once: read ahead from disk, in use, or kept. What updates write beside "
        "a forward comes on top.",
        ge=1,
    )
    max_in_cpu: Size = key(
        1_000_000_000,
        "Elements of parameters, on each rank, kept in host memory when the device is nvme.",
        ge=0,
    )
    pin_memory: Flag = key(True, "Use page-locked host memory, which copies faster to and from a GPU.")


class OffloadOptimizer(ConfigBlock):
    device: Device = key(
        "none",
        "Where optimizer state rests: none (the device), cpu or nvme. The latter two update on the host. auto: the "
        "planner chooses, nvme only with an nvme_path.",
    )
    nvme_path: Folders | None = key(None, "Folder, or list of folders, for optimizer state on disk.")
    buffer_count: Integer = key(
        4,
        "Units whose optimizer state may be in host memory at once, on its way from disk or to it. With before_use "
        "all but one of them are read while the backward ends, with in_backward one.",
        ge=1,
    )
    pin_memory: Flag = key(True, "Use page-locked host memory, which copies faster to and from a GPU.")
    ratio: Number = key(
        1.0,
        "Share of the optimizer state that is offloaded; that of the first units stays on the device. auto: the share "
        "with the fastest step, where initialize() is given training_data to tell it by; else 1.",
        ge=0,
        le=1,
    )
    cpuadam_cores_perc: Number = key(
        0.8,
        "Share of the cores that update optimizer state on the host, where that runs beside something else. Not given, "
        "an update has all of them.",
        gt=0,
        le=1,
    )


class ZeroOptimization(ConfigBlock):
    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)] = key(
        0,
        "What is partitioned over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. auto: "
        "the planner chooses, for the model and what is free.",
    )
    offload_optimizer: OffloadOptimizer = block(OffloadOptimizer, "Optimizer state outside the device.")
    offload_param: OffloadParam = block(OffloadParam, "Parameters outside the device (stage 3).")
    reduce_bucket_size: Bucket = key(
        500_000_000,
        "Elements of small flats whose gradients are reduced together, up to 4 million; 0: each by itself. A large "
        "flat always is.",
        ge=0,
    )
    allgather_bucket_size: Bucket = key(
        500_000_000,
        "Elements of small flats whose weights are gathered together, up to 4 million; 0: each by itself. A large "
        "flat always is.",
        ge=0,
    )
    stage3_max_live_parameters: Size = key(
        1_000_000_000, "Elements of gathered parameters at which gathering ahead stops.", ge=0
    )
    zero_hpz_partition_size: Integer = key(
        1,
        "Ranks of a node that share the weights among themselves as well, so that backward gathers stay in the node. "
        "Stage 3.",
        ge=1,
    )
    mics_shard_size: Integer = key(
        -1,
        "Ranks, next to each other, that share out one copy of what is partitioned. Groups of so many hold copies of "
        "it, gather within themselves, and sum their gradients once for an update. -1: all ranks share out one.",
        ge=-1,
    )
    stage3_prefetch_bucket_size: Bucket = key(50_000_000, "Elements gathered ahead of use; one unit always is.", ge=0)
    stage3_param_persistence_threshold: Size = key(
        100_000, "Parameters with fewer elements than this stay gathered.", ge=0
    )
    stage3_model_persistence_threshold: Size = key(sys.maxsize, "At most so many elements stay gathered in all.", ge=0)
    stage3_gather_16bit_weights_on_model_save: Flag = key(
        False, "Let a save of the model at stage 3 gather whole working weights on rank 0."
    )


# --- precision ---


class FP16(ConfigBlock):
    enabled: Flag = key(False, "Working weights in fp16, with a loss scale and fp32 master weights.")
    auto_cast: Flag = key(False, "Cast the floating-point inputs of the model to fp16.")
    loss_scale: Number = key(0.0, "A fixed loss scale; 0 means dynamic.", ge=0)
    initial_scale_power: Integer = key(16, "The dynamic loss scale starts at 2 to this power.", ge=0, le=126)
    loss_scale_window: Integer = key(1000, "Steps without overflow after which the loss scale doubles.", ge=1)
    hysteresis: Integer = key(2, "Overflows before the loss scale is halved.", ge=1)
    consecutive_hysteresis: Flag = key(False, "A step without overflow restores the full hysteresis.")
    min_loss_scale: Number = key(1.0, "The dynamic loss scale does not fall below this.", gt=0)
    fp16_master_weights_and_grads: Flag = key(
        False, "No masters: fp16 weights are updated in fp32, by fp16 gradients, and rounded; small updates are lost."
    )


class BF16(ConfigBlock):
    enabled: Flag = key(False, "Working weights in bf16, with fp32 master weights and no loss scale.")
    check_grad_overflow: Flag = key(
        True, "Skip a step whose gradients hold inf or NaN; false is the same as `wherry.nonfinite: ignore`."
    )
    bf16_master_weights_and_grads: Flag = key(
        False,
        "No masters: bf16 weights are updated in fp32, by bf16 gradients, and rounded; small updates are lost. "
        "wherry.master split takes 2 bytes more, loses none, and is faster on the host.",
    )
    bf16_optimizer_states: Flag = key(
        False,
        'Moments in bf16; the same as "wherry": {"state_dtype": "bf16"}. They are rounded to the nearest where there '
        "are no masters, and else up or down by chance.",
    )


class TorchAutocast(ConfigBlock):
    enabled: Flag = key(
        False,
        "Run the engine's forward under torch.autocast. Weights, gradients and optimizer state keep their own types.",
    )
    dtype: Annotated[Literal["bf16", "fp16"], BeforeValidator(to_dtype)] = key(
        "bf16", "The type that autocast casts to. fp16 scales the loss as torch.amp.GradScaler does by default."
    )


class DataTypes(ConfigBlock):
    grad_accum_dtype: Dtype | None = key(
        None, "The type in which gradients are accumulated over micro-batches. Unset: that of the working weights."
    )
    param_dtype: Dtype | None = key(
        None, "The type of the working weights, where neither fp16 nor bf16 says it. Unset: as the model has them."
    )
    buffer_dtype: Dtype | None = key(
        None, "The type of the model's floating-point buffers. Unset: as the model has them."
    )


# --- disk, activations, checkpoints, logging ---


class Aio(ConfigBlock):
    block_size: Integer = key(1_048_576, "Bytes of one request to the disk.", ge=512)
    queue_depth: Integer = key(16, "Requests kept under way at once, on each path.", ge=1)
    intra_op_parallelism: Integer = key(1, "Multiplies queue_depth: requests of one large transfer at once.", ge=1)
    checksum: Flag = key(
        False,
        "Compare all that is read from the disk with checksums of what was written: 4 bytes of host memory for every "
        "4,096 on the disk. A difference is an error that names the record, the file and the place in it.",
    )


class ActivationCheckpointing(ConfigBlock):
    """Beside the keys that DeepSpeed has, which say how checkpoints are kept, those that say what is checkpointed."""

    policy: Annotated[Literal["none", "recompute", "offload", "auto"] | None, BeforeValidator(lowered)] = key(
        None,
        "What becomes of what a unit's forward saves: kept (`none`), computed again from the unit's inputs "
        "(`recompute`), put away until backward (`offload`), or computed again in as few units as the memory there is "
        "allows (`auto`). Unset: `recompute` if another key of this block asks for something, else `none`. "
        "`wherry.checkpoint` in the model's code works with any.",
    )
    every: Integer = key(1, "Recompute one unit in so many, and keep what the others save.", ge=1)
    save_operations: list[Text] = key(
        [], "Operations whose results a recomputation does not compute again: `matmul`, `attention`, or like `aten.mm`."
    )
    partition_activations: Flag = key(False, "Split activation checkpoints over tensor-parallel ranks.")
    cpu_checkpointing: Flag = key(False, "Keep activation checkpoints in host memory.")
    nvme_path: Folders | None = key(None, "Folder, or list of folders: keep activation checkpoints on disk.")
    offload_min_bytes: Bytes = key(1 << 20, "What is smaller stays on the device.", ge=1)
    memory: Memory | None = key(
        None, 'Device memory that `auto` may leave to activations: bytes, or like "3GB". Unset: what is free.', ge=0
    )
    contiguous_memory_optimization: Flag = key(
        False, "Recompute, as any key here asks. Checkpoints stay where torch's allocator has them, which holds less."
    )
    synchronize_checkpoint_boundary: Flag = key(False, "Synchronize the device at each activation checkpoint.")
    profile: Flag = key(False, "Log the time of checkpoints and recomputations.")

    def resolved_policy(self) -> str:
        """The policy, where it is unset as well."""
        asked = (
            self.partition_activations,
            self.cpu_checkpointing,
            self.contiguous_memory_optimization,
            self.nvme_path,
            self.save_operations,
            self.every > 1,
        )
        return self.policy or ("recompute" if any(asked) else "none")


class Checkpoint(ConfigBlock):
    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(uppered)] = key(
        "WARN", "What to do when ranks disagree about the tag of a checkpoint; rank 0's is used, unless it is FAIL."
    )
    load_universal: Flag = key(
        False, "Under DeepSpeed's names: load what latest_universal names. Every checkpoint suits any number of ranks."
    )


class CommsLogger(ConfigBlock):
    enabled: Flag = key(False, "Log collectives.")
    prof_all: Flag = key(True, "Log all of them.")
    prof_ops: list[Text] = key([], "Log these only, where prof_all is false.")


class FlopsProfiler(ConfigBlock):
    enabled: Flag = key(False, "Count floating-point operations.")
    profile_step: Integer = key(1, "The step that is counted.", ge=0)
    module_depth: Integer = key(-1, "Depth of modules shown; -1 for all.")
    top_modules: Integer = key(1, "Modules shown at each depth.", ge=0)
    detailed: Flag = key(True, "Show every module.")
    output_file: Text | None = key(None, "Write to this file instead of the screen.")


class TensorBoard(ConfigBlock):
    enabled: Flag = key(False, "Write metrics for TensorBoard.")
    output_path: Text = key("", "Folder for the files. Empty: wherry.run_dir, or the working folder.")
    job_name: Text = key("wherry", "Folder inside output_path.")


class CsvMonitor(ConfigBlock):
    enabled: Flag = key(False, "Write metrics as CSV.")
    output_path: Text = key("", "Folder for the files. Empty: csv_monitor in the working folder.")
    job_name: Text = key("wherry", "Folder inside output_path.")


class Wandb(ConfigBlock):
    enabled: Flag = key(False, "Send metrics to Weights & Biases.")
    group: Text | None = key(None, "Group of the run.")
    team: Text | None = key(None, "Team that owns the run.")
    project: Text = key("wherry", "Project of the run.")


class Comet(ConfigBlock):
    enabled: Flag = key(False, "Send metrics to Comet.")
    samples_log_interval: Integer = key(100, "Samples between two steps that are sent.", ge=0)
    project: Text | None = key(None, "Project of the experiment.")
    workspace: Text | None = key(None, "Workspace of the project.")
    api_key: Text | None = key(None, "The key of the account. Better in the environment, as COMET_API_KEY.")
    experiment_name: Text | None = key(None, "Name of the experiment.")
    experiment_key: Text | None = key(None, "Key of the experiment, to go on with one.")
    online: Flag | None = key(None, "false: write to a folder, for a later upload.")
    mode: Text | None = key(None, "get, create or get_or_create: what becomes of an experiment with that key.")


class Mlflow(ConfigBlock):
    enabled: Flag = key(False, "Send metrics to MLflow. A run that the script has begun gets them.")
    tracking_uri: Text | None = key(None, "Server, or a database like sqlite:///mlflow.db. Unset: as MLflow has it.")
    experiment_name: Text | None = key(None, "Experiment of the run.")
    run_name: Text | None = key(None, "Name of the run.")


class CheckpointBlock(ConfigBlock):
    keep_last: Integer | None = key(
        None,
        "How many checkpoints a folder keeps: older ones that are named after their step are deleted. Unset: all.",
        ge=1,
    )
    async_save: Flag = key(
        False, "Copy the states and go on training, while the files are written behind; one save at a time."
    )


def _pieces(value: Any) -> Any:
    """A number of pieces, or "auto"."""
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value % 1 == 0:
        return int(value)
    raise ValueError(f'expected a number of pieces, 1 or more, or "auto", got {shown(value)}')


Pieces = Annotated[
    int | Literal["auto"],
    BeforeValidator(_pieces),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto"]}]}),
]


class ProfileBlock(ConfigBlock):
    steps: Steps | None = key(None, "Steps that a Chrome trace is made of on each rank: 5, or 5-7. Unset: none.")
    memory_step: Integer | None = key(
        None,
        "The step over which memory is recorded, by state and tier. Unset: the one after `steps`, so that it slows "
        "none of those.",
        ge=1,
    )
    folder: Text | None = key(
        None, "Folder for the files. Unset: `profile` in wherry.run_dir, or in the working folder."
    )

    @property
    def traced(self) -> range:
        first, _, last = (self.steps or "0").partition("-")
        return range(int(first), int(last or first) + 1) if self.steps else range(0)

    @property
    def recorded(self) -> int | None:
        return self.memory_step or (self.traced.stop if self.steps else None)

    def folder_in(self, run_dir: str | None) -> str:
        return self.folder or (f"{run_dir}/profile" if run_dir else "profile")


class Own(ConfigBlock):
    """Keys that are Wherry's own, in the block `wherry`."""

    unit_classes: list[Text] = key([], "Module classes whose instances are units. Empty: the model's repeated blocks.")
    update_policy: Annotated[
        Literal["auto", "at_step", "before_use", "in_backward", "delayed"], BeforeValidator(lowered)
    ] = key(
        "auto",
        "When a unit is updated: inside step(), before its next use, or as soon as its gradients land; these give "
        "the same results, bit for bit, but that in_backward counts a missing gradient as zero: it updates before it "
        "is known that nobody has one, and zero_grad() cannot drop what has been updated from already. A backward that "
        "an exception or Ctrl-C ends has updated a part of the model then: what was updated stays, and every later "
        "call says so until load_checkpoint() has gone back, or engine.accept_partial_update() goes on with it. "
        "`delayed` updates one step late, which changes the result; a call that reads weights or state makes the "
        "update first, and so does engine.settle() when training ends. "
        "With before_use and in_backward, parameters kept by reference (a list, an optimizer's param_groups) read as "
        "NaN after a step, until their next use in the model, engine.settle(), or a walk over the model's own. "
        "auto: at_step where the optimizer's state is on the device, and otherwise before_use, which fits every loop.",
    )
    update_on: Share | None = key(
        None,
        "Where state that rests in host memory or on disk is updated: by the host's kernels (host), or a piece at a "
        "time on the device, while the piece before goes back and the next one comes (device). A number is the share "
        "of the units that are updated on the device. auto: the share at which host and device end together, by rates "
        "that are measured at the start. Adam, AdamW, Adagrad, Lion and SGD have the same results to the bit. Without "
        "an accelerator everything is the host's. Unset: the host, but the device for what looks at whole matrices, "
        "like Muon; auto is the same for these.",
    )
    delayed_update_warmup: Integer = key(
        40, "The step whose update is the first to be late: those before it are made as usual.", ge=1
    )
    nonfinite: Annotated[Literal["auto", "skip", "raise", "ignore"], BeforeValidator(lowered)] = key(
        "auto",
        "What becomes of a step whose gradients hold inf or NaN, in any precision. skip: weights and state stay as "
        "they are, a warning says so, and ten such steps in a row are an error; raise: the first is an error; ignore: "
        "the update is made, as plain PyTorch makes it, with a warning the first time. A dynamic loss scale skips "
        "and falls, and is an error at its minimum. With the update policy in_backward each part of the model is left "
        "alone for its own gradients, as those of all are not known yet; the warning says how many parts were "
        "updated. auto: skip, or ignore where bf16.check_grad_overflow is false.",
    )
    accumulation: Annotated[Literal["auto", "layer_major", "step_major"], BeforeValidator(lowered)] = key(
        "auto",
        "Order of gradient accumulation. layer_major: all micro-batches through a unit before the next unit, so that "
        "each unit is gathered and reduced once in a window; it needs engine.train_batch, or a Trainer of "
        "Transformers' on the engine, holds the activations of all micro-batches of a window at once, and is for "
        "models that keep nothing on their modules from one part of a forward to another. step_major and auto: one "
        "micro-batch after another.",
    )
    tile_linear: Flag = key(
        False,
        "Let initialize() cut a linear layer with more elements than stage3_max_live_parameters into tiles of at most "
        "half as many (wherry.nn.TiledLinear), at stage 3.",
    )
    chunked_loss: Flag = key(
        False,
        "Compute the cross-entropy of a language model of Transformers' kind from the states before its head, a tile "
        "of logits at a time, where its forward is called with labels: the same loss and gradients, and the logits "
        "never exist whole unless something else reads them. WherryTrainer turns it on unless it is false here.",
    )
    sequence_tiles: Pieces | None = key(
        None,
        "Run the MLPs of the model's blocks, and norms, over so many pieces of the sequence dim, each run again in the "
        "backward, so that what is wide in them never exists for a whole sequence. auto: as many that a piece has no "
        "more rows than the states are wide, and no wider tensor than all of them. Unset: whole.",
    )
    context_parallel: Integer = key(
        1,
        "Ranks that share the sequence of the same samples: each has a part of it, and in attention, which sees all "
        "of it, a part of the heads. For causal language models of Transformers that are called with labels, with "
        "attention of sdpa or eager. States are partitioned over all data-parallel ranks; batch sizes count a sample "
        "once. A mesh with an axis cp says the same.",
        ge=1,
    )
    master: Annotated[Literal["auto", "whole", "split"], BeforeValidator(lowered)] = key(
        "auto",
        "How fp32 master weights rest: whole, or split into the bf16 working weight and the lower 16 bits, "
        "which needs bf16. auto: split on the host, whole on a GPU.",
    )
    round_masters: Flag = key(
        False,
        "Let fp32 masters begin at the weights as the working type rounds them, as DeepSpeed's do. false: at the "
        "weights as the model or its files have them.",
    )
    state_dtype: Annotated[Literal["fp32", "bf16", "int8"], BeforeValidator(lowered)] = key(
        "fp32", "The type of the optimizer's moments. bf16 and int8 lose precision."
    )
    timeout_s: Number = key(600.0, "Seconds after which a rank that did not arrive at a collective is an error.", gt=0)
    compare_replicas: Integer | None = key(
        None,
        "Compare what several ranks hold of the same weights every so many steps, which reads all of it once; where it "
        "differs, the step is an error. Unset: only saves do.",
        ge=1,
    )
    host_memory: Memory | None = key(
        None,
        'Host memory that training states may take on this machine, all its ranks together: bytes, or like "3GB". Not '
        "given: the free memory, which is too little on virtual machines whose memory grows with use. Plans keep to "
        "it, too.",
        gt=0,
    )
    checkpoint: CheckpointBlock = block(CheckpointBlock, "How checkpoints are kept and written.")
    run_dir: Text | None = key(None, "Folder for metrics, as JSON lines and CSV.")
    profile: ProfileBlock = block(ProfileBlock, "Where time and memory go in a few steps.")
