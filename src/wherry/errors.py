"""The errors that Wherry raises at a user: each says what happened, where, what was expected, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from wherry.config.problems import Problem


# What moves the cursor, rings, is not seen or turns the direction of writing; and halves of characters, which no
# terminal can be given.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)
_LONGEST = 20_000


def printable(text: str, longest: int = _LONGEST) -> str:
    r"""Text that may hold what a file says, as a terminal can be given it: escaped, and without its middle if long.

    >>> printable("\x1b[2Jgone")
    '\\x1b[2Jgone'
    """
    return _cut(
        _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), _cut(text, longest)), longest
    )


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    kept = longest // 2 - 20
    return f"{text[:kept]}... ({len(text):,} characters) ...{text[-kept:]}"[:longest]


def one_line(text: str, longest: int = 240) -> str:
    """The same of a name from a file, which must not begin a line of its own."""
    return printable(text, longest).replace("\n", "\\n").replace("\t", "\\t")


class _Printable(Exception):
    """Its message may hold names from files."""

    # The rank that has ended while this one waited for it, where that is the error.
    ended_rank: int | None = None

    def with_ended_rank(self, rank: int | None) -> Self:
        """Name that rank, for the launcher, and return the error."""
        self.ended_rank = rank
        return self

    def __str__(self) -> str:
        return printable(super().__str__())


class WherryError(_Printable, ValueError):
    """A user's mistake. Its message stands alone; a traceback adds nothing to it."""


class DivergenceError(WherryError):
    """The ranks have not run the same program."""


class NonFiniteError(WherryError):
    """Gradients are inf or NaN, and training cannot go on by leaving them out."""


class PeerError(_Printable, RuntimeError):
    """Another rank has failed, is gone, or did not arrive in time; the message names it and what it said."""


class ConfigError(WherryError):
    """One or more problems in a config, all of them listed; `problems` holds them one by one."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
