"""The names of the alias: of each module below `deepspeed`, what it has, and where in Wherry that lives.

A line is `home: names`, with a home of `.x` for `wherry.compat.deepspeed.x`, and `theirs=ours` for what Wherry calls
otherwise. A module without lines holds other modules. What Wherry has not is listed with what to use instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

_ZERO = ".zero: GatheredParameters Init MiCS_Init register_external_parameter unregister_external_parameter"
_STATUS = ".parameters: ZeroParamStatus"
_SAFE = (
    ".tensor_fragment: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized"
)
_LEAVES = (
    ".utils: get_z3_leaf_modules set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
    "unset_z3_leaf_modules unset_z3_leaf_modules_by_name unset_z3_leaf_modules_by_suffix z3_leaf_module "
    "z3_leaf_parameter"
)
_COMM = (
    ".comm: all_gather_coalesced allgather_fn configure get_global_rank get_rank get_world_group get_world_size "
    "has_all_gather_into_tensor has_reduce_scatter_tensor init_distributed is_initialized log_summary "
    "reduce_scatter_fn",
    "torch.distributed: ReduceOp all_reduce_coalesced inference_all_reduce=all_reduce is_available",
    "wherry.parallel.topology: get_local_rank=local_rank",
)
_ACCELERATOR = ".accelerator: Accelerator get_accelerator is_current_accelerator_supported set_accelerator"
_CONFIG = ".config: DeepSpeedConfig"
_CONFIG_ERROR = "wherry.errors: DeepSpeedConfigError=ConfigError"
_LOGGER = "wherry.observe.log: logger"
_PROFILER = ".profiling: FlopsProfiler get_model_profile"
_TILED = ".zero: TiledLinear"

MODULES: Mapping[str, tuple[str, ...]] = {
    "": (
        ".accelerator: get_accelerator",
        ".comm: init_distributed",
        ".config: DeepSpeedConfig add_config_arguments",
        ".engine: DeepSpeedEngine OnDevice initialize",
        ".utils: log_dist",
        _CONFIG_ERROR,
        _LOGGER,
        "deepspeed: accelerator checkpoint comm constants git_version_info monitor ops profiling runtime utils",
        "deepspeed: dist=comm",
        "deepspeed.runtime: zero",
        "deepspeed.runtime.activation_checkpointing: checkpointing",
    ),
    "accelerator": (_ACCELERATOR, ".accelerator: DeepSpeedAccelerator=Accelerator"),
    "accelerator.abstract_accelerator": (".accelerator: DeepSpeedAccelerator=Accelerator",),
    "accelerator.real_accelerator": (_ACCELERATOR,),
    "checkpoint": (),
    "checkpoint.utils": (".utils: clone_tensors_for_torch_save",),
    "comm": _COMM,
    "comm.comm": _COMM,
    "constants": (".utils: INFERENCE_GENERIC_MODE TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",),
    "env_report": (".utils: cli_main=env_report main=env_report",),
    "git_version_info": (
        ".utils: compatible_ops git_branch git_hash installed_ops torch_info",
        "wherry.compat.deepspeed: version=VERSION",
    ),
    "launcher": (),
    "launcher.runner": (".launcher: DEEPSPEED_ENVIRONMENT_NAME=ENVIRONMENT_FILE build_parser main",),
    "monitor": (),
    "monitor.config": (".utils: get_monitor_config",),
    "monitor.monitor": (".utils: MonitorMaster",),
    "ops": (".ops: __compatible_ops__=COMPATIBLE_OPS",),
    "ops.adagrad": (".ops: DeepSpeedCPUAdagrad",),
    "ops.adagrad.cpu_adagrad": (".ops: DeepSpeedCPUAdagrad",),
    "ops.adam": (".ops: DeepSpeedCPUAdam FusedAdam",),
    "ops.adam.cpu_adam": (".ops: DeepSpeedCPUAdam",),
    "ops.adam.fused_adam": (".ops: FusedAdam",),
    "ops.lion": (".ops: DeepSpeedCPULion FusedLion",),
    "ops.lion.cpu_lion": (".ops: DeepSpeedCPULion",),
    "ops.lion.fused_lion": (".ops: FusedLion",),
    "ops.op_builder": (
        ".ops: CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder FusedLionBuilder OpBuilder",
    ),
    "profiling": (),
    "profiling.flops_profiler": (_PROFILER,),
    "profiling.flops_profiler.profiler": (_PROFILER,),
    "runtime": (),
    "runtime.activation_checkpointing": (),
    "runtime.activation_checkpointing.checkpointing": (),
    "runtime.base_optimizer": (
        "wherry.update.optimizer: DeepSpeedOptimizer=ShardedOptimizer ZeROOptimizer=ShardedOptimizer",
    ),
    "runtime.config": (_CONFIG, _CONFIG_ERROR),
    "runtime.config_utils": ("wherry.config.fields: DeepSpeedConfigModel=ConfigBlock",),
    "runtime.dataloader": (".utils: RepeatingLoader",),
    "runtime.engine": (
        ".engine: DeepSpeedEngine",
        "builtins: DeepSpeedOptimizerCallable=object DeepSpeedSchedulerCallable=object",
    ),
    "runtime.fp16": (),
    "runtime.fp16.loss_scaler": ("wherry.update.loss_scale: DynamicLossScaler=LossScaler LossScaler",),
    "runtime.lr_schedules": (
        "wherry.update.schedules: LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        ".config: LR_RANGE_TEST LR_SCHEDULE ONE_CYCLE VALID_LR_SCHEDULES WARMUP_COSINE_LR WARMUP_DECAY_LR WARMUP_LR",
    ),
    "runtime.utils": (".utils: see_memory_usage", "torch.nn.utils: clip_grad_norm_"),
    "runtime.zero": (_ZERO, ".zero: unwrap_model_for_generation", _STATUS, _TILED),
    "runtime.zero.config": (".config: DeepSpeedZeroConfig", ".zero: ZeroStageEnum"),
    "runtime.zero.mics": (".zero: MiCS_Init",),
    "runtime.zero.offload_config": (
        ".config: DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
        ".zero: OffloadDeviceEnum OffloadStateTypeEnum",
    ),
    "runtime.zero.offload_states": (".utils: get_state_devices",),
    "runtime.zero.parameter_offload": (".engine: DeepSpeedZeRoOffload=Hooked",),
    "runtime.zero.partition_parameters": (
        _ZERO,
        _STATUS,
        ".zero: InsertPostInitMethodToModuleSubClasses=Init _orig_torch_arange=orig_torch_arange restore_init_context "
        "shutdown_init_context zero_wrapper_for_fp_tensor_constructor",
        ".accelerator: get_accelerator",
    ),
    "runtime.zero.stage3": (
        ".profiling: estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live",
        "wherry.update.optimizer: DeepSpeedZeroOptimizer_Stage3=ShardedOptimizer",
    ),
    "runtime.zero.stage_1_and_2": (
        ".profiling: estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live",
        "wherry.update.optimizer: DeepSpeedZeroOptimizer=ShardedOptimizer",
    ),
    "runtime.zero.tiling": (_TILED,),
    "runtime.zero.utils": (".parameters: is_zero_param",),
    "utils": (
        _SAFE,
        _LEAVES,
        _LOGGER,
        ".comm: is_initialized",
        ".engine: OnDevice",
        ".utils: RepeatingLoader instrument_w_nvtx log_dist",
    ),
    "utils.groups": (),
    "utils.init_on_device": (".engine: OnDevice",),
    "utils.logging": (".utils: LoggerFactory log_dist print_json_dist set_log_level_from_string", _LOGGER),
    "utils.nvtx": (".utils: instrument_w_nvtx",),
    "utils.tensor_fragment": (_SAFE,),
    "utils.z3_leaf_module": (_LEAVES,),
    "utils.zero_to_fp32": (
        ".export: convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "get_model_state_file get_optim_files load_state_dict_from_zero_checkpoint main",
    ),
}

# Modules whose variables scripts set and read: each is Wherry's own, under another name.
ITSELF: Mapping[str, str] = {
    "runtime.activation_checkpointing.checkpointing": "wherry.compat.deepspeed.checkpointing",
    "utils.groups": "wherry.compat.deepspeed.groups",
}

# Modules of which one of Wherry's answers for names that nobody has listed.
OPEN: Mapping[str, str] = {
    "comm": "wherry.compat.deepspeed.comm",
    "comm.comm": "wherry.compat.deepspeed.comm",
    "ops.op_builder": "wherry.compat.deepspeed.ops",
}

ABSENT_NAMES: Mapping[str, str] = {
    "DeepSpeedHybridEngine": "use wherry.gathered(engine.module) to generate",
    "DeepSpeedInferenceConfig": "serve the exported weights",
    "DeepSpeedTransformerConfig": "use the model's own library",
    "DeepSpeedTransformerLayer": "use the model's own library",
    "InferenceEngine": "serve the exported weights with an inference server",
    "PipelineEngine": "use torch.distributed.pipelining around the engine",
    "PipelineModule": "use torch.distributed.pipelining around the engine",
    "init_inference": "serve the exported weights with an inference server",
    "runtime.zero.TiledLinearReturnBias": "use TiledLinear, and add the bias outside",
    "runtime.zero.tiling.TiledLinearReturnBias": "use TiledLinear, and add the bias outside",
    "tp_model_init": "use torch's parallelize_module and give initialize the mesh",
}

ABSENT_MODULES: Mapping[str, str] = {
    "autotuning": "use `wherry plan`",
    "checkpoint.deepspeed_checkpoint": "see `wherry inspect`, and `wherry import-deepspeed` for those of DeepSpeed's",
    "checkpoint.ds_to_universal": "any checkpoint is loaded by any number of ranks as it is",
    "checkpoint.universal_checkpoint": "any checkpoint is loaded by any number of ranks as it is",
    "compression": "training is not compressed",
    "elasticity": "any checkpoint resumes on any number of ranks; give the batch sizes themselves",
    "inference": "serve the exported weights with an inference server",
    "linear": "use PEFT's LoRA",
    "model_implementations": "use the model's own library",
    "module_inject": "use torch's parallelize_module for tensor parallelism",
    "moe": "experts of the model's own library train as they are",
    "nebula": "checkpoints are written by the ranks",
    "ops.aio": "Wherry's disk tier serves the engine; see `wherry bench disk`",
    "ops.deepspeed4science": "use attention of the model's own library",
    "ops.fp_quantizer": "training is not quantized",
    "ops.lamb": "it needs the norm of each whole parameter; use AdamW",
    "ops.muon": "it needs whole matrices; use AdamW",
    "ops.quantizer": "training is not quantized",
    "ops.random_ltd": "build it into the model",
    "ops.sparse_attention": "use attention of the model's own library",
    "ops.spatial": "use the model's own library",
    "ops.transformer": "use attention of the model's own library, or torch.compile",
    "pipe": "use torch.distributed.pipelining around the engine",
    "profiling.config": "set flops_profiler in the config",
    "runtime.compression": "communication is not compressed",
    "runtime.data_pipeline": "build it into the data loader",
    "runtime.domino": "use torch's parallelize_module for tensor parallelism",
    "runtime.eigenvalue": "training is not compressed",
    "runtime.fp16.onebit": "communication is not compressed; use AdamW",
    "runtime.hybrid_engine": "use wherry.gathered(engine.module) around generation",
    "runtime.pipe": "use torch.distributed.pipelining around the engine",
    "runtime.progressive_layer_drop": "build it into the model",
    "runtime.quantize": "training is not quantized",
    "runtime.sequence_parallel": "use torch's context parallelism around the engine",
    "runtime.superoffload": "the exact update policies overlap instead",
    "runtime.swap_tensor": "the disk tier serves the engine",
    "runtime.tensor_parallel": "use torch's parallelize_module for tensor parallelism",
    "runtime.weight_quantizer": "training is not quantized",
    "runtime.zenflow": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    "sequence": "use torch's context parallelism around the engine",
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
