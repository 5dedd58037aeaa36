from wherry.compat.deepspeed.engine import DeepSpeedConfig
from wherry.errors import ConfigError as DeepSpeedConfigError
