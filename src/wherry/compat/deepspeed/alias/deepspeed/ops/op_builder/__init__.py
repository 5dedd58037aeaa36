from wherry.compat.deepspeed.builders import *
from wherry.compat.deepspeed.builders import __getattr__
