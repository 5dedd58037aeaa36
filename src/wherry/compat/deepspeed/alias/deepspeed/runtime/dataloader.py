from wherry.compat.deepspeed.utilities import RepeatingLoader
