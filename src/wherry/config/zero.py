"""`zero_optimization`: what is partitioned, and on which tier it rests."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from wherry.config.fields import (
    Block,
    Bucket,
    Flag,
    Folders,
    Integer,
    Number,
    Size,
    Text,
    block,
    key,
    lowered,
    refused,
    renamed,
)

Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lowered)]

_POOLED = "buffers are sized from the units themselves"
_BY_UNIT = "the update runs a unit at a time, and a unit is never cut"
_REDUCED_BY_UNIT = "gradients are reduced a unit at a time, straight from the unit's flat"
_GATHERED_BY_UNIT = "weights are gathered a unit at a time, straight into the unit's flat"
_ALWAYS_OVERLAPPED = "reading, updating and writing back always overlap across units"
_WHOLE_UNITS = 'a unit is always gathered whole; name its classes in "wherry": {"unit_classes": [...]}'
_NOT_ZEROPP = "communication is not quantized"


def _stage(value: Any) -> Any:
    """`true` and `false` are spellings of stages 1 and 0 from before there were stages."""
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value


class OffloadParam(Block):
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
    buffer_size: Bucket = key(100_000_000, "Elements of one such buffer.", inert=_POOLED, ge=1)
    max_in_cpu: Size = key(
        1_000_000_000,
        "Elements of parameters, on each rank, kept in host memory when the device is nvme.",
        ge=0,
    )
    pin_memory: Flag = key(True, "Use page-locked host memory, which copies faster to and from a GPU.")


class OffloadOptimizer(Block):
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
    buffer_size: Bucket | None = key(None, "Elements of one such buffer.", inert=_POOLED, ge=1)
    pin_memory: Flag = key(True, "Use page-locked host memory, which copies faster to and from a GPU.")
    pipeline_read: Flag = key(
        False, "Overlap reading a state with the update before it.", inert=_ALWAYS_OVERLAPPED, met=True
    )
    pipeline_write: Flag = key(
        False, "Overlap writing a state with the update after it.", inert=_ALWAYS_OVERLAPPED, met=True
    )
    fast_init: Flag = key(False, "Initialise states on disk faster.", inert="states on disk are preallocated", met=True)
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
    super_offload: Any = refused("Speculative updates on Grace-Hopper.", "the exact update policies overlap instead")


class LeafModule(Block):
    classes: list[Text] | None = key(None, "Module classes that are gathered whole.")
    names: list[Text] | None = key(None, "Modules that are gathered whole, by name.")
    name_suffixes: list[Text] | None = key(None, "Modules that are gathered whole, by the end of their name.")


class ZeroOptimization(Block):
    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)] = key(
        0,
        "What is partitioned over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. auto: "
        "the planner chooses, for the model and what is free.",
    )
    offload_optimizer: OffloadOptimizer = block(OffloadOptimizer, "Optimizer state outside the device.")
    offload_param: OffloadParam = block(OffloadParam, "Parameters outside the device (stage 3).")
    overlap_comm: Flag | None = key(
        None,
        "Communicate while backward computes.",
        inert="communication always overlaps where the backend can",
        met=True,
    )
    contiguous_gradients: Flag = key(
        True, "Copy gradients to one buffer as they come.", inert="gradients always land in the unit's flat"
    )
    reduce_scatter: Flag = key(
        True,
        "Reduce-scatter gradients instead of all-reducing them.",
        inert="the stage decides: partitioned gradients are reduce-scattered, replicated ones all-reduced",
    )
    reduce_bucket_size: Bucket = key(
        500_000_000,
        "Elements of small flats whose gradients are reduced together, up to 4 million; 0: each by itself. A large "
        "flat always is.",
        ge=0,
    )
    allgather_partitions: Flag = key(
        True, "All-gather updated weights, instead of broadcasting them.", inert=_GATHERED_BY_UNIT
    )
    allgather_bucket_size: Bucket = key(
        500_000_000,
        "Elements of small flats whose weights are gathered together, up to 4 million; 0: each by itself. A large "
        "flat always is.",
        ge=0,
    )
    use_multi_rank_bucket_allreduce: Flag = key(True, "Merge buckets across ranks.", inert=_REDUCED_BY_UNIT)
    load_from_fp32_weights: Flag = key(
        True, "Restore master weights from fp32.", inert="master weights are always restored as they were saved"
    )
    elastic_checkpoint: Flag = key(
        False,
        "Checkpoints that load on another number of ranks.",
        inert="every checkpoint loads on any number of ranks",
        met=True,
    )
    sub_group_size: Size = key(1_000_000_000, "Elements updated at a time.", inert=_BY_UNIT, ge=1)
    stage3_max_live_parameters: Size = key(
        1_000_000_000, "Elements of gathered parameters at which gathering ahead stops.", ge=0
    )
    stage3_max_reuse_distance: Size = key(
        1_000_000_000,
        "A unit needed again within so many elements is not released.",
        inert="a unit is released as soon as it has been used",
        ge=0,
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
    mics_hierarchical_params_gather: Flag = key(
        False,
        "Gather between the nodes of a group first, then within them.",
        inert="which way a gather goes is the communication library's choice",
    )
    stage3_prefetch_bucket_size: Bucket = key(50_000_000, "Elements gathered ahead of use; one unit always is.", ge=0)
    stage3_param_persistence_threshold: Size = key(
        100_000, "Parameters with fewer elements than this stay gathered.", ge=0
    )
    stage3_model_persistence_threshold: Size = key(sys.maxsize, "At most so many elements stay gathered in all.", ge=0)
    stage3_gather_16bit_weights_on_model_save: Flag = key(
        False, "Let a save of the model at stage 3 gather whole working weights on rank 0."
    )
    stage3_module_granularity_threshold: Size = key(0, "Modules below this size are fetched whole.", inert=_WHOLE_UNITS)
    stage3_use_all_reduce_for_fetch_params: Flag = key(
        False, "Fetch parameters by all-reduce.", inert=_GATHERED_BY_UNIT
    )
    stage3_allgather_sequential: Flag = key(False, "Gather parameters one by one.", inert=_GATHERED_BY_UNIT)
    ignore_unused_parameters: Flag = key(
        True,
        "Allow parameters that get no gradient in a step.",
        inert="they are always allowed: what no rank has a gradient for is left alone, as torch.optim leaves it",
    )
    round_robin_gradients: Flag = key(
        False,
        "Spread gradient copies over ranks.",
        inert="each rank already copies its own shard of every unit",
        met=True,
    )
    grad_hooks: Flag = key(True, "Reduce gradients from hooks.", inert="gradients are always reduced as they come")
    memory_efficient_linear: Flag = key(
        True, "A linear layer that keeps no gathered weight for backward.", inert="no gathered weight is kept anyway"
    )
    override_module_apply: Flag = key(
        True, "Gather parameters in Module.apply.", inert="torch is not patched; use wherry.gathered(params)"
    )
    pipeline_loading_checkpoint: Flag = key(
        False, "Let ranks load a checkpoint one after another.", inert="each rank reads only its own slices"
    )
    log_trace_cache_warnings: Flag = key(
        False, "Warn when the order of modules changes.", inert="the order is recorded anew without a warning"
    )
    enable_sanity_checks: Flag = key(
        False, "Check partitioning at run time.", inert="the checks are always on", met=True
    )
    legacy_stage1: Flag = key(False, "The first implementation of stage 1.", inert="there is one engine for all stages")
    leaf_module: LeafModule = block(LeafModule, "Modules that are gathered whole.", inert=_WHOLE_UNITS)

    cpu_offload: Any = renamed("offload_optimizer.device", "Older spelling of an optimizer on the host.")
    cpu_offload_param: Any = renamed("offload_param.device", "Older spelling of parameters on the host.")
    cpu_offload_params: Any = renamed("offload_param.device", "Older spelling of parameters on the host.")
    cpu_offload_use_pin_memory: Any = renamed("offload_optimizer.pin_memory", "Older spelling of pin_memory.")
    stage3_gather_fp16_weights_on_model_save: Any = renamed(
        "stage3_gather_16bit_weights_on_model_save", "Older spelling."
    )
    allgather_size: Any = renamed("allgather_bucket_size", "Older spelling.")

    zero_quantized_weights: Any = refused("Quantized gathers.", _NOT_ZEROPP)
    zero_quantized_nontrainable_weights: Any = refused("Quantized gathers of frozen weights.", _NOT_ZEROPP)
    zero_quantized_gradients: Any = refused("Quantized reduction.", _NOT_ZEROPP)
    zeropp_loco_param: Any = refused("Error feedback of quantized reduction.", _NOT_ZEROPP)
    zenflow: Any = refused(
        "Asynchronous update of selected gradients.",
        'for a delayed update see "wherry": {"update_policy": "delayed"}',
    )
    save_muon_momentum_buffer_in_memory: Any = refused("A part of Muon.", "the Muon optimizer is not offered")
