import sys

from wherry.compat.deepspeed import groups

# Scripts set this module's variable `mpu`: it is the module itself, under another name.
sys.modules[__name__] = groups
