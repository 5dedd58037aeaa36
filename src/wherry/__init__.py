"""Wherry: train models larger than the memory of the GPU, or of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "Init",
    "WherryError",
    "__version__",
    "checkpoint",
    "estimate",
    "gathered",
    "gathered_for_generation",
    "initialize",
    "load_pretrained",
    "register_external_parameter",
    "tile",
]

if TYPE_CHECKING:
    from wherry.activations.recompute import checkpoint
    from wherry.build import gathered_for_generation, initialize
    from wherry.engine import Engine
    from wherry.errors import WherryError
    from wherry.forecast import estimate
    from wherry.nn.tiled import tile
    from wherry.pretrained import load_pretrained
    from wherry.sharding.access import gathered, register_external_parameter
    from wherry.sharding.init import Init

# Imported at first use: `import wherry`, and the command line's help, need none of it.
_HOMES = {
    "Engine": "wherry.engine",
    "Init": "wherry.sharding.init",
    "WherryError": "wherry.errors",
    "checkpoint": "wherry.activations.recompute",
    "estimate": "wherry.forecast",
    "gathered": "wherry.sharding.access",
    "gathered_for_generation": "wherry.build",
    "initialize": "wherry.build",
    "load_pretrained": "wherry.pretrained",
    "register_external_parameter": "wherry.sharding.access",
    "tile": "wherry.nn.tiled",
}
# And these as a whole: `wherry.optim.Muon`.
_ROOMS = ("nn", "optim")


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None and name not in _ROOMS:
        raise AttributeError(f"module 'wherry' has no attribute {name!r}")
    import importlib

    value = importlib.import_module(f"wherry.{name}") if home is None else getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
