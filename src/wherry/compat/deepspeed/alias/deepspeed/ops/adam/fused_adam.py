from wherry.compat.deepspeed.optimizers import FusedAdam
