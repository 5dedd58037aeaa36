from wherry.compat.deepspeed.monitor import get_monitor_config
