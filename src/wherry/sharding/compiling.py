"""torch.compile, a block at a time: units' own modules are graphs, and what lies between stays the engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.sharding.unit import Unit

_WHY = (
    "one graph over the whole model has no places left between its blocks, where weights are gathered, released and "
    "reduced"
)


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


@torch._disable_dynamo
def refuse_engine() -> None:
    """What dynamo comes to when it traces an engine: a call that it leaves to the interpreter, where it raises."""
    raise WherryError(f"forward: this is torch.compile(engine), and {_WHY}; call engine.compile(), for each block")


def refuse_whole(model: nn.Module) -> None:
    """A model that is compiled as a whole cannot be trained in units."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        raise WherryError(
            f"initialize: the model is torch.compile({type(inner).__name__}), and {_WHY}; give the model itself, and "
            "call engine.compile(), which compiles each block"
        )
    if model._compiled_call_impl is not None:
        raise WherryError(
            f"the model was compiled as a whole by {type(model).__name__}.compile(), and {_WHY}; call engine.compile() "
            "instead, which compiles each block"
        )
