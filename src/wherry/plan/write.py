"""A chosen config as text: JSON with the reasons in comments, which `wherry.config.load` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from wherry.config import Config
from wherry.config.source import nested
from wherry.plan.choose import Choice
from wherry.plan.quantities import seconds


def as_text(config: Config, choice: Choice) -> str:
    """What the user gave, with the chosen values in it and the reason above each."""
    tree = tree_of(config)
    for key, value in choice.values.items():
        _put(tree, key.split("."), value)
    lines = [f"// {line}" for line in _preamble(choice)]
    return "\n".join([*lines, "{", *_members(tree, choice.reasons, "", 1), "}"]) + "\n"


def tree_of(config: Config) -> dict[str, Any]:
    """What a config was given, and what was laid over it."""
    tree = nested(config.given)
    for layer in config._overrides:
        for key, value in layer.items():
            _put(tree, key.split("."), value)
    return tree


def _preamble(choice: Choice) -> Iterator[str]:
    found = choice.estimate
    yield f"Chosen by `wherry plan --auto` among {choice.tried} configs, {choice.fitting} of which fit:"
    yield f"{found.model}, {found.parameters:,} parameters, {found.ranks} rank{'s' * (found.ranks > 1)}"
    yield f"on {found.machine.name}."
    for use in found.uses:
        yield f"{use.place}: {use.needed / 1e9:.2f} GB of {use.usable / 1e9:.2f} GB usable."
    if found.time is not None:
        yield f"A step takes about {seconds(found.time.total)}, limited by {found.time.limited_by}."


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[path[-1]] = value


def _members(tree: Mapping[str, Any], reasons: Mapping[str, str], prefix: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for position, (name, value) in enumerate(tree.items()):
        path = f"{prefix}{name}"
        comma = "," if position < len(tree) - 1 else ""
        if path in reasons:
            yield f"{indent}// {reasons[path]}"
        if isinstance(value, dict) and value:
            yield f"{indent}{json.dumps(name)}: {{"
            yield from _members(value, reasons, f"{path}.", depth + 1)
            yield f"{indent}}}{comma}"
        else:
            yield f"{indent}{json.dumps(name)}: {json.dumps(value)}{comma}"
