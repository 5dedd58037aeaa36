from wherry.compat.deepspeed.utilities import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    unset_z3_leaf_modules_by_name,
    unset_z3_leaf_modules_by_suffix,
    z3_leaf_module,
    z3_leaf_parameter,
)
