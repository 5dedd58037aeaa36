from wherry.compat.deepspeed.optimizers import DeepSpeedCPUAdam
