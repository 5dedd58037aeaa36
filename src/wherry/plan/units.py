"""From a model to the sizes that the memory model counts with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from wherry.parallel.partition import is_dtensor, local
from wherry.plan.memory import UnitSizes
from wherry.sharding.grouping import UnitPlan, plan_units


def unit_sizes(model: nn.Module, unit_classes: Sequence[str] = ()) -> list[UnitSizes]:
    """The units that the engine would cut `model` into, by size. A model on the meta device costs no memory.

    Integer parameters stay outside the units, as in the engine.
    """
    return sizes_of(plan_units(model, unit_classes))


def sizes_of(plans: Sequence[UnitPlan], trained: Collection[nn.Parameter] | None = None) -> list[UnitSizes]:
    """Of this rank's parts; `trained` are the parameters that an optimizer was given, where one is known."""
    sizes = []
    for plan in plans:
        floating = [parameter for _, parameter in plan.parameters if parameter.is_floating_point()]
        updated = [p.requires_grad and (trained is None or p in trained) for p in floating]
        sizes.append(
            UnitSizes(
                plan.name,
                trained=tuple(_numel(p) for p, is_updated in zip(floating, updated, strict=True) if is_updated),
                frozen=tuple(_numel(p) for p, is_updated in zip(floating, updated, strict=True) if not is_updated),
                root=plan.root,
            )
        )
    return sizes


def _numel(parameter: nn.Parameter) -> int:
    return (local(parameter) if is_dtensor(parameter) else parameter).numel()
