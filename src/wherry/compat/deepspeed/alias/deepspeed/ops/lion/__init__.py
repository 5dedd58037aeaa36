from wherry.compat.deepspeed.optimizers import DeepSpeedCPULion, FusedLion
