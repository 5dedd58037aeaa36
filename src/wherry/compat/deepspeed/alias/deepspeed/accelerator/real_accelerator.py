from wherry.compat.deepspeed.accelerator import *
