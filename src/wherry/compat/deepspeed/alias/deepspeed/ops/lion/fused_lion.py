from wherry.compat.deepspeed.optimizers import FusedLion
