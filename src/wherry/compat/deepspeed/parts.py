"""What DeepSpeed has and Wherry has not: importable where scripts import it unconditionally, refused when used."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from wherry.errors import WherryError


class NotPartOfWherry(WherryError, NotImplementedError):
    """A name of DeepSpeed's that has no counterpart here was used."""


def not_part_of_wherry(name: str, instead: str) -> NotPartOfWherry:
    return NotPartOfWherry(f"{name} is not part of Wherry; {instead}")


class _Refuses(type):
    """A class that can be named, imported, subclassed and compared with; making one, or reaching into it, refuses."""

    _instead: str
    _path: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_part_of_wherry(cls._path, cls._instead)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_part_of_wherry(f"{cls._path}.{name}", cls._instead)


def absent(path: str, instead: str) -> Any:
    """Stands where DeepSpeed has a class or a function."""
    return _Refuses(path.rpartition(".")[2], (), {"_path": path, "_instead": instead, "__module__": "deepspeed"})


class AbsentModule(ModuleType):
    """A module of parts that are not here. Any name of it can be imported."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(name, f"Not part of Wherry: {instead}.")
        self.__path__: list[str] = []
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        stand_in = absent(f"{self.__name__}.{name}", self._instead)
        setattr(self, name, stand_in)
        return stand_in


ABSENT_MODULES: Mapping[str, str] = {
    "autotuning": "use `wherry plan`",
    "checkpoint.deepspeed_checkpoint": "see `wherry inspect`, and `wherry import-deepspeed` for those of DeepSpeed's",
    "checkpoint.ds_to_universal": "any checkpoint is loaded by any number of ranks as it is",
    "checkpoint.universal_checkpoint": "any checkpoint is loaded by any number of ranks as it is",
    "compression": "training is not compressed",
    "elasticity": "any checkpoint resumes on any number of ranks; give the batch sizes themselves",
    "inference": "serve the exported weights with an inference server",
    "linear": "use PEFT's LoRA",
    "model_implementations": "use the model's own library",
    "module_inject": "use torch's parallelize_module for tensor parallelism",
    "moe": "experts of the model's own library train as they are",
    "nebula": "checkpoints are written by the ranks",
    "ops.aio": "Wherry's disk tier serves the engine; see `wherry bench disk`",
    "ops.deepspeed4science": "use attention of the model's own library",
    "ops.fp_quantizer": "training is not quantized",
    "ops.lamb": "it needs the norm of each whole parameter; use AdamW",
    "ops.muon": "it needs whole matrices; use AdamW",
    "ops.quantizer": "training is not quantized",
    "ops.random_ltd": "build it into the model",
    "ops.sparse_attention": "use attention of the model's own library",
    "ops.spatial": "use the model's own library",
    "ops.transformer": "use attention of the model's own library, or torch.compile",
    "pipe": "use torch.distributed.pipelining around the engine",
    "profiling.config": "set flops_profiler in the config",
    "runtime.compression": "communication is not compressed",
    "runtime.data_pipeline": "build it into the data loader",
    "runtime.domino": "use torch's parallelize_module for tensor parallelism",
    "runtime.eigenvalue": "training is not compressed",
    "runtime.fp16.onebit": "communication is not compressed; use AdamW",
    "runtime.hybrid_engine": "use wherry.gathered(engine.module) around generation",
    "runtime.pipe": "use torch.distributed.pipelining around the engine",
    "runtime.progressive_layer_drop": "build it into the model",
    "runtime.quantize": "training is not quantized",
    "runtime.sequence_parallel": "use torch's context parallelism around the engine",
    "runtime.superoffload": "the exact update policies overlap instead",
    "runtime.swap_tensor": "the disk tier serves the engine",
    "runtime.tensor_parallel": "use torch's parallelize_module for tensor parallelism",
    "runtime.weight_quantizer": "training is not quantized",
    "runtime.zenflow": 'for a delayed update see "wherry": {"update_policy": "delayed"}',
    "sequence": "use torch's context parallelism around the engine",
}
"""Modules, below `deepspeed`, and what to do instead."""
