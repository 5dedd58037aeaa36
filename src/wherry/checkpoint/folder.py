"""Checkpoints of one folder: how a new one comes to be there whole or not at all, and how a whole one is found.

FOLDER/latest             the tag of the last finished checkpoint
FOLDER/TAG/               a finished checkpoint: it has its name only once it is complete
FOLDER/.TAG.partial.*     one being written; what a process that is gone has left is cleaned
FOLDER/.TAG.replaced.*    the one before of the same tag, for the moment between two renames
FOLDER/.TAG.removed.*     one being deleted
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import re
import shutil
import socket
import time
from pathlib import Path

from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import Pool, check_blocks, sync_folder, write_text
from wherry.checkpoint.format import NAME, Manifest, read_manifest
from wherry.observe.log import logger
from wherry.tiers.machine import processes

LATEST = "latest"
_STEP_TAG = re.compile(r"global_step(\d+)")
_ASIDE = re.compile(
    r"\.(?P<tag>.+)\.(?P<kind>partial|replaced|removed)\.(?P<host>[^.]*)\.(?P<pid>\d+)\.(?P<started>\d+)\.(?P<n>\d+)"
)
# Whether a writer on another machine, or in another container, still lives cannot be asked; after so long without a
# change it does not. One by the name of this machine is most often this one before it was started anew.
ABANDONED_S = 24 * 3600.0
RESTARTED_S = 3600.0
# Two renames that follow each other take no longer.
BETWEEN_RENAMES_S = 60.0
_EXCHANGE = 2
_AT_FDCWD = -100


def check_tag(tag: object) -> str:
    """A tag is the name of a folder."""
    text = str(tag)
    # `latest` is one line without blanks around it.
    plain = bool(text) and text.isprintable() and text == text.strip()
    if not plain or text == LATEST or text.startswith(".") or "/" in text:
        raise CheckpointError(f"tag {text!r}: expected the name of a folder, such as global_step100")
    return text


def step_tag(step: int) -> str:
    return f"global_step{step}"


# One being written.


def aside(folder: Path, tag: str, kind: str) -> Path:
    """A name beside the finished checkpoints that says whose it is."""
    number = 0
    while True:
        path = folder / f".{tag}.{kind}.{_host()}~{_space()}.{os.getpid()}.{_started(os.getpid())}.{number}"
        if not path.exists():
            return path
        number += 1


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _space() -> str:
    """Of the processes that this one can ask for by their ids."""
    return hashlib.sha256(processes().encode()).hexdigest()[:12]


def _started(pid: int) -> int:
    import psutil

    return int(psutil.Process(pid).create_time())


def begin(folder: Path, tag: str) -> Path:
    """The folder to write a new checkpoint into. What crashed processes have left is cleaned first."""
    _check_folder(folder)
    _make(folder)
    clean(folder)
    path = aside(folder, tag, "partial")
    path.mkdir()
    return path


def _make(folder: Path) -> None:
    """The folder, and those above it, with names that last."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync_folder(path.parent)


def commit(partial: Path, tag: str, manifest: Manifest, *, latest: bool) -> Path:
    """Make a complete checkpoint of what has been written aside."""
    folder = partial.parent
    for name, record in manifest.files.items():
        found = partial / name
        if not found.is_file() or found.stat().st_size != record.bytes:
            raise CheckpointError(
                f"{found} is not as its rank wrote it; all ranks must save to one folder that they share"
            )
    write_text(partial / NAME, manifest.to_text())
    final = folder / tag
    if final.exists():
        _replace(partial, final)
    else:
        os.rename(partial, final)
        sync_folder(folder)
    if latest:
        write_text(folder / LATEST, tag)
    return final


def _replace(partial: Path, final: Path) -> None:
    """Put a new checkpoint in the place of one of the same tag: at once where the system can, else by two renames."""
    folder = final.parent
    if _exchange(partial, final):
        sync_folder(folder)
        _delete(partial, final.name)
        return
    before = aside(folder, final.name, "replaced")
    os.rename(final, before)
    os.rename(partial, final)
    sync_folder(folder)
    _delete(before, final.name)


def _exchange(one: Path, other: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one))


def _delete(path: Path, tag: str) -> None:
    """Delete a checkpoint: no moment shows a part of it under a name that is looked at."""
    if _ASIDE.fullmatch(path.name) is None:
        hidden = aside(path.parent, tag, "removed")
        os.rename(path, hidden)
        path = hidden
    shutil.rmtree(path)


def discard(partial: Path) -> None:
    """Delete what was being written. Ranks that still write find the name gone, and so put nothing new into it."""
    found = _ASIDE.fullmatch(partial.name)
    assert found is not None, partial
    hidden = aside(partial.parent, found["tag"], "removed")
    try:
        os.rename(partial, hidden)
    except OSError as error:
        logger.warning("%s: what was written of this checkpoint is left (%s)", partial, error.strerror)
        return
    shutil.rmtree(hidden, ignore_errors=True)


