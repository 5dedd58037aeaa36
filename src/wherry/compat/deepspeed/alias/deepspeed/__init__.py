"""Wherry, under the names that scripts written for DeepSpeed import. This is not DeepSpeed."""

import importlib as _importlib

from wherry import __version__ as _wherry_version
from wherry.compat.deepspeed import VERSION as __version__
from wherry.compat.deepspeed import find_absent as _find_absent
from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.comm import init_distributed
from wherry.compat.deepspeed.engine import (
    DeepSpeedConfig,
    DeepSpeedEngine,
    OnDevice,
    add_config_arguments,
    initialize,
)
from wherry.compat.deepspeed.parts import absent as _absent
from wherry.errors import ConfigError as DeepSpeedConfigError
from wherry.observe.log import is_rank_zero as _is_rank_zero
from wherry.observe.log import logger
from wherry.observe.log import show_unless_shown as _show_unless_shown

_find_absent()
# Scripts log with DeepSpeed's logger, whose lines are seen without more ado.
_show_unless_shown()

from deepspeed import accelerator, checkpoint, comm, ops, runtime, utils
from deepspeed.runtime import zero
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import log_dist

dist = comm
version = __version__
__version_major__, __version_minor__, __version_patch__ = 0, 19, 6
__git_hash__ = __git_branch__ = None
DeepSpeedHybridEngine = _absent("deepspeed.DeepSpeedHybridEngine", "use wherry.gathered(engine.module) to generate")
DeepSpeedInferenceConfig = _absent("deepspeed.DeepSpeedInferenceConfig", "serve the exported weights")
DeepSpeedTransformerConfig = _absent("deepspeed.DeepSpeedTransformerConfig", "use the model's own library")
DeepSpeedTransformerLayer = _absent("deepspeed.DeepSpeedTransformerLayer", "use the model's own library")
InferenceEngine = _absent("deepspeed.InferenceEngine", "serve the exported weights with an inference server")
PipelineEngine = _absent("deepspeed.PipelineEngine", "use torch.distributed.pipelining around the engine")
PipelineModule = _absent("deepspeed.PipelineModule", "use torch.distributed.pipelining around the engine")
init_inference = _absent("deepspeed.init_inference", "serve the exported weights with an inference server")
tp_model_init = _absent("deepspeed.tp_model_init", "use torch's parallelize_module and give initialize the mesh")

if _is_rank_zero():
    # A warning, so that it is seen where nobody has set up logging: one engine stands in for another.
    logger.warning("import deepspeed gives Wherry %s here (it answers to version %s)", _wherry_version, __version__)


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return _importlib.import_module(f"deepspeed.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module 'deepspeed' has no attribute {name!r} in Wherry's alias") from None
