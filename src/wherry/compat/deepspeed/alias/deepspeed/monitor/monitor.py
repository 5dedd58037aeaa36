from wherry.compat.deepspeed.monitor import MonitorMaster
