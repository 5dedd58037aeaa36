"""What goes wrong with a checkpoint, and getting all ranks to hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from wherry.errors import WherryError
from wherry.parallel.comm import Comm

T = TypeVar("T")


class CheckpointError(WherryError):
    """A checkpoint that cannot be written, found or read."""


class TagsDiffer(CheckpointError, AssertionError):
    """The ranks gave different tags, and the config does not let that pass."""


def together(comm: Comm, what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank; the results by rank. If any rank fails, every rank raises, and names it."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failure = error
    answers = comm.gather_objects((value, None if failure is None else describe(failure)))
    failed = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
    if not failed:
        return [answer for answer, _ in answers]
    told = "\n".join(text if comm.size == 1 else f"rank {rank}: {text}" for rank, text in failed)
    if len({text for _, text in failed}) == 1 and len(failed) == comm.size:
        told = failed[0][1]
    # What a program's own objects raise is shown where it came from; a disk's error says all in its message.
    raise CheckpointError(f"{what}: {told}") from (None if isinstance(failure, OSError | WherryError) else failure)


def on_first(comm: Comm, what: str, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 alone; its result on every rank, or its failure."""
    return together(comm, what, lambda: work() if comm.rank == 0 else None)[0]  # type: ignore[return-value]


def describe(error: BaseException) -> str:
    """An error in one line; of an OSError what failed and where, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, WherryError):
        return str(error)
    return f"{type(error).__name__}: {error}"
