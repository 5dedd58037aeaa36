from wherry.compat.deepspeed.tensors import *
