from wherry.compat.deepspeed.zero import MiCS_Init
