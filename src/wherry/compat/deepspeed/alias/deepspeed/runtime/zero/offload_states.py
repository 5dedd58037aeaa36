from wherry.compat.deepspeed.utilities import get_state_devices
