"""The `wherry` logger: ordinary news comes from rank 0 only, warnings from every rank with its number.

Where a program has set up no logging, warnings go to standard error, and with a level of INFO all else does too.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from wherry.errors import printable

if TYPE_CHECKING:
    from wherry.config import Config

NAME = "wherry"

logger = logging.getLogger(NAME)


def is_rank_zero() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def say(message: str, *args: object) -> None:
    """Log at INFO on rank 0 only."""
    if is_rank_zero():
        logger.info(message, *args)


def warn(message: str, *args: object) -> None:
    """Log a warning on rank 0 only: of what is the same on all of them."""
    if is_rank_zero():
        logger.warning(message, *args)


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that knows its rank: the object's own, so that engines of several ranks can share a process."""

    def __init__(self, rank: int) -> None:
        super().__init__(logger, {"rank": rank})
        self.rank = rank

    def isEnabledFor(self, level: int) -> bool:
        return (self.rank == 0 or level >= logging.WARNING) and super().isEnabledFor(level)


def get_logger(rank: int | None = None) -> RankLogger:
    """The logger of one rank; without a rank, that of this process.

    >>> get_logger(rank=0).info("ZeRO-3 over %d ranks", 2)
    """
    return RankLogger(int(os.environ.get("RANK", "0")) if rank is None else rank)


def _finish(record: logging.LogRecord) -> bool:
    """Escape what files have said. Put the rank before a line of a rank other than 0, and before a warning of any of
    several."""
    record.msg, record.args = printable(record.getMessage(), longest=1 << 20), ()
    rank = getattr(record, "rank", None)
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    several = record.levelno >= logging.WARNING and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if rank or several:
        record.msg = f"[rank {rank}] {record.msg}"
    return True


class _StandardError(logging.StreamHandler[Any]):
    """Writes where sys.stderr is at the time: a live display puts its own in the place.

    It says nothing once the program has set up logging, which shows the same lines.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_FORMAT)

    @property
    def stream(self) -> Any:
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        return not _shown_elsewhere() and bool(super().filter(record))


def _shown_elsewhere() -> bool:
    return bool(logging.getLogger().handlers) or any(type(one) is not _StandardError for one in logger.handlers)


_FORMAT = logging.Formatter("%(name)s: %(message)s")
logger.addFilter(_finish)
logger.addHandler(_StandardError())


def show_unless_shown(level: int = logging.INFO, of: logging.Logger = logger) -> None:
    """Print a logger's lines, from a level on, on standard error if nobody shows them."""
    if not of.hasHandlers():
        of.addHandler(_StandardError())
        of.setLevel(level)
    elif of is logger and not _shown_elsewhere():
        of.setLevel(level)


def follow(config: Config) -> None:
    """Set the logger to what a config asks for: lines that it asks for are seen."""
    if config.log_level is not None:
        logger.setLevel(config.log_level.upper())
    summaries = config.comms_logger.enabled or config.flops_profiler.enabled or config.wherry.profile.recorded
    if config.log_level or config.steps_per_print or config.wall_clock_breakdown or summaries:
        show_unless_shown(logger.level or logging.INFO)
