"""What is wrong with a config: one `Problem` per mistake, all of them raised together."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

from wherry.errors import ConfigError, one_line

# No memory, disk or file is as small; what is asked for in GB or MB is mostly a smaller number.
_FEW_BYTES = 100_000
# More are no mistakes but another kind of file.
MOST = 100
_LONGEST_WORD = 100


@dataclass(frozen=True)
class Problem:
    """One mistake: the dotted path of the key, the line in the file if it has one, and what to do about it."""

    path: str
    line: int | None
    message: str

    def text(self, source: str | None) -> str:
        place = source or ""
        if source and self.line is not None:
            place = f"{source}:{self.line}"
        return ": ".join(part for part in (place, one_line(self.path), one_line(self.message, 2000)) if part)


def config_error(problems: Sequence[Problem], source: str | None) -> ConfigError:
    """The one error that lists all problems, in the order of the file; of very many the first."""
    assert problems, "an error without a problem"
    ordered = sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0))[:MOST]
    more = ["and more; this does not look like a config"] if len(problems) >= MOST else []
    return ConfigError("\n".join([*(problem.text(source) for problem in ordered), *more]), ordered)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`, did you mean "stage"?` when a known word is near, else an empty string."""
    near = _nearest(word, known)
    return "" if near is None else f', did you mean "{near}"?'


def path_meant(path: Path) -> str:
    """The same of a path that is not there, from the names of what lies where it would be."""
    try:
        near = _nearest(path.name, sorted(each.name for each in path.parent.iterdir()))
    except OSError:
        return ""
    return "" if near is None else f', did you mean "{path.parent / near}"?'


def _nearest(word: str, known: Iterable[str]) -> str | None:
    known = list(known) if len(word) <= _LONGEST_WORD else []
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near:
        lowered = {name.lower(): name for name in known}
        near = [lowered[match] for match in difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)]
    return near[0] if near else None


class Parser(argparse.ArgumentParser):
    """A command's: of a flag that it does not know it says which one is meant."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            flags = [word.partition("=")[0] for word in message.split() if word.startswith("--") and word != "--"]
            inner = (each.choices.values() for each in self._actions if isinstance(each, argparse._SubParsersAction))
            known = [name for each in chain([self], *inner) for name in each._option_string_actions]
            message += next((meant for flag in flags if (meant := did_you_mean(flag, known))), "")
        super().error(message)


def named(word: str, known: Iterable[str]) -> str | None:
    """The known word that this is, in capitals or not."""
    return next((name for name in known if name.lower() == word.lower()), None)


def shown(value: object) -> str:
    """A value as a user would write it in the file, shortened."""
    if isinstance(value, str):
        text = f'the string "{value}"'
    elif value is True or value is False:
        text = "true" if value else "false"
    elif value is None:
        text = "null"
    elif isinstance(value, dict):
        text = "an object"
    elif isinstance(value, list | tuple):
        text = "a list"
    else:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unit_missing(count: float, written: object) -> str:
    """What to write instead of a number that is too few bytes to be meant so; nothing of any other.

    >>> unit_missing(5, 5)
    '; that is 5 bytes: write 5GB or 5MB, or 5B if bytes are meant'
    """
    if not 0 < count < _FEW_BYTES or not str(written).strip()[-1:].isdigit():
        return ""
    number = str(written).strip()
    meant = f"{count:,.0f} byte{'s' * (count != 1)}"
    return f"; that is {meant}: write {number}GB or {number}MB, or {number}B if bytes are meant"
