from wherry.compat.deepspeed.estimators import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from wherry.update.optimizer import ShardedOptimizer as DeepSpeedZeroOptimizer_Stage3
