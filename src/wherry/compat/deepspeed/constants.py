"""`deepspeed.runtime.constants`: keys of a config and their defaults, as variables that scripts import."""

from __future__ import annotations

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"

TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_BATCH_SIZE_DEFAULT = None
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT = None
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
GRADIENT_ACCUMULATION_STEPS_DEFAULT = None
MANAGED_GRADIENT_ACCUMULATION = "managed_gradient_accumulation"
MANAGED_GRADIENT_ACCUMULATION_DEFAULT = True

OPTIMIZER, OPTIMIZER_PARAMS, TYPE = "optimizer", "params", "type"
OPTIMIZER_TYPE_DEFAULT = None
LEGACY_FUSION, LEGACY_FUSION_DEFAULT = "legacy_fusion", False
SCHEDULER, SCHEDULER_PARAMS = "scheduler", "params"
SCHEDULER_TYPE_DEFAULT = None
MAX_GRAD_NORM = "max_grad_norm"
ZERO_ALLOW_UNTESTED_OPTIMIZER, ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT = "zero_allow_untested_optimizer", False
ZERO_FORCE_DS_CPU_OPTIMIZER, ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT = "zero_force_ds_cpu_optimizer", True

# Of the monitors, where their blocks give none.
JOB_NAME_DEFAULT, WANDB_PROJECT_DEFAULT = "DeepSpeedJobName", "deepspeed"

GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT = "gradient_clipping", 1.0
PRESCALE_GRADIENTS, PRESCALE_GRADIENTS_DEFAULT = "prescale_gradients", False
GRADIENT_PREDIVIDE_FACTOR, GRADIENT_PREDIVIDE_FACTOR_DEFAULT = "gradient_predivide_factor", 1.0
GRADIENT_ALLREDUCE_OP = "gradient_allreduce_op"
GRADIENT_ALLREDUCE_OP_MEAN, GRADIENT_ALLREDUCE_OP_SUM = "mean", "sum"
GRADIENT_ALLREDUCE_OP_DEFAULT = GRADIENT_ALLREDUCE_OP_MEAN
GRADIENT_ALLREDUCE_OP_SUPPORTED = (GRADIENT_ALLREDUCE_OP_MEAN, GRADIENT_ALLREDUCE_OP_SUM)
COMMUNICATION_DATA_TYPE = "communication_data_type"
COMMUNICATION_DATA_TYPE_DEFAULT = None
SPARSE_GRADIENTS, SPARSE_GRADIENTS_DEFAULT = "sparse_gradients", False
DISABLE_ALLGATHER, DISABLE_ALLGATHER_DEFAULT = "disable_allgather", False

AMP, AMP_ENABLED, AMP_ENABLED_DEFAULT = "amp", "enabled", False
TORCH_AUTOCAST, TORCH_AUTOCAST_ENABLED, TORCH_AUTOCAST_ENABLED_DEFAULT = "torch_autocast", "enabled", False
TORCH_AUTOCAST_DTYPE = "dtype"
TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES = "lower_precision_safe_modules"
CHECK_OVERFLOW = "check_overflow"
DATA_TYPES = "data_types"
GRAD_ACCUM_DTYPE, PARAM_DTYPE, BUFFER_DTYPE = "grad_accum_dtype", "param_dtype", "buffer_dtype"
GRAD_ACCUM_DTYPE_DEFAULT = PARAM_DTYPE_DEFAULT = BUFFER_DTYPE_DEFAULT = None

STEPS_PER_PRINT = "steps_per_print"
STEPS_PER_PRINT_DEFAULT = None
DUMP_STATE, DUMP_STATE_DEFAULT = "dump_state", False
WALL_CLOCK_BREAKDOWN, WALL_CLOCK_BREAKDOWN_DEFAULT = "wall_clock_breakdown", False
MEMORY_BREAKDOWN, MEMORY_BREAKDOWN_DEFAULT = "memory_breakdown", False
LOG_LEVEL = "log_level"
LOG_LEVEL_DEFAULT = None
VOCABULARY_SIZE = "vocabulary_size"
VOCABULARY_SIZE_DEFAULT = None
DATALOADER_DROP_LAST, DATALOADER_DROP_LAST_DEFAULT = "dataloader_drop_last", False

PROGRESSIVE_LAYER_DROP, PLD_ENABLED, PLD_ENABLED_DEFAULT = "progressive_layer_drop", "enabled", False
PLD_THETA, PLD_THETA_DEFAULT, PLD_GAMMA, PLD_GAMMA_DEFAULT = "theta", 1.0, "gamma", 0.001


class ValidationMode:
    """What to do when ranks disagree about the tag of a checkpoint."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


CHECKPOINT, CHECKPOINT_TAG_VALIDATION = "checkpoint", "tag_validation"
CHECKPOINT_TAG_VALIDATION_DEFAULT = ValidationMode.WARN
CHECKPOINT_TAG_VALIDATION_MODES = [ValidationMode.WARN, ValidationMode.IGNORE, ValidationMode.FAIL]
LOAD_UNIVERSAL_CHECKPOINT, LOAD_UNIVERSAL_CHECKPOINT_DEFAULT = "load_universal", False
USE_NODE_LOCAL_STORAGE_CHECKPOINT, USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT = "use_node_local_storage", False

PIPE_REPLICATED = "ds_pipe_replicated"
DATA_PARALLEL_GROUP, GLOBAL_RANK = "data_parallel_group", "global_rank"
