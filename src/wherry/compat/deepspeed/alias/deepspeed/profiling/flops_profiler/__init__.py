from wherry.compat.deepspeed.profiler import FlopsProfiler, get_model_profile
