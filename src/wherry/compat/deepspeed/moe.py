"""`deepspeed.moe.utils`, of models without DeepSpeed's experts: the functions that scripts call of any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from wherry.compat.deepspeed import not_part_of_wherry


def is_moe_param(param: Any) -> bool:
    """Whether this is a weight of one of DeepSpeed's experts, which their layer marks."""
    return getattr(param, "allreduce", True) is False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """No layer is one of DeepSpeed's, of which there are none here."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups as they are; those with experts would be split."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise not_part_of_wherry("a group of experts", "experts of the model's own library train as they are")
    return groups
