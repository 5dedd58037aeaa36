from wherry.compat.deepspeed.accelerator import *
from wherry.compat.deepspeed.accelerator import Accelerator as DeepSpeedAccelerator
