"""Config text: JSON or Hjson to a dict, and the line on which each key stands."""

from __future__ import annotations

import bisect
import json
import re
from typing import Any

KeyPath = tuple[str, ...]

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
    return _plain(value), Lines(text if isinstance(value, dict) else "")


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value
