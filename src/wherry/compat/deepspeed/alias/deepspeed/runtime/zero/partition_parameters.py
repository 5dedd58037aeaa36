from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    ZeroParamStatus,
    register_external_parameter,
    restore_init_context,
    shutdown_init_context,
    unregister_external_parameter,
    zero_wrapper_for_fp_tensor_constructor,
)
from wherry.compat.deepspeed.zero import orig_torch_arange as _orig_torch_arange

InsertPostInitMethodToModuleSubClasses = Init
