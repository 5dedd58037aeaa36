"""Where a config comes from: a dict, a path, JSON or Hjson text, or base64 of it; and the line of each key."""

from __future__ import annotations

import base64
import binascii
import bisect
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wherry.config.problems import Problem, config_error, shown

KeyPath = tuple[str, ...]

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")
_SPACE_AND_COMMENTS = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SPACE_COMMENTS_COMMAS = re.compile(r"(?:[\s,]+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = re.compile(r"'''.*?'''|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", re.DOTALL)
_BRACKETS = re.compile(rf"{_QUOTED.pattern}|#[^\n]*|//[^\n]*|/\*.*?\*/|[{{}}\[\]]", re.DOTALL)
_BARE_KEY = re.compile(r"[^\s:{}\[\],]+")
_SCALAR = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=[ \t]*(?:[,}\]#\n\r]|//|/\*|\Z))"
)
_JSON_SCALAR = re.compile(r"[^\s,\]}]+")
_REST_OF_LINE = re.compile(r"[^\n]*")


class TextError(Exception):
    """The text is neither JSON nor Hjson."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


class Lines:
    """The line of every key of a text, and the keys given more than once.

    >>> Lines('{\\n "a": {"b": 1}\\n}').of(("a", "b"))
    2
    """

    def __init__(self, text: str = "", *, strict_json: bool = False) -> None:
        self.table: dict[KeyPath, int] = {}
        self.duplicates: list[tuple[KeyPath, int]] = []
        if text:
            _Scanner(text, self, _JSON_SCALAR if strict_json else _SCALAR).run()

    def of(self, path: KeyPath) -> int | None:
        """The line of a key, or of the nearest block around it that the text has."""
        while path:
            if path in self.table:
                return self.table[path]
            path = path[:-1]
        return None

    def note(self, path: KeyPath, line: int) -> None:
        if path not in self.table:
            self.table[path] = line
        elif not any(path[: len(outer)] == outer for outer, _ in self.duplicates if len(outer) < len(path)):
            # Inside a block given twice, every key is there twice: the block is what to say.
            self.duplicates.append((path, line))


@dataclass
class ConfigSource:
    """What the user wrote, and where to point at it."""

    given: dict[str, Any]
    name: str | None = None
    lines: Lines = field(default_factory=Lines)
    problems: list[Problem] = field(default_factory=list)


def read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> ConfigSource:
    """Read a config from whatever holds it. The result shares nothing with `source`."""
    if source is None:
        return ConfigSource({})
    if isinstance(source, Mapping):
        return ConfigSource(copied(source))
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


def _from_string(source: str) -> ConfigSource:
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


def _from_file(path: Path) -> ConfigSource:
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise config_error([Problem("", None, f"cannot be read: {error.strerror}")], name) from None
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise config_error([Problem("", None, message)], name) from None
    return _from_text(text, name)


def _from_text(text: str, name: str) -> ConfigSource:
    if not text.strip():
        raise config_error([Problem("", None, "is empty; write {} to take every default")], name)
    try:
        value, lines = parse(text)
    except TextError as error:
        raise config_error([Problem("", error.line, str(error))], name) from None
    if not isinstance(value, dict):
        message = f"expected an object with config keys, got {shown(value)}"
        raise config_error([Problem("", None, message)], name)
    return ConfigSource(value, name, lines, [_duplicate(lines, path, line) for path, line in lines.duplicates])


def _duplicate(lines: Lines, path: KeyPath, line: int) -> Problem:
    first = lines.table[path]
    return Problem(".".join(path), line, f"given twice, first on line {first}; keep one of the two")


# --- text ---


def parse(text: str) -> tuple[Any, Lines]:
    """Parse JSON, or else Hjson, with the lines of its keys. Raises `TextError`."""
    try:
        return _parse_json(text)
    except json.JSONDecodeError:
        return _parse_hjson(text)
    except RecursionError:
        raise TextError("nested too deeply to be a config", None) from None


def _parse_json(text: str) -> tuple[Any, Lines]:
    # JSON goes first because Python writes the non-standard Infinity, which Hjson reads as the start of a string.
    value = json.loads(text)
    return value, Lines(text if isinstance(value, dict) else "", strict_json=True)


def _parse_hjson(text: str) -> tuple[Any, Lines]:
    import hjson  # most configs are dicts or JSON

    try:
        # hjson looks for the line break before a multi-line string, and runs off a text that has none.
        value = hjson.loads("\n" + text)
    except IndexError:  # how hjson meets the end of the text inside a comment
        raise TextError("not valid JSON or Hjson: a comment or a string does not end", None) from None
    except hjson.HjsonDecodeError as error:
        hint = "; a value without quotes runs to the end of its line" if "eof" in error.msg else ""
        if unclosed := _unclosed(text):
            marks = [mark for mark in "{[" if mark in unclosed]
            opened = ", ".join(f"{mark} of line {unclosed[mark]}" for mark in marks)
            hint = f"; {' and '.join(marks)} not closed ({opened}): is the file whole?"
        what = error.msg.replace(" %r at", "")
        message = f"not valid JSON or Hjson: {what} (column {error.colno}){hint}"
        raise TextError(message, max(1, error.lineno - 1)) from None
    return _copy(value), Lines(text if isinstance(value, dict) else "")


def _unclosed(text: str) -> dict[str, int]:
    """The kinds of brackets that are opened more often than closed, and the line of the first that is not closed.

    Where a closing bracket begins a line, indentation tells which one it closes.
    """
    opened: list[tuple[str, int, int]] = []
    left: list[tuple[str, int, int]] = []
    counts = dict.fromkeys("{}[]", 0)
    for found in _BRACKETS.finditer(text):
        mark = found.group()
        if mark not in counts:
            continue
        counts[mark] += 1
        before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        indent = len(before) - len(before.lstrip())
        if mark in "{[":
            opened.append((mark, text.count("\n", 0, found.start()) + 1, indent))
            continue
        begins_line = not before.strip()
        while opened and (opened[-1][0] + mark not in ("{}", "[]") or (begins_line and opened[-1][2] > indent)):
            left.append(opened.pop())
        if opened:
            opened.pop()
    kinds = [pair[0] for pair in ("{}", "[]") if counts[pair[0]] > counts[pair[1]]]
    return {kind: min(line for mark, line, _ in left + opened if mark == kind) for kind in kinds}


class _Scanner:
    """Walks text that a parser has already accepted, so it only has to find where things are."""

    def __init__(self, text: str, lines: Lines, scalar: re.Pattern[str]) -> None:
        self.text = text
        self.lines = lines
        self.scalar = scalar
        self.at = 0
        self.line_ends = [match.start() for match in re.finditer("\n", text)]

    def run(self) -> None:
        self._skip(_SPACE_AND_COMMENTS)
        if self._peek() == "{":
            self._value(())
        else:
            self._members((), closing="")

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match.group()

    def _value(self, path: KeyPath) -> None:
        first = self._peek()
        if first == "{":
            self.at += 1
            self._members(path, closing="}")
        elif first == "[":
            self.at += 1
            self._items(path)
        elif first in ('"', "'"):
            self._skip(_QUOTED)
        elif not self._skip(self.scalar):
            self._skip(_REST_OF_LINE)

    def _members(self, path: KeyPath, closing: str) -> None:
        while True:
            self._skip(_SPACE_COMMENTS_COMMAS)
            if self._peek() == closing:
                self.at += 1
                return
            start = self.at
            name = self._key()
            self._skip(_SPACE_AND_COMMENTS)
            if not name or self._peek() != ":":
                return
            self.at += 1
            member = (*path, name)
            self.lines.note(member, bisect.bisect_left(self.line_ends, start) + 1)
            self._skip(_SPACE_AND_COMMENTS)
            self._value(member)

    def _items(self, path: KeyPath) -> None:
        index = 0
        while True:
            self._skip(_SPACE_COMMENTS_COMMAS)
            if self._peek() in ("]", ""):
                self.at += 1
                return
            self._value((*path, str(index)))
            index += 1

    def _key(self) -> str:
        if self._peek() not in ('"', "'"):
            return self._skip(_BARE_KEY)
        quoted = self._skip(_QUOTED)
        if "\\" not in quoted:
            return quoted[1:-1]
        import hjson

        return str(hjson.loads(quoted))
