import sys

from wherry.compat.deepspeed import checkpointing

# Scripts set and read this module's variables: it is the module itself, under another name.
sys.modules[__name__] = checkpointing
