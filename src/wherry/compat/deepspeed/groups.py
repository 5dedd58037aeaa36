"""`deepspeed.utils.groups`: ranks that share data, a model or a sequence. Without an `mpu`, all ranks share the data.

The `mpu` is that of `initialize`, or one that a script has set here, as Megatron-style code does. Scripts call
`_get_data_parallel_world_size()` and the like: each axis of `_AXES` with each question of `_ALONE`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from wherry.compat.deepspeed import comm, not_part_of_wherry, unlisted
from wherry.compat.deepspeed.parameters import live_engines

mpu: Any = None

# The names of an axis in an `mpu`.
_AXES = {
    "data_parallel": ("data_parallel",),
    "model_parallel": ("model_parallel", "tensor_model_parallel"),
    "sequence_parallel": ("sequence_parallel",),
}
_DATA_ALONE: dict[str, Callable[[], Any]] = {
    "world_size": comm.get_world_size,
    "rank": comm.get_rank,
    "group": lambda: dist.group.WORLD,
}
_ALONE: dict[str, Callable[[], Any]] = {"world_size": lambda: 1, "rank": lambda: 0, "group": lambda: None}
_QUESTION = re.compile(rf"_get_({'|'.join(_AXES)})_({'|'.join(_ALONE)})")


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Set the `mpu`; older scripts call it before `deepspeed.initialize`, with the size of groups of experts."""
    if ep_size != 1:
        raise not_part_of_wherry(
            f"utils.groups.initialize(ep_size={ep_size})", "experts of the model's own library train as they are"
        )
    globals()["mpu"] = mpu


def _ask(axis: str, question: str) -> Any:
    """Call the `mpu` by the first name of this axis that it has."""
    known = mpu or next((engine.mpu for engine in live_engines() if getattr(engine, "mpu", None) is not None), None)
    for name in _AXES[axis]:
        answer = getattr(known, f"get_{name}_{question}", None)
        if answer is not None:
            return answer()
    return (_DATA_ALONE if axis == "data_parallel" else _ALONE)[question]()


def __getattr__(name: str) -> Any:
    if question := _QUESTION.fullmatch(name):
        return functools.partial(_ask, *question.groups())
    return unlisted("utils.groups", name)
