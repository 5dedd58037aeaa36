from wherry.compat.deepspeed.comm import *
from wherry.compat.deepspeed.comm import __getattr__
