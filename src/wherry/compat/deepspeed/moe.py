"""`deepspeed.moe.utils`, for models without DeepSpeed's experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wherry.compat.deepspeed import not_part_of_wherry


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the groups unchanged, as a list; refuse weights that DeepSpeed's expert layer has marked."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(getattr(parameter, "allreduce", True) is False for group in groups for parameter in group["params"]):
        raise not_part_of_wherry("a group of experts", "experts of the model's own library train as they are")
    return groups
