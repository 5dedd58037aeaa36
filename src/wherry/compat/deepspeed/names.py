"""The names of the alias: of each module below `deepspeed`, what it has, and where in Wherry that lives.

A line is `home: names`, with a home of `.x` for `wherry.compat.deepspeed.x`, and `theirs=ours` for what Wherry calls
otherwise. A module without lines holds other modules. What Wherry has not is listed with what to use instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

_ZERO = (
    ".zero: GatheredParameters Init MiCS_Init",
    ".parameters: register_external_parameter unregister_external_parameter",
)
_STATUS = ".parameters: ZeroParamStatus"
_SAFE = (
    ".tensor_fragment: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized"
)
_LEAVES = (
    ".leaf_modules: apply_zero_leaf_module_config get_z3_leaf_modules set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules unset_z3_leaf_modules_by_name unset_z3_leaf_modules_by_suffix "
    "z3_leaf_module z3_leaf_parameter"
)
_COMM = (
    ".comm: all_gather_coalesced all_reduce_coalesced allgather_fn comms_logger configure get_all_ranks_from_group "
    "get_comm_operation_count get_global_rank get_local_rank get_local_rank_from_launcher get_logged_comm_ops "
    "get_rank get_world_group get_world_rank_from_launcher get_world_size get_world_size_from_launcher "
    "has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager has_comm_data "
    "has_reduce_scatter_tensor inference_all_reduce init_distributed initialize_mesh_device is_initialized "
    "log_summary reduce_scatter_fn reset_log",
    "torch.distributed: ReduceOp is_available",
)
_ACCELERATOR = (
    ".accelerator: Accelerator SUPPORTED_ACCELERATOR_LIST get_accelerator is_current_accelerator_supported "
    "set_accelerator"
)
_TIMERS = (
    ".timer: BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_MICRO_TIMER "
    "BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER NoopTimer "
    "STEP_GLOBAL_TIMER STEP_MICRO_TIMER SynchronizedWallClockTimer ThroughputTimer trim_mean"
)
_MONITORS = ".monitor: CometMonitor Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor"
_CONFIG = ".config: DeepSpeedConfig"
_CONFIG_ERROR = ".config: DeepSpeedConfigError"
_LOGGER = "wherry.observe.log: logger"
_PROFILER = ".profiling: FlopsProfiler get_model_profile macs_to_string number_to_string params_to_string"
_TILED = ".zero: TiledLinear TiledLinearReturnBias"
_CHECKPOINT_FILES = ".universal: UNIVERSAL_CHECKPOINT_INFO get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank"


MODULES: Mapping[str, tuple[str, ...]] = {
    "": (
        ".accelerator: get_accelerator",
        ".comm: init_distributed",
        ".config: DeepSpeedConfig add_config_arguments",
        ".engine: DeepSpeedEngine OnDevice initialize",
        ".schedules: add_tuning_arguments",
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
    "accelerator.cpu_accelerator": (".accelerator: CPU_Accelerator=Host",),
    "accelerator.cuda_accelerator": (".accelerator: CUDA_Accelerator=Accelerator",),
    "accelerator.real_accelerator": (_ACCELERATOR,),
    "checkpoint": (_CHECKPOINT_FILES,),
    "checkpoint.constants": (
        ".universal: BF16_ZERO_FILE_PREFIX MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX "
        "UNIVERSAL_CHECKPOINT_INFO ZERO_FILE_PREFIX",
    ),
    "checkpoint.ds_to_universal": (".universal: main",),
    "checkpoint.utils": (_CHECKPOINT_FILES, ".utils: clone_tensors_for_torch_save"),
    "comm": _COMM,
    "comm.comm": _COMM,
    "comm.constants": (".comm: CCL_BACKEND GLOO_BACKEND MPI_BACKEND NCCL_BACKEND",),
    "comm.reduce_op": ("torch.distributed: ReduceOp",),
    "comm.utils": (".comm: get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher",),
    "constants": (".utils: INFERENCE_GENERIC_MODE TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",),
    "env_report": (".utils: cli_main=env_report main=env_report",),
    "git_version_info": (
        ".utils: git_branch git_hash torch_info",
        ".builders: compatible_ops=COMPATIBLE_OPS installed_ops=COMPATIBLE_OPS",
        "wherry.parallel.topology: accelerator_name=accelerator",
        "wherry.compat.deepspeed: version=VERSION",
    ),
    "launcher": (),
    "launcher.runner": (
        ".launcher: DEEPSPEED_ENVIRONMENT_NAME=ENVIRONMENT_FILE _parse_hostfile build_parser encode_world_info "
        "fetch_hostfile main parse_args parse_inclusion_exclusion parse_resource_filter",
    ),
    "moe.utils": (".moe: has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer",),
    "monitor": (),
    "monitor.comet": (".monitor: CometMonitor",),
    "monitor.config": (
        ".monitor: CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config",
    ),
    "monitor.csv_monitor": (".monitor: csvMonitor",),
    "monitor.monitor": (_MONITORS,),
    "monitor.tensorboard": (".monitor: TensorBoardMonitor",),
    "monitor.wandb": (".monitor: WandbMonitor",),
    "ops": (".builders: __compatible_ops__=COMPATIBLE_OPS",),
    "ops.adagrad": (".ops: DeepSpeedCPUAdagrad",),
    "ops.adagrad.cpu_adagrad": (".ops: DeepSpeedCPUAdagrad",),
    "ops.adam": (".ops: DeepSpeedCPUAdam FusedAdam",),
    "ops.adam.cpu_adam": (".ops: DeepSpeedCPUAdam",),
    "ops.adam.fused_adam": (".ops: FusedAdam",),
    "ops.lamb": (".ops: FusedLamb",),
    "ops.lamb.fused_lamb": (".ops: FusedLamb",),
    "ops.lion": (".ops: DeepSpeedCPULion FusedLion",),
    "ops.lion.cpu_lion": (".ops: DeepSpeedCPULion",),
    "ops.lion.fused_lion": (".ops: FusedLion",),
    "ops.op_builder": (
        ".builders: ALL_OPS CPUAdagradBuilder CPUAdamBuilder CPULionBuilder CUDAOpBuilder FusedAdamBuilder "
        "FusedLionBuilder OpBuilder TorchCPUOpBuilder",
    ),
    "ops.op_builder.all_ops": (".builders: ALL_OPS",),
    "ops.op_builder.builder": (".builders: CUDAOpBuilder OpBuilder TorchCPUOpBuilder",),
    "profiling": (),
    "profiling.flops_profiler": (_PROFILER,),
    "profiling.flops_profiler.profiler": (_PROFILER,),
    "runtime": (),
    "runtime.activation_checkpointing": (),
    "runtime.activation_checkpointing.checkpointing": (),
    "runtime.base_optimizer": (".optimizer: DeepSpeedOptimizer ZeROOptimizer",),
    "runtime.bf16_optimizer": (".optimizer: BF16_Optimizer",),
    "runtime.config": (
        _CONFIG,
        _CONFIG_ERROR,
        ".config: ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER ADAM_W_MODE ADAM_W_MODE_DEFAULT "
        "DEEPSPEED_OPTIMIZERS LAMB_OPTIMIZER LION_OPTIMIZER MUADAMW_OPTIMIZER MUADAM_OPTIMIZER MUON_OPTIMIZER "
        "MUSGD_OPTIMIZER ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER TORCH_ADAM_PARAM ZERO_ONE_ADAM_OPTIMIZER "
        "DeepSpeedConfigModel get_bfloat16_config get_float16_config get_gradient_clipping get_log_level "
        "get_scalar_param",
    ),
    "runtime.config_utils": (".config: DeepSpeedConfigModel get_dict_param get_list_param get_scalar_param",),
    "runtime.constants": (),
    "runtime.dataloader": (".utils: RepeatingLoader",),
    "runtime.engine": (
        ".engine: DeepSpeedEngine",
        "builtins: DeepSpeedOptimizerCallable=object DeepSpeedSchedulerCallable=object",
    ),
    "runtime.fp16": (),
    "runtime.fp16.fused_optimizer": (".optimizer: FP16_Optimizer",),
    "runtime.fp16.unfused_optimizer": (".optimizer: FP16_UnfusedOptimizer",),
    "runtime.fp16.loss_scaler": ("wherry.update.loss_scale: DynamicLossScaler=LossScaler LossScaler",),
    "runtime.lr_schedules": (),
    "runtime.precision_config": (
        ".config: DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config",
    ),
    "runtime.comm": (),
    "runtime.comm.coalesced_collectives": (".runtime_utils: reduce_scatter_coalesced",),
    "runtime.compiler": (".nvtx: is_compiling",),
    "runtime.sequence_parallel": (),
    "runtime.sparse_tensor": (".sparse_tensor: SparseTensor",),
    "runtime.torch_autocast": (
        ".autocast: LOWER_PRECISION_SAFE_MODULES PARAM_COMM_DTYPE_ATTR_NAME get_comm_dtype has_comm_dtype",
    ),
    "runtime.sequence_parallel.ulysses_sp": (
        ".tiled: SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute",
    ),
    "runtime.swap_tensor": (".optimizer: MIN_SWAPPABLE_BYTES",),
    "runtime.utils": (
        ".runtime_utils: CheckOverflow DummyOptim PartitionedTensor call_to_str clip_grad_norm_ "
        "clip_tensors_by_global_norm count_used_parameters_in_backward empty_cache get_global_norm "
        "get_global_norm_of_tensors get_grad_norm get_weight_norm has_inf_or_nan is_model_parallel_parameter "
        "memory_status move_to_device noop_context partition_balanced partition_uniform prefix_sum_inc "
        "see_memory_usage set_random_seed torch_max_memory_reserved torch_memory_reserved",
        ".utils: required_torch_version",
    ),
    "runtime.zero": (*_ZERO, ".zero: unwrap_model_for_generation", _STATUS, _TILED),
    "runtime.zero.config": (
        ".config: DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
        "get_zero_config",
        ".zero: ZeroStageEnum",
    ),
    "runtime.zero.linear": (
        ".autocast: autocast_custom_bwd autocast_custom_fwd",
        "torch.nn: LinearModuleForZeroStage3=Linear",
        "torch.nn.functional: zero3_linear_wrap=linear",
    ),
    "runtime.zero.leaf_module_config": (
        ".leaf_modules: DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES "
        "DeepSpeedZeroLeafModuleConfig",
    ),
    "runtime.zero.mics": (".zero: MiCS_Init",),
    "runtime.zero.muon": (),
    "runtime.zero.muon.muon_optimizer": (".ops: MuonWithAuxAdam",),
    "runtime.zero.muon.original_muon": (".ops: MuonWithAuxAdam",),
    "runtime.zero.offload_config": (
        ".config: DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
        ".zero: OffloadDeviceEnum OffloadStateTypeEnum",
    ),
    "runtime.zero.offload_states": (".utils: get_state_devices",),
    "runtime.zero.parameter_offload": (".engine: DeepSpeedZeRoOffload=Hooked",),
    "runtime.zero.partition_parameters": (
        *_ZERO,
        _STATUS,
        ".autocast: get_allgather_dtype",
        ".parameters: MultipleAllGatherHandles PartitionedParamStatus ZeroParamType is_zero_param "
        "partitioned_param_data_shape",
        "torch: _orig_torch_arange=arange _orig_torch_empty=empty _orig_torch_eye=eye _orig_torch_full=full "
        "_orig_torch_ones=ones _orig_torch_randn=randn _orig_torch_tensor=tensor _orig_torch_zeros=zeros",
        "torch.nn.functional: zero3_linear_wrap=linear",
        ".zero: InsertPostInitMethodToModuleSubClasses=Init "
        "_contradicting_single_rank_pg_error=why_group_is_too_small restore_init_context "
        "shutdown_init_context zero_wrapper_for_fp_tensor_constructor",
        ".accelerator: get_accelerator",
    ),
    "runtime.zero.stage3": (
        ".profiling: estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live",
        ".optimizer: DeepSpeedZeroOptimizer_Stage3",
        ".runtime_utils: count_used_parameters_in_backward",
    ),
    "runtime.zero.stage_1_and_2": (
        ".profiling: estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live",
        ".optimizer: DeepSpeedZeroOptimizer",
        ".runtime_utils: count_used_parameters_in_backward",
    ),
    "runtime.zero.tiling": (_TILED,),
    "runtime.zero.utils": (".optimizer: ZeRORuntimeException", ".parameters: is_zero_param"),
    "utils": (
        _SAFE,
        _LEAVES,
        _LOGGER,
        ".comm: is_initialized",
        ".engine: OnDevice",
        ".comms_logging: get_caller_func",
        ".nvtx: instrument_w_nvtx",
        ".utils: RepeatingLoader log_dist log_dist_once set_log_level_from_string",
    ),
    "utils.comms_logging": (".comms_logging: CommsLogger calc_bw_log convert_size get_caller_func",),
    "utils.groups": (),
    "utils.init_on_device": (".engine: OnDevice",),
    "utils.logging": (
        ".utils: LoggerFactory get_current_level get_dist_msg get_log_level_from_string log_dist log_dist_once "
        "log_levels print_configuration print_dist print_json_dist set_log_level_from_string should_log_le "
        "warning_once",
        _LOGGER,
    ),
    "utils.numa": (".utils: parse_range_list",),
    "utils.nvtx": (),
    "utils.timer": (_TIMERS,),
    "utils.torch": (".utils: jit_script_compat register_grad_hook required_torch_version",),
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
    "runtime.constants": "wherry.compat.deepspeed.constants",
    "runtime.lr_schedules": "wherry.compat.deepspeed.schedules",
    "utils.groups": "wherry.compat.deepspeed.groups",
    "utils.nvtx": "wherry.compat.deepspeed.nvtx",
}

# Modules of which one of Wherry's answers for names that nobody has listed.
OPEN: Mapping[str, str] = {
    "comm": "wherry.compat.deepspeed.comm",
    "comm.comm": "wherry.compat.deepspeed.comm",
    "ops.op_builder": "wherry.compat.deepspeed.builders",
    "ops.op_builder.all_ops": "wherry.compat.deepspeed.builders",
    "ops.op_builder.builder": "wherry.compat.deepspeed.builders",
}

ABSENT_NAMES: Mapping[str, str] = {
    "DeepSpeedHybridEngine": "use wherry.gathered(engine.module) to generate",
    "DeepSpeedInferenceConfig": "serve the exported weights",
    "DeepSpeedTransformerConfig": "use the model's own library",
    "DeepSpeedTransformerLayer": "use the model's own library",
    "InferenceEngine": "serve the exported weights with an inference server",
    "PipelineEngine": "use torch.distributed.pipelining around the engine",
    "PipelineModule": "use torch.distributed.pipelining around the engine",
    "default_inference_config": "serve the exported weights with an inference server",
    "init_inference": "serve the exported weights with an inference server",
    "ops.adam.ZenFlowSelectiveAdamW": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    "ops.adam.ZenFlowSelectiveAdamW_stage3": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    **dict.fromkeys(
        [
            f"runtime.zero.muon.original_muon.{name}"
            for name in (
                *("Muon", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam", "adam_update", "muon_update"),
                *("zeropower_via_gram_newtonschulz", "zeropower_via_newtonschulz5"),
            )
        ],
        "use MuonWithAuxAdam, or torch.optim.Muon",
    ),
    "replace_transformer_layer": "use the model's own library",
    "revert_transformer_layer": "use the model's own library",
    **dict.fromkeys(
        [f"runtime.comm.coalesced_collectives.all_to_all_{kind}quant_reduce" for kind in ("", "loco_")],
        "communication is not quantized; use reduce_scatter_coalesced",
    ),
    **dict.fromkeys(
        [
            f"runtime.sequence_parallel.ulysses_sp.{name}"
            for name in ("UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "UlyssesSPFwdLossBwdWithLogits")
        ],
        "set wherry.context_parallel, and give its ranks whole rows",
    ),
    **dict.fromkeys(
        [f"runtime.sequence_parallel.ulysses_sp.{name}" for name in ("AutogradComputeMLP", "TiledLoss")],
        "use TiledMLP, or TiledFusedLogitsLoss",
    ),
    "set_autotp_mode": "use torch's parallelize_module and give initialize the mesh",
    "tp_model_init": "use torch's parallelize_module and give initialize the mesh",
}

ABSENT_MODULES: Mapping[str, str] = {
    **dict.fromkeys(
        [f"accelerator.{kind}_accelerator" for kind in ("hpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu")],
        "torch's accelerator is used: see get_accelerator",
    ),
    "autotuning": "use `wherry plan`",
    "checkpoint.deepspeed_checkpoint": "see `wherry inspect`, and `wherry import-deepspeed` for those of DeepSpeed's",
    "checkpoint.universal_checkpoint": "any checkpoint is loaded by any number of ranks as it is",
    **dict.fromkeys(
        [f"comm.{backend}" for backend in ("backend", "ccl", "mori", "torch")],
        "torch.distributed communicates by its own backends",
    ),
    "comm.config": "set comms_logger in the config, or call deepspeed.comm.configure",
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
    "nvme": "see `wherry bench disk`",
    "nebula": "checkpoints are written by the ranks",
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
    "runtime.comm.compressed": "communication is not compressed",
    "runtime.comm.hccl": "communication is not compressed",
    "runtime.comm.mpi": "communication is not compressed",
    "runtime.comm.nccl": "communication is not compressed",
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
    "runtime.state_dict_factory": "see `wherry import-deepspeed`",
    "runtime.sequence_parallel.parallel_state_sp": "set wherry.context_parallel, and give its ranks whole rows",
    "runtime.superoffload": "the exact update policies overlap instead",
    "runtime.swap_tensor": "the disk tier serves the engine",
    "runtime.tensor_parallel": "use torch's parallelize_module for tensor parallelism",
    "runtime.weight_quantizer": "training is not quantized",
    "runtime.zenflow": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    "runtime.zero.contiguous_memory_allocator": "the engine's buffers are its own",
    "runtime.zero.partitioned_param_coordinator": "gathers are the engine's own",
    "runtime.zero.partitioned_param_profiler": "gathers are the engine's own",
    "sequence": "set wherry.context_parallel, and give its ranks whole rows",
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
