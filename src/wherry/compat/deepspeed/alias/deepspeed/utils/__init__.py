from deepspeed.utils import groups, logging
from wherry.compat.deepspeed.comm import is_initialized
from wherry.compat.deepspeed.engine import OnDevice
from wherry.compat.deepspeed.tensors import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from wherry.compat.deepspeed.utilities import (
    RepeatingLoader,
    get_z3_leaf_modules,
    instrument_w_nvtx,
    log_dist,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    unset_z3_leaf_modules_by_name,
    unset_z3_leaf_modules_by_suffix,
    z3_leaf_module,
    z3_leaf_parameter,
)
from wherry.observe.log import logger