def clean(folder: Path) -> list[Path]:
    """Delete what processes that are gone have left half-written, and say so; returns what was deleted."""
    cleaned = []
    for path in folder.glob(f".{LATEST}.*.tmp"):
        with contextlib.suppress(OSError):  # of a disk that is only read
            path.unlink()
    for path in sorted(folder.glob(".*")):
        found = _ASIDE.fullmatch(path.name)
        if found is None or not path.is_dir():
            continue
        final = folder / found["tag"]
        lost = found["kind"] == "replaced" and not final.exists() and (path / NAME).exists()
        if _alive(found, path, lost):
            continue
        if lost:
            try:
                os.rename(path, final)
            except OSError as error:
                logger.warning("%s: a checkpoint whose replacement was interrupted, left there (%s)", path, error)
                continue
            logger.warning("%s: a checkpoint whose replacement was interrupted is back in its place", final)
            continue
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            cleaned.append(path)
            if found["kind"] == "partial":
                logger.warning("%s: a checkpoint that was being written when its process ended is deleted", path)
    return cleaned


def _alive(found: re.Match[str], path: Path, lost: bool) -> bool:
    """Whether what belongs to a writer is still its own to finish; `lost` is a checkpoint between two renames."""
    host, _, space = found["host"].partition("~")
    if space != _space():
        try:
            if lost:
                return time.time() - path.stat().st_ctime < BETWEEN_RENAMES_S
            last = max((entry.stat().st_mtime for entry in path.iterdir()), default=path.stat().st_mtime)
        except OSError:
            return True
        return time.time() - last < (RESTARTED_S if host == _host() else ABANDONED_S)
    import psutil

    try:
        return _started(int(found["pid"])) == int(found["started"])
    except psutil.NoSuchProcess:
        return False


def prune(folder: Path, keep: int) -> list[str]:
    """Delete checkpoints named after a step, all but the `keep` written last; tags of a user's choice stay.

    A run that was taken back to an earlier step writes lower numbers than those that it left. What has a manifest
    that cannot be read, as one of a newer version, is not touched.
    """
    named = [tag for tag in newest_first(folder) if _STEP_TAG.fullmatch(tag)]
    latest = read_latest(folder)
    gone = [tag for tag in reversed(named[keep:]) if tag != latest]
    for tag in gone:
        _delete(folder / tag, tag)
    return gone


# Finding one.


def read_latest(folder: Path) -> str | None:
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read: {error}") from error


def _tags(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [path.name for path in folder.iterdir() if (path / NAME).is_file() and not path.name.startswith(".")]


def newest_first(folder: Path) -> list[str]:
    """The tags of all checkpoints that have a sound manifest, the newest first."""
    found = []
    for tag in _tags(folder):
        try:
            manifest = read_manifest(folder / tag)
        except CheckpointError:
            continue
        found.append((manifest.created, manifest.step, tag))
    return [tag for _, _, tag in sorted(found, reverse=True)]


def damage(folder: Path, manifest: Manifest, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a rank's share of a checkpoint's files, by their checksums; nothing if they are whole."""
    blocks = [(name, index) for name, file in manifest.files.items() for index in range(max(1, len(file.blocks)))]
    mine = blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]
    problems: list[str] = []
    with contextlib.closing(Pool()) as pool:
        for name, found in itertools.groupby(mine, key=lambda block: block[0]):
            own = [index for _, index in found]
            problems += check_blocks(folder / name, manifest.files[name], range(own[0], own[-1] + 1), pool)
    return list(dict.fromkeys(problems))


def whole(folder: Path) -> bool:
    """Whether a checkpoint can be loaded; every byte is read."""
    try:
        return not damage(folder, read_manifest(folder))
    except CheckpointError:
        return False


def newest_whole(folder: Path, but: str | None = None) -> str | None:
    """The tag of the newest checkpoint that can be loaded; every byte of it is read."""
    return next((tag for tag in newest_first(folder) if tag != but and whole(folder / tag)), None)


def locate(folder: Path, tag: str | None, *, cleans: bool = True) -> str | None:
    """The tag to load: the one given, else what `latest` says; None where there is no checkpoint at all.

    A first checkpoint that is complete and was not yet `latest` when its writer died is found too. "." is the folder
    itself, where that is a checkpoint. `cleans`: what crashed processes have left goes; who only looks leaves it.
    """
    _check_folder(folder)
    if cleans and folder.is_dir():
        clean(folder)
    if tag is not None:
        tag = check_tag(tag)
        if (folder / tag).is_dir():
            return tag
        there = ", ".join(newest_first(folder)) or "none"
        logger.warning("%s holds no checkpoint %s; those that are there: %s", folder, tag, there)
        return None
    if (folder / NAME).is_file():
        return "."
    try:
        latest = read_latest(folder)
        if latest is not None:
            return check_tag(latest)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / LATEST} is damaged: {error}; {offer(folder, None)}") from error
    # One whose manifest is damaged is no reason to begin anew: whoever loads it hears of it.
    found = next(iter([*newest_first(folder), *sorted(_tags(folder), reverse=True)]), None)
    if found is not None:
        logger.warning("%s holds no %s that names a checkpoint: the newest is %s", folder, LATEST, found)
    return found


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder of checkpoints")


def offer(folder: Path, tag: str | None) -> str:
    """What to do when checkpoint `tag` cannot be loaded, or that which is meant is not known."""
    other = newest_whole(folder, but=tag)
    if other is None:
        return f"{folder} holds no {'other ' if tag else ''}whole checkpoint"
    return f"the newest whole one is {other}: load it with tag={other!r}, or name {folder / other}"
