from deepspeed.runtime.zero import (
    config,
    offload_config,
    offload_states,
    parameter_offload,
    partition_parameters,
    stage3,
    stage_1_and_2,
)


def __getattr__(name: str) -> object:
    if name not in ("TiledLinear", "TiledLinearReturnBias"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepspeed.runtime.zero import tiling

    return getattr(tiling, name)


from wherry.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
