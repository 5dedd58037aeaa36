from wherry.compat.deepspeed.engine import OnDevice
