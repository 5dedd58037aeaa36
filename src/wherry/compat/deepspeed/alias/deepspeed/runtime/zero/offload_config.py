import enum

from wherry.config.blocks import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from wherry.config.blocks import OffloadParam as DeepSpeedZeroOffloadParamConfig


class OffloadDeviceEnum(enum.StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
