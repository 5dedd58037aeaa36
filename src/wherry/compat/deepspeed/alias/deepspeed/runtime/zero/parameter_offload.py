from wherry.compat.deepspeed.engine import Hooked as DeepSpeedZeRoOffload
