from wherry.compat.deepspeed.estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from wherry.update.optimizer import ShardedOptimizer as DeepSpeedZeroOptimizer
