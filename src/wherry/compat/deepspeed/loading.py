"""DeepSpeed's checkpoints under `engine.load_checkpoint`: which one, and how it is one of Wherry's meanwhile."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from wherry.checkpoint import folder as folders
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError, on_first, together
from wherry.checkpoint.format import NAME, WEIGHT, dtype_named
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed.importing import LATEST_UNIVERSAL, import_checkpoint, is_theirs, pointed_to
from wherry.observe.log import logger, say
from wherry.parallel.comm import Comm
from wherry.plan.quantities import size


class NoSuchTag(CheckpointError, AssertionError):
    """A tag was given of which there is no checkpoint."""


class NoUniversal(CheckpointError, ValueError):
    """A universal checkpoint was to be loaded, and none is named."""


def locate(folder: Path, tag: object, *, universal: bool) -> tuple[str, bool] | CheckpointError | None:
    """The tag to load, and whether DeepSpeed has written it; None, with a line in the log, where none is named.

    The errors that scripts catch under other names are returned, for every rank to raise.
    """
    if tag is not None:
        tag = folders.check_tag(tag)
        if not (folder / tag).is_dir():
            there = ", ".join(folders.newest_first(folder)) or "none"
            return NoSuchTag(f"{folder} holds no checkpoint {tag}; those that are there: {there}")
        return tag, is_theirs(folder / tag)
    if os.path.lexists(folder / NAME):
        return ".", False
    tag = pointed_to(folder / LATEST_UNIVERSAL) if universal else None
    if tag is None:
        tag = pointed_to(folder / folders.LATEST)
    if tag is None and universal:
        return NoUniversal(
            f"{folder} holds no {LATEST_UNIVERSAL} that names a checkpoint; run ds_to_universal, give the tag, or "
            "leave checkpoint.load_universal out, as every checkpoint loads on any number of ranks"
        )
    if tag is None:
        say("%s holds no %s that names a checkpoint: nothing is loaded; give a tag to load one", folder, folders.LATEST)
        return None
    return tag, is_theirs(folder / folders.check_tag(tag))


@contextmanager
def as_ours(world: Comm, folder: Path, tag: str, groups: Sequence[Sequence[str]]) -> Iterator[Path]:
    """A checkpoint of DeepSpeed's as one of Wherry's until the block ends, which every rank enters; gives its folder.

    It lies beside the original, or in a temporary folder where nothing can be written there. Inside, the log and
    errors name the original's folder.
    """
    what = f"loading from {folder}"
    with ExitStack() as made:  # on rank 0
        ours = on_first(world, what, lambda: _room_for(folder, tag, made))
        with _spoken_of_as(folder, ours):
            together(world, what, lambda: _check_seen(folder, ours))
            on_first(world, what, lambda: _turn(folder, ours, tag, groups))
            yield ours
            world.meet("load_checkpoint()")  # all have read, before the first takes the folder away


def _room_for(folder: Path, tag: str, made: ExitStack) -> Path:
    """An empty folder for it, which goes with `made`."""
    try:
        partial = folders.Partial(folder, f"{tag}.imported")
        made.callback(partial.drop)
        return partial.path
    except OSError as error:
        if error.errno in _FULL:
            raise _no_room(folder, tag, folder, error) from None
        told = f"nothing can be written beside it ({error.strerror})"
    try:
        aside = Path(made.enter_context(TemporaryDirectory(prefix="wherry-")))
    except OSError as error:
        raise CheckpointError(
            f"{folder / tag} is DeepSpeed's, which is turned into one of Wherry's to be loaded; {told}, nor in a "
            f"temporary folder ({error.strerror}); set TMPDIR to a folder with room for {_bytes_of(folder / tag)}, or "
            f"run `wherry import-deepspeed {folder} OUT` and load OUT"
        ) from None
    say("%s is DeepSpeed's: turned into one of Wherry's in %s, as %s", folder / tag, aside.parent, told)
    return aside


def _check_seen(folder: Path, ours: Path) -> None:
    if not ours.is_dir():
        raise CheckpointError(
            f"what rank 0 makes of DeepSpeed's checkpoint lies in {ours.parent}, which this rank does not see; let all "
            f"nodes share that folder (TMPDIR names a temporary one), or run `wherry import-deepspeed {folder} OUT` "
            "with an OUT that they share, and load OUT"
        )


def _turn(folder: Path, ours: Path, tag: str, groups: Sequence[Sequence[str]]) -> None:
    try:
        import_checkpoint(folder, ours, tag, groups)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _no_room(folder, tag, ours.parent, error) from None


# Of a disk that is full, or as full as its user may have it.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def _no_room(folder: Path, tag: str, place: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{folder / tag} is DeepSpeed's, which is turned into one of Wherry's to be loaded; there is no room for it in "
        f"{place}, up to {_bytes_of(folder / tag)} ({error.strerror}). Nothing was loaded; make room there, or run "
        f"`wherry import-deepspeed {folder} OUT` with an OUT on another disk, and load OUT"
    )


def _bytes_of(checkpoint: Path) -> str:
    return size(sum(path.stat().st_size for path in checkpoint.rglob("*.pt")))


@contextmanager
def _spoken_of_as(folder: Path, ours: Path) -> Iterator[None]:
    """What the log and errors would say of `ours`, they say of `folder`."""

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


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole weights and buffers of a checkpoint of Wherry's, under all their names."""
    manifest = read_manifest(checkpoint)
    found: dict[str, torch.Tensor] = {}
    with CheckpointReader(checkpoint, manifest) as source:
        for name, entry in manifest.entries.items():
            value = source.tensor(name, WEIGHT, dtype_named(entry.dtype))
            found.update(dict.fromkeys((name, *entry.aliases), value))
    return found
