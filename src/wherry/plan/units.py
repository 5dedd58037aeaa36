"""From a model to the sizes that the memory model counts with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wherry.plan.memory import UnitSizes
from wherry.sharding.grouping import UnitPlan, plan_units


def unit_sizes(model: nn.Module, unit_classes: Sequence[str] = ()) -> list[UnitSizes]:
    """The units that the engine would cut `model` into, by size. A model on the meta device costs no memory.

    Integer parameters stay outside the units, as in the engine.
    """
    return sizes_of(plan_units(model, unit_classes))


def sizes_of(plans: Sequence[UnitPlan]) -> list[UnitSizes]:
    sizes = []
    for plan in plans:
        floating = [parameter for _, parameter in plan.parameters if parameter.is_floating_point()]
        sizes.append(
            UnitSizes(
                plan.name,
                trained=tuple(p.numel() for p in floating if p.requires_grad),
                frozen=tuple(p.numel() for p in floating if not p.requires_grad),
                root=plan.root,
            )
        )
    return sizes
