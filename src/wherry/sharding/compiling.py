"""torch.compile, a block at a time: units' own modules are graphs, and what lies between stays the engine's."""

from __future__ import annotations

from typing import Any

from torch import nn

from wherry.errors import WherryError
from wherry.sharding.unit import Unit


def _blocks(units: list[Unit]) -> list[nn.Module]:
    return list({module: None for unit in units if not unit.root for module in unit.modules})


def are_compiled(units: list[Unit]) -> bool:
    return any(module._compiled_call_impl is not None for module in _blocks(units))


def compile_units(units: list[Unit], options: dict[str, Any]) -> None:
    """`Module.compile` on every module that a unit belongs to. The root unit stays as it is."""
    modules = _blocks(units)
    if not modules:
        raise WherryError(
            "compile: this model has no blocks to compile one by one; name their classes in the config, as in "
            '"wherry": {"unit_classes": ["Block"]}'
        )
    for module in modules:
        module.compile(**options)
