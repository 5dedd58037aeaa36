"""`deepspeed.ops.op_builder`: which operations there are. Nothing is built at first use."""

from __future__ import annotations

import functools
from typing import Any

from wherry.compat.deepspeed import not_part_of_wherry

# DeepSpeed's operations, by the name of their builders.
OPERATIONS = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FlashAttentionBuilder": "flash_attn",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "NotImplementedBuilder": "deepspeed_not_implemented",
    "PackbitsBuilder": "pack_bits",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SparseAttnBuilder": "sparse_attn",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
# Those of the optimizers, compiled when Wherry was installed.
_THERE = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion")
COMPATIBLE_OPS = dict.fromkeys(OPERATIONS.values(), False) | dict.fromkeys(_THERE, True)
_COMPILED = "kernels are compiled at install and called by the optimizers themselves"


class OpBuilder:
    """Says whether there is an operation. A script may derive builders of its own from it, and name them only."""

    NAME = ""
    BUILD_VAR = ""

    def __init__(self, name: str = "") -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        return COMPATIBLE_OPS.get(self.NAME, False)

    builder_available = is_compatible

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def load(self, verbose: bool = False) -> Any:
        raise not_part_of_wherry(f"{type(self).__name__}().load()", _COMPILED)


CUDAOpBuilder = TorchCPUOpBuilder = OpBuilder


@functools.cache
def __getattr__(name: str) -> Any:
    """The builder of any operation."""
    if name == "ALL_OPS":
        return {operation: __getattr__(builder)() for builder, operation in OPERATIONS.items()}
    if name in OPERATIONS:
        return type(name, (OpBuilder,), {"NAME": OPERATIONS[name], "__module__": __name__})
    raise AttributeError(f"module 'deepspeed.ops.op_builder' has no attribute {name!r} in Wherry's alias")
