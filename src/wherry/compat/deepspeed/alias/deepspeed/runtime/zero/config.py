import enum

from wherry.config.blocks import ZeroOptimization as DeepSpeedZeroConfig


class ZeroStageEnum(enum.IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
