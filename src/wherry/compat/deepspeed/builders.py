"""`deepspeed.ops.op_builder`: name DeepSpeed's operations, of which Wherry has those of the optimizers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from wherry.compat.deepspeed import not_part_of_wherry, unlisted

# DeepSpeed's builders, each with the name of its operation.
_BUILDERS = """
AsyncIOBuilder=async_io CCLCommBuilder=deepspeed_ccl_comm CPUAdagradBuilder=cpu_adagrad CPUAdamBuilder=cpu_adam
CPULionBuilder=cpu_lion DeepCompileBuilder=dc EvoformerAttnBuilder=evoformer_attn FPQuantizerBuilder=fp_quantizer
FlashAttentionBuilder=flash_attn FusedAdamBuilder=fused_adam FusedLambBuilder=fused_lamb FusedLionBuilder=fused_lion
GDSBuilder=gds InferenceBuilder=transformer_inference InferenceCoreBuilder=inference_core_ops
InferenceCutlassBuilder=cutlass_ops NotImplementedBuilder=deepspeed_not_implemented PackbitsBuilder=pack_bits
PinMemoryBuilder=pin_memory QuantizerBuilder=quantizer RaggedOpsBuilder=ragged_device_ops RaggedUtilsBuilder=ragged_ops
RandomLTDBuilder=random_ltd ShareMemCommBuilder=deepspeed_shm_comm SparseAttnBuilder=sparse_attn
SpatialInferenceBuilder=spatial_inference StochasticTransformerBuilder=stochastic_transformer
TransformerBuilder=transformer UtilsBuilder=utils
"""
OPERATIONS: dict[str, str] = dict(pair.split("=") for pair in _BUILDERS.split())
_COMPILED = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion")
COMPATIBLE_OPS = dict.fromkeys(OPERATIONS.values(), False) | dict.fromkeys(_COMPILED, True)


class OpBuilder:
    """A builder of one operation."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return COMPATIBLE_OPS.get(self.NAME, False)

    def load(self, verbose: bool = False) -> Any:
        instead = "kernels are compiled at install and called by the optimizers themselves"
        raise not_part_of_wherry(f"{type(self).__name__}().load()", instead)

    @staticmethod
    def is_rocm_pytorch() -> bool:
        return torch.version.hip is not None


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the builder of an operation."""
    if name in OPERATIONS:
        return type(name, (OpBuilder,), {"NAME": OPERATIONS[name], "__module__": __name__})
    return unlisted("ops.op_builder", name)
