"""The errors that Wherry raises at a user: each says what happened, where, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wherry.config.problems import Problem


class WherryError(ValueError):
    """A user's mistake. Its message stands alone; a traceback adds nothing to it."""


class DivergenceError(WherryError):
    """The ranks have not run the same program."""


class NonFiniteError(WherryError):
    """Gradients are inf or NaN, and training cannot go on by leaving them out."""


class PeerError(RuntimeError):
    """Another rank has failed, is gone, or did not arrive in time; the message names it and what it said."""


class ConfigError(WherryError):
    """One or more problems in a config, all of them listed; `problems` holds them one by one."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
