from deepspeed.runtime import activation_checkpointing, base_optimizer, config, engine, lr_schedules, utils, zero
