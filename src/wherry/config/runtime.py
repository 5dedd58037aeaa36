"""The blocks around training: disk I/O, activations, checkpoints, logging, and Wherry's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from wherry.config.fields import (
    Block,
    Bytes,
    Flag,
    Folders,
    Integer,
    Memory,
    Number,
    Text,
    block,
    key,
    lowered,
    renamed,
    uppered,
)

_SUMMED = "collectives are summed up; a torch.profiler trace has each of them under its unit's name"


class Aio(Block):
    block_size: Integer = key(1_048_576, "Bytes of one request to the disk.", ge=512)
    queue_depth: Integer = key(16, "Requests kept under way at once, on each path.", ge=1)
    intra_op_parallelism: Integer = key(1, "Multiplies queue_depth: requests of one large transfer at once.", ge=1)
    single_submit: Flag = key(False, "Submit requests one by one.", inert="requests are always submitted together")
    overlap_events: Flag = key(True, "Overlap submitting with completing.", inert="they always overlap")
    use_gds: Flag = key(False, "GPUDirect Storage. true is refused: the disk tier reads into host memory.")
    checksum: Flag = key(
        False,
        "Compare all that is read from the disk with checksums of what was written: 4 bytes of host memory for every "
        "4,096 on the disk. A difference is an error that names the record, the file and the place in it.",
    )
    thread_count: Any = renamed("intra_op_parallelism", "Older spelling.")


class ActivationCheckpointing(Block):
    """Beside the keys that DeepSpeed has, which say how checkpoints are kept, those that say what is checkpointed."""

    policy: Annotated[Literal["none", "recompute", "offload", "auto"] | None, BeforeValidator(lowered)] = key(
        None,
        "What becomes of what a unit's forward saves: kept (`none`), computed again from the unit's inputs "
        "(`recompute`), put away until backward (`offload`), or for each unit what costs least in the memory there is "
        "(`auto`). Unset: `recompute` if another key of this block asks for something, else `none`. "
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
        False, "Copy activation checkpoints to memory of their own, apart from what lives shortly."
    )
    number_checkpoints: Integer | None = key(None, "How many of them to make room for at once.", ge=1)
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


_ALL_WRITE = "every rank writes its own part, straight to its file"


class ParallelWrite(Block):
    pipeline_stage: Flag = key(False, "Let pipeline stages write in parallel.")


class Writer(Block):
    type: Text = key("FAST", "The kind of writer.")
    io_buffer_size: Bytes = key(64 * 1024 * 1024, "Bytes of its buffer.", ge=1)
    io_buffer_double: Flag = key(True, "Use two buffers.")
    io_multiplier: Integer = key(1, "Buffers per writer.", ge=1)
    data_parallel: Text | None = key(None, "Which data-parallel ranks write.")
    decoupled: Flag = key(False, "Write while training goes on. true is refused: wherry.checkpoint.async_save does it.")
    show_statistics: Flag = key(False, "Print the writer's figures.")


class Checkpoint(Block):
    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(uppered)] = key(
        "WARN", "What to do when ranks disagree about the tag of a checkpoint; rank 0's is used, unless it is FAIL."
    )
    load_universal: Flag = key(
        False,
        "Load a checkpoint that is independent of the number of ranks.",
        inert="every checkpoint loads on any number of ranks",
        met=True,
    )
    use_node_local_storage: Flag = key(
        False, "Every node writes to its own disk. true is refused: a checkpoint is one folder that all ranks see."
    )
    parallel_write: ParallelWrite = block(ParallelWrite, "Who writes in parallel.", inert=_ALL_WRITE)
    checkpoint_serialization: Flag = key(
        True, "Write with the compressed format.", inert="files are safetensors, uncompressed"
    )
    writer: Writer | None = key(None, "How files are written.", inert=_ALL_WRITE)


class CommsLogger(Block):
    enabled: Flag = key(False, "Log collectives.")
    prof_all: Flag = key(True, "Log all of them.")
    prof_ops: list[Text] = key([], "Log these only, where prof_all is false.")
    verbose: Flag = key(False, "One line for each.", inert=_SUMMED)
    debug: Flag = key(False, "With the caller's name.", inert=_SUMMED)


class FlopsProfiler(Block):
    enabled: Flag = key(False, "Count floating-point operations.")
    recompute_fwd_factor: Number = key(
        0.0, "Share of the forward that is computed twice.", ge=0, inert="operations are counted as they are run"
    )
    profile_step: Integer = key(1, "The step that is counted.", ge=0)
    module_depth: Integer = key(-1, "Depth of modules shown; -1 for all.")
    top_modules: Integer = key(1, "Modules shown at each depth.", ge=0)
    detailed: Flag = key(True, "Show every module.")
    output_file: Text | None = key(None, "Write to this file instead of the screen.")


class TensorBoard(Block):
    enabled: Flag = key(False, "Write metrics for TensorBoard.")
    output_path: Text = key("", "Folder for the files. Empty: wherry.run_dir, or the working folder.")
    job_name: Text = key("DeepSpeedJobName", "Folder inside output_path.")


class CsvMonitor(Block):
    enabled: Flag = key(False, "Write metrics as CSV.")
    output_path: Text = key("", "Folder for the files. Empty: csv_monitor in the working folder.")
    job_name: Text = key("DeepSpeedJobName", "Folder inside output_path.")


class Wandb(Block):
    enabled: Flag = key(False, "Send metrics to Weights & Biases.")
    group: Text | None = key(None, "Group of the run.")
    team: Text | None = key(None, "Team that owns the run.")
    project: Text = key("deepspeed", "Project of the run.")


class Throughput(Block):
    enabled: Flag = key(True, "Measure throughput.")
    synchronized: Flag = key(True, "Synchronize the device around the measure.")


class Timers(Block):
    throughput: Throughput = block(Throughput, "The throughput timer.")


class Checkpoints(Block):
    keep_last: Integer | None = key(
        None,
        "How many checkpoints a folder keeps: older ones that are named after their step are deleted. Unset: all.",
        ge=1,
    )
    async_save: Flag = key(
        False, "Copy the states and go on training, while the files are written behind; one save at a time."
    )


class Own(Block):
    """Keys that are Wherry's own, in the block `wherry`."""

    unit_classes: list[Text] = key([], "Module classes whose instances are units. Empty: the model's repeated blocks.")
    update_policy: Annotated[
        Literal["auto", "at_step", "before_use", "in_backward", "delayed"], BeforeValidator(lowered)
    ] = key(
        "auto",
        "When a unit is updated: inside step(), before its next use, or as soon as its gradients land; these give "
        "the same results, bit for bit, but that in_backward counts a missing gradient as zero: it updates before it "
        "is known that nobody has one, and zero_grad() cannot drop what has been updated from already. "
        "`delayed` updates one step late, which changes the result; whoever reads "
        "weights reads those that the next forward uses, and engine.settle() makes the last update when training ends. "
        "With before_use and in_backward, parameters kept by reference (a list, an optimizer's param_groups) read as "
        "NaN after a step, until their next use in the model, engine.settle(), or a walk over the model's own. "
        "auto: at_step where the optimizer's state is on the device, and otherwise in_backward if nothing (clipping, "
        "loss scaling) has to wait for all gradients, or before_use.",
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
        "each unit is gathered and reduced once in a window; it needs engine.train_batch, holds the activations of all "
        "micro-batches of a window at once, and is for models that keep nothing on their modules from one part of a "
        "forward to another. step_major and auto: one micro-batch after another.",
    )
    tile_linear: Flag = key(
        False,
        "Let initialize() cut a linear layer with more elements than stage3_max_live_parameters into tiles of at most "
        "half as many (wherry.nn.TiledLinear), at stage 3.",
    )
    master: Annotated[Literal["auto", "whole", "split"], BeforeValidator(lowered)] = key(
        "auto",
        "How fp32 master weights rest: whole, or split into the bf16 working weight and the lower 16 bits, "
        "which needs bf16. auto: split on the host, whole on a GPU.",
    )
    state_dtype: Annotated[Literal["fp32", "bf16", "int8"], BeforeValidator(lowered)] = key(
        "fp32", "The type of the optimizer's moments. bf16 and int8 lose precision."
    )
    timeout_s: Number = key(600.0, "Seconds after which a rank that did not arrive at a collective is an error.", gt=0)
    host_memory: Memory | None = key(
        None,
        'Host memory that training states may take on this machine, all its ranks together: bytes, or like "3GB". Not '
        "given: what is free. Plans keep to it, too.",
        gt=0,
    )
    checkpoint: Checkpoints = block(Checkpoints, "How checkpoints are kept and written.")
    run_dir: Text | None = key(None, "Folder for metrics, as JSON lines and CSV.")
