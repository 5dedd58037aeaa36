from wherry.compat.deepspeed.optimizers import DeepSpeedCPUAdagrad
