"""The `wherry` logger: ordinary news comes from rank 0 only, warnings from every rank with its number."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

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


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that knows its rank: the object's own, so that engines of several ranks can share a process."""

    def __init__(self, logger: logging.Logger, rank: int) -> None:
        super().__init__(logger, {"rank": rank})
        self.rank = rank

    def isEnabledFor(self, level: int) -> bool:
        return (self.rank == 0 or level >= logging.WARNING) and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return (msg if self.rank == 0 else f"[rank {self.rank}] {msg}"), kwargs


def get_logger(rank: int | None = None, name: str = NAME) -> RankLogger:
    """The logger of one rank; without a rank, that of this process.

    >>> get_logger(rank=0).info("ZeRO-3 over %d ranks", 2)
    """
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    return RankLogger(logging.getLogger(name), rank)


class _StandardError(logging.StreamHandler[Any]):
    """Writes where sys.stderr is at the time: a live display puts its own in the place.

    It says nothing once the program has set up logging, which shows the same lines.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers and bool(super().filter(record))


def show_on(stream: Any = None, level: int = logging.INFO, of: logging.Logger = logger) -> logging.Handler:
    """Print the `wherry` logger's lines on `stream`, or on standard error. For programs that own their process.

    Returns the handler; `logging.getLogger("wherry").removeHandler(handler)` ends it.
    """
    handler = logging.StreamHandler(stream) if stream is not None else _StandardError()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    of.addHandler(handler)
    of.setLevel(level)
    return handler


def show_unless_shown(level: int = logging.INFO, of: logging.Logger = logger) -> None:
    """Print a logger's lines on standard error if nobody shows them."""
    if not of.hasHandlers():
        show_on(level=level, of=of)


def follow(config: Config) -> None:
    """Set the logger to what a config asks for: lines that it asks for are seen."""
    if config.log_level is not None:
        logger.setLevel(config.log_level.upper())
    summaries = config.comms_logger.enabled or config.flops_profiler.enabled
    if config.log_level or config.steps_per_print or config.wall_clock_breakdown or summaries:
        show_unless_shown(logger.level or logging.INFO)
