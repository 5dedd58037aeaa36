from wherry.compat.deepspeed.engine import DeepSpeedEngine

DeepSpeedOptimizerCallable = DeepSpeedSchedulerCallable = object
