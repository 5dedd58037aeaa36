"""Where a config comes from: a dict, a path, JSON or Hjson text, or base64 of it; and the line of each key."""

from __future__ import annotations

import base64
import binascii
import bisect
import json
import json.scanner
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wherry.config.problems import Problem, config_error, shown
from wherry.regular import read_regular

KeyPath = tuple[str, ...]

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{8,}={0,2}")
# Far more than any config has, and still read in a moment: characters of a text, and blocks within each other.
LONGEST = 1 << 20
_DEEPEST = 64
# NUL, which no path may hold, and halves of characters; but for those that stand for the bytes of paths of no encoding.
_NO_TEXT = re.compile(r"[\x00\ud800-\udc7f\udd00-\udfff]")
_BEFORE_KEY = re.compile(r"(?:[\s,]+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = r"'''.*?'''|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
_BRACKETS = re.compile(rf"{_QUOTED}|#[^\n]*|//[^\n]*|/\*.*?(?:\*/|\Z)|[{{}}\[\]]", re.DOTALL)
_INDENT = re.compile(r"^[^\S\n]*", re.MULTILINE)


class TextError(Exception):
    """The text is neither JSON nor Hjson."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


class Lines:
    """The line of every key of a text, and a problem for each that is given more than once.

    >>> parse('{\\n "a": {"b": 1}\\n}')[1].of(("a", "b"))
    2
    """

    def __init__(self) -> None:
        self.table: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []

    def of(self, path: KeyPath) -> int | None:
        """The line of a key, or of the nearest block around it that the text has."""
        while path:
            if path in self.table:
                return self.table[path]
            path = path[:-1]
        return None

    def take(self, value: Any, path: KeyPath = ()) -> Any:
        """What a parser has made, as plain dicts and lists; the lines of its keys are noted."""
        if isinstance(value, list):
            return [self.take(inner, (*path, str(index))) for index, inner in enumerate(value)]
        if not isinstance(value, _Object):
            return value
        for name, line in value.key_lines:
            here = (*path, name)
            if here in self.table:
                message = f"given twice, first on line {self.table[here]}; keep one of the two"
                self.problems.append(Problem(".".join(here), line, message))
            else:
                self.table[here] = line
        return {name: self.take(inner, (*path, name)) for name, inner in value.items()}


class _Object(dict[str, Any]):
    """An object of a text, and the line of each of its keys, in order; a key that is given twice is there twice."""

    key_lines: Sequence[tuple[str, int]] = ()


def _noting_lines(parse_object: Callable[..., Any], text: str, scanner: int, first_line: int = 1) -> Callable[..., Any]:
    """A parser's own function for objects, with the line of each key noted: from the end of the value before it.

    `scanner` is the place of the function for values among its arguments; that for finished objects is two further.
    """
    line_ends = [found.start() for found in re.finditer("\n", text)]

    def parse(state: tuple[str, int], *arguments: Any) -> Any:
        end = state[1]
        lines: list[int] = []

        def scan_value(_: str, start: int) -> tuple[Any, int]:
            nonlocal end
            key = _BEFORE_KEY.match(text, end)
            assert key is not None, "it matches nothing as well"
            lines.append(bisect.bisect_left(line_ends, key.end()) + first_line)
            value, end = arguments[scanner](text, start)
            return value, end

        def finish(pairs: list[tuple[str, Any]]) -> _Object:
            made = _Object(pairs)
            made.key_lines = [(name, line) for (name, _), line in zip(pairs, lines, strict=True)]
            return made

        given = list(arguments)
        given[scanner], given[scanner + 2] = scan_value, finish
        return parse_object(state, *given)

    return parse


class _JsonDecoder(json.JSONDecoder):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.parse_object = _noting_lines(json.decoder.JSONObject, text, 1)  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


@dataclass
class ConfigSource:
    """What the user wrote, and where to point at it."""

    given: dict[str, Any]
    name: str | None = None
    lines: Lines = field(default_factory=Lines)


def read(source: str | os.PathLike[str] | Mapping[str, Any] | ConfigSource | None) -> ConfigSource:
    """Read a config from whatever holds it. The result shares nothing with `source`, but with one that is read."""
    if source is None:
        return ConfigSource({})
    if isinstance(source, ConfigSource):
        return source
    if isinstance(source, Mapping):
        return ConfigSource(copied(source))
    if isinstance(source, os.PathLike):
        return _from_file(Path(source))
    if isinstance(source, str):
        return _from_string(source)
    expected = "expected a path, a dict, or JSON or Hjson text"
    raise config_error([Problem("", None, f"{expected}, got {type(source).__name__}")], None)


class _UnfitError(Exception):
    """What no key of a config can have as its value."""

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path


def copied(given: Mapping[str, Any], lines: Lines | None = None, name: str | None = None) -> dict[str, Any]:
    """A tree of dicts and lists that shares nothing with what was given. What no key can mean is an error."""
    try:
        return _copy(given)
    except _UnfitError as error:
        line = lines.of(error.path) if lines is not None else None
        raise config_error([Problem(".".join(error.path), line, str(error))], name) from None


def _copy(value: Any, path: KeyPath = (), around: tuple[Any, ...] = ()) -> Any:
    if len(path) + sum(name.count(".") for name in path[-1:]) > _DEEPEST:
        raise _UnfitError((), "nested too deeply to be a config")
    if not isinstance(value, Mapping | list | tuple):
        _check_leaf(value, path)
        return value
    if any(value is outer for outer in around):
        raise _UnfitError(path, "is the same object as one around it: it has no end")
    around = (*around, value)
    if isinstance(value, Mapping):
        return {str(name): _copy(inner, (*path, str(name)), around) for name, inner in value.items()}
    return [_copy(inner, (*path, str(index)), around) for index, inner in enumerate(value)]


def _check_leaf(value: Any, path: KeyPath) -> None:
    if isinstance(value, int) and abs(value) > sys.maxsize:
        digits = math.ceil(value.bit_length() * math.log10(2))
        raise _UnfitError(path, f"is a number of {digits:,} digits; nothing that can be set here is as large")
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise _UnfitError(path, "holds a NUL or half of a character, which no text does")


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
        text = read_regular(path, LONGEST).decode("utf-8-sig")
    except OSError as error:
        raise config_error([Problem("", None, f"cannot be read: {error.strerror}")], name) from None
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise config_error([Problem("", None, message)], name) from None
    return _from_text(text, name)


def _from_text(text: str, name: str) -> ConfigSource:
    if len(text) > LONGEST:
        raise config_error([Problem("", None, f"is longer than the {LONGEST:,} characters of a config")], name)
    if not text.strip():
        raise config_error([Problem("", None, "is empty; write {} to take every default")], name)
    try:
        value, lines = parse(text)
    except TextError as error:
        raise config_error([Problem("", error.line, str(error))], name) from None
    if not isinstance(value, dict):
        message = f"expected an object with config keys, got {shown(value)}"
        raise config_error([Problem("", None, message)], name)
    return ConfigSource(copied(value, lines, name), name, lines)


# --- text ---


def parse(text: str) -> tuple[Any, Lines]:
    """Parse JSON, or else Hjson, with the lines of its keys. Raises `TextError`."""
    lines = Lines()
    try:
        try:
            # JSON goes first because Python writes the non-standard Infinity, which Hjson reads as a string's start.
            return lines.take(_JsonDecoder(text).decode(text)), lines
        except json.JSONDecodeError:
            return lines.take(_parse_hjson(text)), lines
    except RecursionError:
        raise TextError("nested too deeply to be a config", None) from None
    except ValueError:  # of Python, which makes no numbers of so many digits
        raise TextError("a number in it has thousands of digits", None) from None


def _parse_hjson(text: str) -> Any:
    from hjson import HjsonDecodeError, HjsonDecoder
    from hjson.decoder import JSONObject, make_scanner

    decoder = HjsonDecoder()
    inset = "\n" + text  # hjson looks for the line break before a multi-line string, and runs off a text without one
    decoder.parse_object = _noting_lines(JSONObject, inset, 2, first_line=0)
    decoder.scan_once, decoder.scan_object_once = make_scanner(decoder)
    try:
        return decoder.decode(inset)
    except IndexError:  # how hjson meets the end of the text inside a comment
        raise TextError("not valid JSON or Hjson: a comment or a string does not end", None) from None
    except HjsonDecodeError as error:
        hint = "; a value without quotes runs to the end of its line" if "eof" in error.msg else ""
        if unclosed := _unclosed(text):
            marks = [mark for mark in "{[" if mark in unclosed]
            opened = ", ".join(f"{mark} of line {unclosed[mark]}" for mark in marks)
            hint = f"; {' and '.join(marks)} not closed ({opened}): is the file whole?"
        what = error.msg.replace(" %r at", "")
        message = f"not valid JSON or Hjson: {what} (column {error.colno}){hint}"
        raise TextError(message, max(1, error.lineno - 1)) from None


def _unclosed(text: str) -> dict[str, int]:
    """The kinds of brackets that are opened more often than closed, and the line of the first that is not closed.

    Where a closing bracket begins a line, indentation tells which one it closes.
    """
    opened: list[tuple[str, int, int]] = []
    left: list[tuple[str, int, int]] = []
    counts = dict.fromkeys("{}[]", 0)
    indents = [found.span() for found in _INDENT.finditer(text)]
    for found in _BRACKETS.finditer(text):
        mark = found.group()
        if mark not in counts:
            continue
        counts[mark] += 1
        line = bisect.bisect_right(indents, (found.start(), sys.maxsize))
        start, end = indents[line - 1]
        indent = end - start
        if mark in "{[":
            opened.append((mark, line, indent))
            continue
        begins_line = found.start() == end
        while opened and (opened[-1][0] + mark not in ("{}", "[]") or (begins_line and opened[-1][2] > indent)):
            left.append(opened.pop())
        if opened:
            opened.pop()
    kinds = [pair[0] for pair in ("{}", "[]") if counts[pair[0]] > counts[pair[1]]]
    return {kind: min(line for mark, line, _ in left + opened if mark == kind) for kind in kinds}
