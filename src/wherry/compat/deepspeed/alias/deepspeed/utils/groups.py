from wherry.compat.deepspeed.utilities import (
    _get_data_parallel_group,
    _get_data_parallel_rank,
    _get_data_parallel_world_size,
)
from wherry.compat.deepspeed.utilities import no_group as _get_expert_parallel_group_dict
from wherry.compat.deepspeed.utilities import no_group as _get_model_parallel_group
from wherry.compat.deepspeed.utilities import no_group as _get_sequence_parallel_group
from wherry.compat.deepspeed.utilities import one as _get_model_parallel_world_size
from wherry.compat.deepspeed.utilities import one as _get_sequence_parallel_world_size
from wherry.compat.deepspeed.utilities import zero as _get_model_parallel_rank
from wherry.compat.deepspeed.utilities import zero as _get_sequence_parallel_rank

mpu = None
