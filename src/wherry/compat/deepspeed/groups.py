"""`deepspeed.utils.groups`: who shares what with whom. Without an `mpu`, the one group is that of all ranks.

The `mpu` is the one that `initialize` was given, or that a script has set here, as Megatron-style code does. Scripts
ask `_get_data_parallel_world_size()` and the like, for the axes and the questions of the two tables below.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from wherry.compat.deepspeed import absent, comm, not_part_of_wherry
from wherry.compat.deepspeed.parameters import live_engines

mpu: Any = None

# What the axes are called by those who know them.
_AXES = {
    "data_parallel": ("data_parallel",),
    "model_parallel": ("model_parallel", "tensor_model_parallel"),
    "sequence_parallel": ("sequence_parallel",),
    # No sequence is shared out by the engine: who shares the data shares whole samples.
    "sequence_data_parallel": ("data_parallel",),
}
_DATA_ALONE: dict[str, Callable[[], Any]] = {
    "world_size": comm.get_world_size,
    "rank": comm.get_rank,
    "group": lambda: dist.group.WORLD,
}
_ALONE: dict[str, Callable[[], Any]] = {"world_size": lambda: 1, "rank": lambda: 0, "group": lambda: None}
_QUESTION = re.compile(rf"_get_({'|'.join(_AXES)})_({'|'.join(_ALONE)})")
_EXPERTS = "experts of the model's own library train as they are"


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Older scripts call it before `deepspeed.initialize`, with the size of groups of experts."""
    if ep_size != 1:
        raise not_part_of_wherry(f"utils.groups.initialize(ep_size={ep_size})", _EXPERTS)
    globals()["mpu"] = mpu


def _ask(axis: str, what: str) -> Any:
    """What the `mpu` answers for the first name of this axis that it knows."""
    known = mpu or next((engine.mpu for engine in live_engines() if getattr(engine, "mpu", None) is not None), None)
    for name in _AXES[axis]:
        answer = getattr(known, f"get_{name}_{what}", None)
        if answer is not None:
            return answer()
    return (_DATA_ALONE if "data_parallel" in _AXES[axis] else _ALONE)[what]()


def _get_broadcast_src_rank() -> int:
    """The first rank of those that share the data."""
    group = _ask("data_parallel", "group")
    return dist.get_global_rank(group, 0) if group is not None and dist.is_initialized() else 0


_get_data_parallel_src_rank = _get_broadcast_src_rank


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Groups of experts by name: there are none."""
    return {}


_get_expert_data_parallel_group_dict = _get_expert_parallel_group_dict


def __getattr__(name: str) -> Any:
    if question := _QUESTION.fullmatch(name):
        return functools.partial(_ask, *question.groups())
    if "expert" in name:
        return absent(f"deepspeed.utils.groups.{name}", _EXPERTS)
    raise AttributeError(f"module 'deepspeed.utils.groups' has no attribute {name!r} in Wherry's alias")
