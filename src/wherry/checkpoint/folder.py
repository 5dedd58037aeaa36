"""Checkpoints of one folder: how a new one comes to be there whole or not at all, and how a whole one is found.

FOLDER/latest             the tag of the last finished checkpoint
FOLDER/TAG/               a finished checkpoint: it has its name only once it is complete
FOLDER/.TAG.partial.*     one being written, with a file `lock` that its writer has locked
FOLDER/.TAG.replaced.*    the one before of the same tag, for the moment between two renames
FOLDER/.TAG.removed.*     one being deleted
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from wherry.checkpoint.checks import Expected, check, expected_tensors, read_manifest, unlike
from wherry.checkpoint.errors import CheckpointError, describe
from wherry.checkpoint.files import FilePool, TensorReader, check_blocks, sync_folder, write_text
from wherry.checkpoint.format import NAME, Manifest
from wherry.errors import one_line
from wherry.observe.log import logger
from wherry.regular import read_regular

LATEST = "latest"
LOCK = "lock"
_STEP_TAG = re.compile(r"global_step(\d+)")
_ASIDE = re.compile(r"\.(?P<tag>.+)\.(?P<kind>partial|replaced|removed)\.([0-9a-f]{12}|.+~.+)")
# What has no lock, as on a disk that knows of none, is left by a writer that is gone once nothing of it has changed so
# long.
ABANDONED_S = 24 * 3600.0


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


class Partial:
    """A checkpoint that is being written, beside the finished ones; what crashed processes have left goes first.

    Its lock goes with the process, however that ends.
    """

    def __init__(self, folder: Path, tag: str) -> None:
        _check_folder(folder)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:
            sync_folder(path.parent)
        clean(folder)
        final = folder / tag
        if final.exists() and not (final / NAME).exists() and not (final.is_dir() and not any(final.iterdir())):
            raise CheckpointError(f"{final} is there and is no checkpoint; give another tag, or move it away")
        self.tag = tag
        self.path = _aside(folder, tag, "partial")
        try:
            self.path.mkdir()
            # A file, which closes with this object, also where Ctrl-C lets nobody have it.
            self._lock = open(self.path / LOCK, "w+b")  # noqa: SIM115
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError:  # a disk that knows of no locks
                (self.path / LOCK).unlink()
        except BaseException:
            _remove(self.path)
            raise

    def commit(self, manifest: Manifest, *, latest: bool) -> Path:
        """Make a complete checkpoint of what has been written. Once it has its name nothing is an error any more."""
        check(manifest)
        for name, record in manifest.files.items():
            found = self.path / name
            if not found.is_file() or found.stat().st_size != record.bytes:
                raise CheckpointError(
                    f"{found} is not as its rank wrote it; all ranks must save to one folder that they share"
                )
        write_text(self.path / NAME, manifest.to_text())
        folder, final = self.path.parent, self.path.parent / self.tag
        before = _aside(folder, self.tag, "replaced")
        if final.exists():
            os.rename(final, before)
        os.rename(self.path, final)
        sync_folder(folder)
        _remove(before)
        try:
            (final / LOCK).unlink(missing_ok=True)
            if latest:
                write_text(folder / LATEST, self.tag)
        except OSError as error:
            logger.warning("%s is whole, and %s cannot be written (%s): load it by its tag", final, LATEST, error)
        self._unlock()
        return final

    def drop(self) -> None:
        """Delete what was being written. Ranks that still write find the name gone, and so put nothing new into it."""
        hidden = _aside(self.path.parent, self.tag, "removed")
        try:
            os.rename(self.path, hidden)
        except OSError as error:
            logger.warning("%s: what was written of this checkpoint is left (%s)", self.path, error.strerror)
        _remove(hidden)
        self._unlock()

    def _unlock(self) -> None:
        self._lock.close()


def _aside(folder: Path, tag: str, kind: str) -> Path:
    return folder / f".{tag}.{kind}.{uuid.uuid4().hex[:12]}"


def _remove(path: Path) -> bool:
    """Delete a folder aside. What is left of it, whoever next saves or loads here tries to delete again."""
    try:
        if path.is_symlink():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    except (OSError, RecursionError) as error:  # of folders in folders without end
        logger.warning("%s cannot be deleted, and stays (%s)", path, error)
        return False


def clean(folder: Path) -> list[Path]:
    """Delete what processes that are gone have left half-written, and say so; returns what was deleted."""
    cleaned = []
    for path in folder.glob(f".{LATEST}.*.tmp"):
        with contextlib.suppress(OSError):  # of a disk that is only read
            path.unlink()
    left = [(path, found) for path in sorted(folder.glob(".*")) if (found := _ASIDE.fullmatch(path.name))]
    written = {found["tag"]: path for path, found in left if found["kind"] == "partial" and not _is_abandoned(path)}
    for path, found in left:
        final = folder / found["tag"]
        if path in written.values() or path.is_symlink() or not path.is_dir():
            continue
        if found["kind"] == "replaced" and not final.exists() and _has_manifest(path):
            if found["tag"] not in written:
                _put_back(path, final)
            continue
        if _remove(path):
            cleaned.append(path)
            if found["kind"] == "partial":
                logger.warning("%s: a checkpoint that was being written when its process ended is deleted", path)
    return cleaned


def _is_abandoned(partial: Path) -> bool:
    """Whether nobody writes this any more."""
    try:
        with open(partial / LOCK, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # there is no lock, or none to be had
        try:
            last = max((entry.stat().st_mtime for entry in partial.iterdir()), default=partial.stat().st_mtime)
        except OSError:
            return False
        return time.time() - last > ABANDONED_S


def _put_back(replaced: Path, final: Path) -> None:
    try:
        os.rename(replaced, final)
    except OSError as error:
        logger.warning("%s: a checkpoint whose replacement was interrupted, left there (%s)", replaced, error)
    else:
        logger.warning("%s: a checkpoint whose replacement was interrupted is back in its place", final)


def prune(folder: Path, keep: int, saved: str) -> list[str]:
    """Delete checkpoints named after a step, all but the `keep` highest steps up to that of the one just `saved`; tags
    of a user's choice stay. So do those of later steps, which a run that was taken back has left, and what has a
    manifest that cannot be read, as one of a newer version.
    """
    named = [tag for tag in newest_first(folder) if _STEP_TAG.fullmatch(tag)]
    at = named.index(saved) if saved in named else 0
    if at:
        logger.warning(
            "%s: of a later step than %s, which is saved: a run was taken back. They stay beside the last %d; delete "
            "them if nobody goes on from them", ", ".join(named[:at]), saved, keep,
        )  # fmt: skip
    latest = read_latest(folder)
    gone = [tag for tag in reversed(named[at + keep :]) if tag != latest]
    for tag in gone:
        # No moment shows a part of it under a name that is looked at.
        hidden = _aside(folder, tag, "removed")
        os.rename(folder / tag, hidden)
        _remove(hidden)
    return gone


# Finding one.


def read_latest(folder: Path) -> str | None:
    try:
        return read_regular(folder / LATEST, 4096).decode().strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read: {describe(error)}") from error


def _tags(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [path.name for path in folder.iterdir() if not path.name.startswith(".") and _has_manifest(path)]


def _has_manifest(path: Path) -> bool:
    try:
        return (path / NAME).is_file()
    except OSError:  # of another user's, or of a disk that has a fault
        return False


def newest_first(folder: Path) -> list[str]:
    """The tags of all checkpoints that have a sound manifest, that of the highest step first."""
    found = []
    for tag in _tags(folder):
        try:
            manifest = read_manifest(folder / tag)
        except CheckpointError as error:
            logger.warning("%s is passed over: %s", folder / tag, error)
            continue
        found.append((manifest.step, manifest.created, tag))
    return [tag for _, _, tag in sorted(found, reverse=True)]


def damage(folder: Path, manifest: Manifest, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a rank's share of a checkpoint's files, by their checksums and by what the manifest says of
    their tensors; nothing if they are whole."""
    blocks = [(name, index) for name, file in manifest.files.items() for index in range(max(1, len(file.blocks)))]
    mine = blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]
    problems: list[str] = []
    expected = expected_tensors(manifest)
    with contextlib.closing(FilePool()) as pool:
        for name, found in itertools.groupby(mine, key=lambda block: block[0]):
            own = [index for _, index in found]
            wrong = check_blocks(folder / name, manifest.files[name], range(own[0], own[-1] + 1), pool)
            if not wrong and own[0] == 0:
                wrong = _unlike(folder / name, expected[name], pool)
            problems += wrong
    return list(dict.fromkeys(problems))


def _unlike(path: Path, expected: dict[str, Expected], pool: FilePool) -> list[str]:
    try:
        with contextlib.closing(TensorReader(path, pool)) as reader:
            found = unlike(reader.tensors, expected)
    except CheckpointError as error:
        found = str(error)
    return [] if found is None else [one_line(f"{path.name}: {found}", 1000)]


def newest_whole(folder: Path, but: str | None = None) -> str | None:
    """The tag of the newest checkpoint that can be loaded, that of `latest` before all; every byte of it is read."""
    found = newest_first(folder)
    try:
        latest = read_latest(folder)
    except CheckpointError as error:  # any other that is whole will do
        logger.warning("%s", error)
    else:
        found.sort(key=lambda tag: tag != latest)
    return next((tag for tag in found if tag != but and _whole(folder / tag)), None)


def _whole(folder: Path) -> bool:
    try:
        return not damage(folder, read_manifest(folder))
    except CheckpointError as error:  # gone, or another's, since the folder was listed
        logger.warning("%s is passed over: %s", folder, error)
        return False


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
    if os.path.lexists(folder / NAME):
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
