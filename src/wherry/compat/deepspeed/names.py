"""The names of the alias: of each module below `deepspeed`, what it has, and where in Wherry that lives.

A name is here because a published script or library calls it, or because DeepSpeed's documentation tells users to. Any
other one imports as a class that can be subclassed, and says when it is used that it is not part of Wherry.

A line is `home: names`, with a home of `.x` for `wherry.compat.deepspeed.x`, and `theirs=ours` for what Wherry calls
otherwise. A module without lines holds other modules. What Wherry has not is listed with what to use instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

_ZERO = (".zero: GatheredParameters Init", ".parameters: register_external_parameter unregister_external_parameter")
_STATUS = ".parameters: ZeroParamStatus"
_SAFE = (
    ".tensor_fragment: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized"
)
_LEAVES = ".leaf_modules: set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
_COMM = (
    ".comm: allgather_fn configure get_global_rank get_local_rank get_rank get_world_size has_all_gather_into_tensor "
    "init_distributed is_initialized log_summary reduce_scatter_fn",
    "torch.distributed: ReduceOp is_available",
)
_CONFIG = ".config: DeepSpeedConfig DeepSpeedConfigError"
_LOGGERS = (".utils: log_dist", "wherry.observe.log: logger")
_PROFILER = ".profiling: FlopsProfiler get_model_profile"
_TILED = ".zero: TiledLinear TiledLinearReturnBias"


MODULES: Mapping[str, tuple[str, ...]] = {
    "": (
        ".accelerator: get_accelerator",
        ".comm: init_distributed",
        ".config: add_config_arguments",
        ".engine: DeepSpeedEngine OnDevice initialize",
        ".schedules: add_tuning_arguments",
        _CONFIG,
        *_LOGGERS,
        "deepspeed: accelerator checkpoint comm constants git_version_info monitor ops profiling runtime utils",
        "deepspeed: dist=comm",
        "deepspeed.runtime: zero",
        "deepspeed.runtime.activation_checkpointing: checkpointing",
    ),
    "accelerator": (".accelerator: DeepSpeedAccelerator=Accelerator get_accelerator",),
    "accelerator.abstract_accelerator": (".accelerator: DeepSpeedAccelerator=Accelerator",),
    "accelerator.real_accelerator": (".accelerator: get_accelerator",),
    "checkpoint": (
        ".files: ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
        "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
        "TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY "
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS",
    ),
    "checkpoint.utils": (".utils: clone_tensors_for_torch_save",),
    "comm": _COMM,
    "comm.comm": _COMM,
    "constants": (".utils: TORCH_DISTRIBUTED_DEFAULT_PORT",),
    "env_report": (".utils: main=env_report",),
    "git_version_info": ("wherry.compat.deepspeed: version=VERSION",),
    "launcher": (),
    "launcher.runner": (".launcher: DEEPSPEED_ENVIRONMENT_NAME=ENVIRONMENT_FILE main",),
    "moe.utils": (".moe: split_params_into_different_moe_groups_for_optimizer",),
    "monitor": (),
    "monitor.monitor": (".monitor: MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor",),
    "ops": (".builders: __compatible_ops__=COMPATIBLE_OPS",),
    "ops.adagrad": (".ops: DeepSpeedCPUAdagrad",),
    "ops.adam": (".ops: DeepSpeedCPUAdam FusedAdam",),
    "ops.adam.cpu_adam": (".ops: DeepSpeedCPUAdam",),
    "ops.adam.fused_adam": (".ops: FusedAdam",),
    "ops.lamb": (".ops: FusedLamb",),
    "ops.lion": (".ops: DeepSpeedCPULion FusedLion",),
    "ops.op_builder": (),
    "ops.op_builder.builder": (".builders: OpBuilder",),
    "profiling": (),
    "profiling.flops_profiler": (_PROFILER,),
    "profiling.flops_profiler.profiler": (_PROFILER,),
    "runtime": (),
    "runtime.activation_checkpointing": (),
    "runtime.activation_checkpointing.checkpointing": (),
    "runtime.base_optimizer": (".optimizer: DeepSpeedOptimizer",),
    "runtime.bf16_optimizer": (".optimizer: BF16_Optimizer",),
    "runtime.config": (_CONFIG, ".config: LAMB_OPTIMIZER ONEBIT_LAMB_OPTIMIZER"),
    "runtime.dataloader": (".utils: RepeatingLoader",),
    "runtime.engine": (".engine: DeepSpeedEngine",),
    "runtime.fp16": (),
    "runtime.fp16.fused_optimizer": (".optimizer: FP16_Optimizer",),
    "runtime.fp16.loss_scaler": ("wherry.update.loss_scale: DynamicLossScaler=LossScaler LossScaler",),
    "runtime.fp16.unfused_optimizer": (".optimizer: FP16_UnfusedOptimizer",),
    "runtime.lr_schedules": (),
    "runtime.sequence_parallel": (),
    "runtime.sequence_parallel.ulysses_sp": (".tiled: TiledMLP sequence_tiled_compute",),
    "runtime.utils": (".runtime_utils: clip_grad_norm_ move_to_device see_memory_usage set_random_seed",),
    "runtime.zero": (*_ZERO, _STATUS, _TILED),
    "runtime.zero.config": (".zero: ZeroStageEnum",),
    "runtime.zero.offload_config": (".zero: OffloadDeviceEnum OffloadStateTypeEnum",),
    "runtime.zero.offload_states": (".utils: get_state_devices",),
    "runtime.zero.partition_parameters": (
        *_ZERO,
        _STATUS,
        ".accelerator: get_accelerator",
        ".zero: zero_wrapper_for_fp_tensor_constructor",
        "torch: _orig_torch_arange=arange",
    ),
    "runtime.zero.stage3": (
        ".optimizer: DeepSpeedZeroOptimizer_Stage3",
        ".profiling: estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live",
    ),
    "runtime.zero.stage_1_and_2": (
        ".optimizer: DeepSpeedZeroOptimizer",
        ".profiling: estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live",
    ),
    "runtime.zero.tiling": (_TILED,),
    "runtime.zero.utils": (".parameters: is_zero_param",),
    "utils": (_SAFE, _LEAVES, *_LOGGERS, ".comm: is_initialized", ".engine: OnDevice", ".utils: RepeatingLoader"),
    "utils.groups": (),
    "utils.logging": _LOGGERS,
    "utils.tensor_fragment": (_SAFE,),
    "utils.timer": (".timer: SynchronizedWallClockTimer",),
    "utils.z3_leaf_module": (_LEAVES,),
    "utils.zero_to_fp32": (
        ".export: convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "get_model_state_file get_optim_files load_state_dict_from_zero_checkpoint main",
    ),
}

# Modules that scripts take for objects, whose `mpu` some of them set: each is Wherry's own, under another name.
ITSELF: Mapping[str, str] = {
    "runtime.activation_checkpointing.checkpointing": "wherry.compat.deepspeed.checkpointing",
    "runtime.lr_schedules": "wherry.compat.deepspeed.schedules",
    "utils.groups": "wherry.compat.deepspeed.groups",
}

# Modules of which one of Wherry's answers for names that nobody has listed.
OPEN: Mapping[str, str] = {
    "comm": "wherry.compat.deepspeed.comm",
    "comm.comm": "wherry.compat.deepspeed.comm",
    "ops.op_builder": "wherry.compat.deepspeed.builders",
}

# The advice for a name that no table lists.
UNLISTED = "it has the names that published scripts call; ask for this one with the address of such a script"

ABSENT_NAMES: Mapping[str, str] = {
    "DeepSpeedHybridEngine": "use wherry.gathered(engine.module) to generate",
    "DeepSpeedInferenceConfig": "serve the exported weights",
    "DeepSpeedTransformerConfig": "use the model's own library",
    "DeepSpeedTransformerLayer": "use the model's own library",
    "InferenceEngine": "serve the exported weights with an inference server",
    "PipelineEngine": "use torch.distributed.pipelining around the engine",
    "PipelineModule": "use torch.distributed.pipelining around the engine",
    "default_inference_config": "serve the exported weights with an inference server",
    "accelerator.set_accelerator": "torch's accelerator is used: see get_accelerator",
    "init_inference": "serve the exported weights with an inference server",
    "ops.adam.ZenFlowSelectiveAdamW": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    "ops.adam.ZenFlowSelectiveAdamW_stage3": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    "replace_transformer_layer": "use the model's own library",
    "revert_transformer_layer": "use the model's own library",
    **dict.fromkeys(
        [
            f"runtime.sequence_parallel.ulysses_sp.{name}"
            for name in ("UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "UlyssesSPFwdLossBwdWithLogits")
        ],
        "set wherry.context_parallel, and give its ranks whole rows",
    ),
    "set_autotp_mode": "use torch's parallelize_module and give initialize the mesh",
    "tp_model_init": "use torch's parallelize_module and give initialize the mesh",
}

ABSENT_MODULES: Mapping[str, str] = {
    **dict.fromkeys(
        [
            f"accelerator.{kind}_accelerator"
            for kind in ("cpu", "cuda", "hpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu")
        ],
        "torch's accelerator is used: see get_accelerator",
    ),
    "autotuning": "use `wherry plan`",
    "checkpoint.constants": "see `wherry inspect`, and `wherry import-deepspeed` for those of DeepSpeed's",
    "checkpoint.deepspeed_checkpoint": "see `wherry inspect`, and `wherry import-deepspeed` for those of DeepSpeed's",
    "checkpoint.ds_to_universal": "any checkpoint is loaded by any number of ranks as it is; `wherry import-deepspeed` "
    "reads those of DeepSpeed's",
    "checkpoint.universal_checkpoint": "any checkpoint is loaded by any number of ranks as it is",
    **dict.fromkeys(
        [f"comm.{backend}" for backend in ("backend", "ccl", "mori", "torch")],
        "torch.distributed communicates by its own backends",
    ),
    "comm.config": "set comms_logger in the config, or call deepspeed.comm.configure",
    **dict.fromkeys(
        ["comm.constants", "comm.reduce_op", "comm.utils"], "use torch.distributed, or what deepspeed.comm has of it"
    ),
    "compile": "engine.compile() compiles each block by itself",
    "compression": "training is not compressed",
    "datastates": "checkpoints are written by the ranks",
    "elasticity": "any checkpoint resumes on any number of ranks; give the batch sizes themselves",
    "inference": "serve the exported weights with an inference server",
    "io": "checkpoints are written by the ranks",
    "launcher.launch": "`wherry run` starts the ranks",
    "launcher.launcher_helper": "`wherry run` starts the ranks",
    "launcher.multinode_runner": "use `wherry run --hostfile FILE`, or `wherry run --emit slurm`",
    "linear": "use PEFT's LoRA",
    "model_implementations": "use the model's own library",
    "module_inject": "use torch's parallelize_module for tensor parallelism",
    "moe": "experts of the model's own library train as they are",
    **dict.fromkeys(
        [f"monitor.{name}" for name in ("comet", "config", "csv_monitor", "tensorboard", "wandb")],
        "set the block of its name in the config, or use deepspeed.monitor.monitor",
    ),
    "nvme": "see `wherry bench disk`",
    "nebula": "checkpoints are written by the ranks",
    **dict.fromkeys(
        ["ops.adagrad.cpu_adagrad", "ops.lamb.fused_lamb", "ops.lion.cpu_lion", "ops.lion.fused_lion"],
        "import its optimizer from the package above",
    ),
    "ops.aio": "Wherry's disk tier serves the engine; see `wherry bench disk`",
    "ops.deepspeed4science": "use attention of the model's own library",
    "ops.fp_quantizer": "training is not quantized",
    "ops.muon": "use the optimizer Muon of a config, or wherry.optim.Muon",
    "ops.quantizer": "training is not quantized",
    "ops.random_ltd": "build it into the model",
    "ops.sparse_attention": "use attention of the model's own library",
    "ops.spatial": "use the model's own library",
    "ops.transformer": "use attention of the model's own library, or torch.compile",
    "pipe": "use torch.distributed.pipelining around the engine",
    "profiling.config": "set flops_profiler in the config",
    "runtime.activation_checkpointing.offload_activations": "set activation_checkpointing.cpu_checkpointing",
    "runtime.comm": "communication is torch.distributed's, and not compressed",
    "runtime.compiler": "use torch.compiler",
    **dict.fromkeys(
        ["runtime.config_utils", "runtime.constants", "runtime.precision_config"],
        "read the dict of the config, whose keys docs/config.md describes",
    ),
    "runtime.compression": "communication is not compressed",
    "runtime.data_pipeline": "build it into the data loader",
    "runtime.domino": "use torch's parallelize_module for tensor parallelism",
    "runtime.eigenvalue": "training is not compressed",
    "runtime.fp16.onebit": "communication is not compressed; use AdamW",
    "runtime.hybrid_engine": "use wherry.gathered(engine.module) around generation",
    "runtime.hybrid_engine_graph": "use wherry.gathered(engine.module) around generation",
    "runtime.model_checkpointing": "checkpoints are written by the ranks",
    "runtime.pipe": "use torch.distributed.pipelining around the engine",
    "runtime.progressive_layer_drop": "build it into the model",
    "runtime.quantize": "training is not quantized",
    "runtime.rollout": "use wherry.gathered(engine.module) around generation",
    "runtime.sparse_tensor": "gradients are dense",
    "runtime.state_dict_factory": "see `wherry import-deepspeed`",
    "runtime.sequence_parallel.parallel_state_sp": "set wherry.context_parallel, and give its ranks whole rows",
    "runtime.superoffload": "the exact update policies overlap instead",
    "runtime.swap_tensor": "the disk tier serves the engine",
    "runtime.torch_autocast": "set torch_autocast in the config",
    "runtime.tensor_parallel": "use torch's parallelize_module for tensor parallelism",
    "runtime.weight_quantizer": "training is not quantized",
    "runtime.zenflow": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    "runtime.zero.leaf_module_config": "set zero_optimization.leaf_module in the config, or call set_z3_leaf_modules",
    "runtime.zero.linear": "use torch.nn.Linear",
    "runtime.zero.mics": "set zero_optimization.mics_shard_size in the config, and use deepspeed.zero.Init",
    "runtime.zero.muon": "use the optimizer Muon of a config, or wherry.optim.Muon",
    "runtime.zero.parameter_offload": "gathers are the engine's own",
    "runtime.zero.contiguous_memory_allocator": "the engine's buffers are its own",
    "runtime.zero.partitioned_param_coordinator": "gathers are the engine's own",
    "runtime.zero.partitioned_param_profiler": "gathers are the engine's own",
    "sequence": "set wherry.context_parallel, and give its ranks whole rows",
    "utils.comms_logging": "set comms_logger in the config, and call deepspeed.comm.log_summary",
    "utils.init_on_device": "use deepspeed.OnDevice",
    "utils.numa": "bind processes with `numactl`",
    "utils.nvtx": "use torch.profiler.record_function",
    "utils.torch": "use torch's own",
    "utils.debug": "see engine.module.named_parameters",
    "utils.pin_memory": "torch pins memory",
    "utils.pin_memory_tracker": "see `wherry plan` for what is pinned",
    "utils.static_cache": "use the model's own library",
    "utils.types": "use the model's own library",
}


@functools.cache
def of_module(module: str) -> Mapping[str, tuple[str, str]]:
    """Each name of a module, with its home in Wherry and its name there."""
    found = {}
    for line in MODULES.get(module, ()):
        home, _, listed = line.partition(": ")
        for name in listed.split():
            theirs, _, ours = name.partition("=")
            found[theirs] = (f"wherry.compat.deepspeed{home}" if home.startswith(".") else home, ours or theirs)
    return found


def why_absent(module: str) -> str:
    """What to use instead of a module that Wherry has not; empty for others."""
    return next((why for path, why in ABSENT_MODULES.items() if f"{module}.".startswith(f"{path}.")), "")
