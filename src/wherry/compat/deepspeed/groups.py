"""`deepspeed.utils.groups`: who shares what with whom. Without an `mpu`, the one group is that of all ranks.

The `mpu` is the one that `initialize` was given, or that a script has set here, as Megatron-style code does.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from wherry.compat.deepspeed import absent, comm, not_part_of_wherry
from wherry.compat.deepspeed.parameters import live_engines

mpu: Any = None

_DATA = ("data_parallel",)
_MODEL = ("model_parallel", "tensor_model_parallel")
_SEQUENCE = ("sequence_parallel",)
_EXPERTS = "experts of the model's own library train as they are"


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Older scripts call it before `deepspeed.initialize`, with the size of groups of experts."""
    if ep_size != 1:
        raise not_part_of_wherry(f"utils.groups.initialize(ep_size={ep_size})", _EXPERTS)
    globals()["mpu"] = mpu


def _mpu() -> Any:
    if mpu is not None:
        return mpu
    return next((engine.mpu for engine in live_engines() if getattr(engine, "mpu", None) is not None), None)


def _ask(axes: tuple[str, ...], what: str, otherwise: Any) -> Any:
    """What the `mpu` answers for the first of these axes that it knows."""
    asked = _mpu()
    for axis in axes:
        answer = getattr(asked, f"get_{axis}_{what}", None)
        if answer is not None:
            return answer()
    return otherwise


def _get_data_parallel_world_size() -> int:
    return int(_ask(_DATA, "world_size", comm.get_world_size()))


def _get_data_parallel_rank() -> int:
    return int(_ask(_DATA, "rank", comm.get_rank()))


def _get_data_parallel_group() -> Any:
    return _ask(_DATA, "group", dist.group.WORLD)


def _get_model_parallel_world_size() -> int:
    return int(_ask(_MODEL, "world_size", 1))


def _get_model_parallel_rank() -> int:
    return int(_ask(_MODEL, "rank", 0))


def _get_model_parallel_group() -> Any:
    return _ask(_MODEL, "group", None)


def _get_sequence_parallel_world_size() -> int:
    return int(_ask(_SEQUENCE, "world_size", 1))


def _get_sequence_parallel_rank() -> int:
    return int(_ask(_SEQUENCE, "rank", 0))


def _get_sequence_parallel_group() -> Any:
    return _ask(_SEQUENCE, "group", None)


# No sequence is shared out by the engine: who shares the data shares whole samples.
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank
_get_sequence_data_parallel_group = _get_data_parallel_group


def _get_broadcast_src_rank() -> int:
    """The first rank of those that share the data."""
    group = _get_data_parallel_group()
    return dist.get_global_rank(group, 0) if group is not None and dist.is_initialized() else 0


_get_data_parallel_src_rank = _get_broadcast_src_rank


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Groups of experts by name: there are none."""
    return {}


_get_expert_data_parallel_group_dict = _get_expert_parallel_group_dict


def __getattr__(name: str) -> Any:
    if "expert" in name:
        return absent(f"deepspeed.utils.groups.{name}", _EXPERTS)
    raise AttributeError(f"module 'deepspeed.utils.groups' has no attribute {name!r} in Wherry's alias")
