"""Where a config comes from: a dict, a path, JSON or Hjson text, or base64 of such text."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wherry.config.problems import Problem, config_error, shown
from wherry.config.text import KeyPath, Lines, TextError, parse

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")


@dataclass
class Source:
    """What the user wrote, and where to point at it."""

    given: dict[str, Any]
    name: str | None = None
    lines: Lines = field(default_factory=Lines)
    problems: list[Problem] = field(default_factory=list)


def read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> Source:
    """Read a config from whatever holds it. The result shares nothing with `source`."""
    if source is None:
        return Source({})
    if isinstance(source, Mapping):
        return Source(copied(source))
    if isinstance(source, os.PathLike):
        return _from_file(Path(source))
    if isinstance(source, str):
        return _from_string(source)
    expected = "expected a path, a dict, or JSON or Hjson text"
    raise config_error([Problem("", None, f"{expected}, got {type(source).__name__}")], None)


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dicts and lists that shares nothing with what was given. One that holds itself is an error."""
    try:
        return _copy(given)
    except RecursionError:
        raise config_error([Problem("", None, "nested too deeply to be a config")], None) from None


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with its dotted keys in their blocks; where a key is given both ways the block's own stays.

    >>> nested({"zero_optimization.stage": 2, "zero_optimization": {"overlap_comm": True}})
    {'zero_optimization': {'overlap_comm': True, 'stage': 2}}
    """
    tree: dict[str, Any] = {
        name: nested(value) if isinstance(value, Mapping) else _copy(value)
        for name, value in given.items()
        if "." not in name
    }
    for dotted, value in given.items():
        if "." in dotted:
            path, inner = dotted.split("."), tree
            for name in path[:-1]:
                block = inner.get(name)
                if not isinstance(block, dict):
                    block = inner[name] = {}
                inner = block
            if inner.get(path[-1]) in (None, "auto"):
                inner[path[-1]] = _copy(value)
    return tree


def _copy(value: Any, path: KeyPath = (), around: tuple[Any, ...] = ()) -> Any:
    if not isinstance(value, Mapping | list | tuple):
        return value
    if any(value is outer for outer in around):
        raise config_error([Problem(".".join(path), None, "is the same object as one around it: it has no end")], None)
    around = (*around, value)
    if isinstance(value, Mapping):
        return {str(name): _copy(inner, (*path, str(name)), around) for name, inner in value.items()}
    return [_copy(inner, (*path, str(index)), around) for index, inner in enumerate(value)]


def _from_string(source: str) -> Source:
    stripped = source.strip()
    if stripped.startswith("{") or "\n" in stripped:
        return _from_text(source, "config text")
    if os.path.exists(source):
        return _from_file(Path(source))
    decoded = _from_base64(stripped)
    if decoded is not None:
        return _from_text(decoded, "config in base64")
    message = f"no such file: {shown(source)} (nor is it JSON or Hjson text, nor base64 of such text)"
    raise config_error([Problem("", None, message)], None)


def _from_base64(text: str) -> str | None:
    if not _BASE64.fullmatch(text):
        return None
    padded = text.rstrip("=")
    padded += "=" * (-len(padded) % 4)
    try:
        decoded = base64.urlsafe_b64decode(padded.replace("+", "-").replace("/", "_")).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _from_file(path: Path) -> Source:
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise config_error([Problem("", None, f"cannot be read: {error.strerror}")], name) from None
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise config_error([Problem("", None, message)], name) from None
    return _from_text(text, name)


def _from_text(text: str, name: str) -> Source:
    if not text.strip():
        raise config_error([Problem("", None, "is empty; write {} to take every default")], name)
    try:
        value, lines = parse(text)
    except TextError as error:
        raise config_error([Problem("", error.line, str(error))], name) from None
    if not isinstance(value, dict):
        message = f"expected an object with config keys, got {shown(value)}"
        raise config_error([Problem("", None, message)], name)
    return Source(value, name, lines, [_duplicate(lines, path, line) for path, line in lines.duplicates])


def _duplicate(lines: Lines, path: KeyPath, line: int) -> Problem:
    first = lines.table[path]
    return Problem(".".join(path), line, f"given twice, first on line {first}; keep one of the two")
