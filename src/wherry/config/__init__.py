"""Configs: read, checked, resolved. `load` is the door.

The schema is imported with the first config: it takes as long as half of the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.errors import ConfigError

if TYPE_CHECKING:
    from wherry.config.loading import load, parse_overrides
    from wherry.config.problems import Problem
    from wherry.config.schema import BatchSizes, Config

__all__ = ["BatchSizes", "Config", "ConfigError", "Problem", "load", "parse_overrides"]

_HOMES = {
    "BatchSizes": "wherry.config.schema",
    "Config": "wherry.config.schema",
    "Problem": "wherry.config.problems",
    "load": "wherry.config.loading",
    "parse_overrides": "wherry.config.loading",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'wherry.config' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
