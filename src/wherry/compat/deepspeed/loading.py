"""Load DeepSpeed's checkpoints in `engine.load_checkpoint`: choose one, and convert it for the time of the load."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError, on_first, together
from wherry.checkpoint.format import NAME
from wherry.compat.deepspeed.importing import LATEST_UNIVERSAL, Names, import_checkpoint, is_theirs, pointed_to
from wherry.observe.log import logger, say
from wherry.parallel.comm import Comm
from wherry.plan.quantities import size

_FULL = (errno.ENOSPC, errno.EDQUOT)


class NoSuchTag(CheckpointError, AssertionError):
    """The tag has no checkpoint."""


def locate(folder: Path, tag: object, *, universal: bool) -> tuple[str, bool] | CheckpointError | None:
    """Find the tag to load, and whether DeepSpeed has written it; None, with a line in the log, without any tag.

    Errors that scripts catch under other names are returned, so that every rank raises them.
    """
    if tag is not None:
        tag = folders.check_tag(tag)
        if not (folder / tag).is_dir():
            tags = ", ".join(folders.newest_first(folder)) or "none"
            return NoSuchTag(f"{folder} holds no checkpoint {tag}; those that are there: {tags}")
        return tag, is_theirs(folder / tag)
    if os.path.lexists(folder / NAME):
        return ".", False
    tag = (pointed_to(folder / LATEST_UNIVERSAL) if universal else None) or pointed_to(folder / folders.LATEST)
    if tag is not None:
        return tag, is_theirs(folder / tag)
    if universal:
        return CheckpointError(
            f"{folder} holds no {LATEST_UNIVERSAL} that names a checkpoint; give the tag, or leave "
            "checkpoint.load_universal out, as every checkpoint loads on any number of ranks"
        )
    say("%s holds no %s that names a checkpoint: nothing is loaded; give a tag to load one", folder, folders.LATEST)
    return None


@contextmanager
def as_ours(world: Comm, folder: Path, tag: str, groups: Names) -> Iterator[Path]:
    """Convert DeepSpeed's checkpoint until the block ends, which every rank enters; gives the folder to load from.

    That folder lies beside the original, or among temporary ones where the original's can only be read. The log and
    errors name the original's.
    """
    what = f"loading from {folder}"
    with ExitStack() as made:  # on rank 0
        ours = on_first(world, what, lambda: _convert(folder, tag, groups, made))
        together(world, what, lambda: _check_seen(folder / tag, ours))
        with _named_as(folder, ours):
            yield ours
            world.meet("load_checkpoint()")  # rank 0 deletes the folder once all ranks have read it


def _convert(folder: Path, tag: str, groups: Names, made: ExitStack) -> Path:
    """Convert a checkpoint into a folder that `made` deletes; returns that folder."""
    disk, source = folder, folder / tag
    try:
        ours = _make_folder(source, made)
        disk = ours.parent
        import_checkpoint(folder, ours, tag, groups)
        return ours
    except OSError as error:
        if error.errno not in _FULL:
            raise
        why = f"there is no room for it in {disk}, up to {_bytes_of(source)} ({error.strerror}). Nothing was loaded"
        raise _unconverted(source, why, "make room there", " with an OUT on another disk,") from None


def _make_folder(source: Path, made: ExitStack) -> Path:
    try:
        partial = folders.Partial(source.parent, f"{source.name}.imported")
        made.callback(partial.drop)
        return partial.path
    except OSError as error:
        if error.errno in _FULL:
            raise
        why = f"nothing can be written beside it ({error.strerror})"
    try:
        temporary = Path(made.enter_context(TemporaryDirectory(prefix="wherry-")))
    except OSError as error:
        why += f", nor in a temporary folder ({error.strerror})"
        raise _unconverted(source, why, f"set TMPDIR to a folder with room for {_bytes_of(source)}") from None
    say("%s is DeepSpeed's: converted in %s, as %s", source, temporary.parent, why)
    return temporary


def _check_seen(source: Path, ours: Path) -> None:
    if not ours.is_dir():
        why = f"rank 0 does so in {ours.parent}, which this rank does not see"
        share = "let all nodes share that folder (TMPDIR names a temporary one)"
        raise _unconverted(source, why, share, " with an OUT that they share,")


def _unconverted(source: Path, why: str, remedy: str, out: str = "") -> CheckpointError:
    return CheckpointError(
        f"{source} is DeepSpeed's, which is converted to be loaded; {why}; {remedy}, or run `wherry import-deepspeed "
        f"{source.parent} OUT`{out} and load OUT"
    )


def _bytes_of(checkpoint: Path) -> str:
    return size(sum(path.stat().st_size for path in checkpoint.rglob("*.pt")))


@contextmanager
def _named_as(folder: Path, ours: Path) -> Iterator[None]:
    """Replace `ours` by `folder` in the log and in errors."""

    def named(text: str) -> str:
        return text.replace(str(ours), str(folder))

    def rename(record: logging.LogRecord) -> bool:
        record.msg, record.args = named(record.getMessage()), ()
        return True

    logger.addFilter(rename)
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            cause.args = tuple(named(each) if isinstance(each, str) else each for each in cause.args)
            cause = cause.__cause__ or cause.__context__
        raise
    finally:
        logger.removeFilter(rename)
