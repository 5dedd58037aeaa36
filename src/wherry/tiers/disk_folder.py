"""The folder of one run's swap files: private, locked while the run lives, swept by a later run if it was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path

from wherry.observe.log import logger
from wherry.tiers.disk_errors import DiskUseError
from wherry.tiers.host import machine

_NAME = re.compile(r"wherry-swap-(?P<uid>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]+")
_LOCK = "lock"
_NO_LOCKS = "no locks here"
# A folder without a lock file is one that is being made just now, or one whose maker died in that moment.
_UNLOCKED_GRACE_SECONDS = 60


def make_folder(path: str) -> None:
    """Make the folder that a user has named, in one that is there. Of several ranks, the one that makes it says so."""
    try:
        os.mkdir(path)
        logger.warning("disk path %s was not there, and is made", path)
    except OSError as error:
        if os.path.isdir(path):
            return
        why = "" if error.errno == errno.EEXIST else f", and cannot be made ({error.strerror})"
        raise DiskUseError(f"disk path {path!r} is not a directory{why}: make it, or name another") from None


class SwapFolder:
    """A fresh folder under `parent`, and the lock that tells others it is in use."""

    def __init__(self, parent: str | os.PathLike[str], label: str | None = None) -> None:
        pid = os.getpid()
        name = f"wherry-swap-{os.getuid()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(4)}"
        self.path = Path(parent).absolute() / name
        self._owner = pid
        os.mkdir(self.path, 0o700)
        self._lock = -1
        try:
            self._take_lock(label or "")
        except OSError:
            self.close()
            raise

    def _take_lock(self, label: str) -> None:
        # Renamed when it is locked, so that no sweeper ever sees it unlocked.
        new = self.path / f"{_LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        # Only a file system without locks refuses one on a new file; the process id then stands for it.
        note = "" if _try_lock(self._lock) else f"{_NO_LOCKS}\n"
        os.write(self._lock, f"{note}boot {machine()}\n{label}\n".encode())
        os.rename(new, self.path / _LOCK)

    def create(self, name: str) -> Path:
        """A new empty file that only this user can read."""
        path = self.path / name
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        return path

    def close(self) -> None:
        """Remove the folder with everything in it. In a forked child this is the parent's to do."""
        lock, self._lock = self._lock, -1
        try:
            if os.getpid() == self._owner and self.path.exists():
                shutil.rmtree(self.path)
        finally:
            if lock >= 0:
                os.close(lock)


def sweep(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove the folders under `parent` that dead runs of this user left behind, never those of live ones.

    A folder in use is locked by its run, so a process id that was given again, or one of another container, does no
    harm. Returns the folders removed.
    """
    removed = []
    with os.scandir(parent) as entries:
        found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for path in found:
        match = _NAME.fullmatch(path.name)
        if match is None or int(match["uid"]) != os.getuid():
            continue
        if _is_dead(path, int(match["pid"]), int(match["started"])):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                removed.append(path)
    return removed


def _is_dead(path: Path, pid: int, started: int) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        running = _started(pid) == started
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return not running and time.time() - status.st_mtime > _UNLOCKED_GRACE_SECONDS
    except OSError:
        return False  # it went away meanwhile, or is not ours to touch
    try:
        if running:
            return False
        text = os.read(lock, 4096).decode(errors="replace")
        if text.startswith(_NO_LOCKS):
            # Without locks, another machine that shares this path cannot be told from a dead run of this one.
            return f"boot {machine()}\n" in text
        return _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def _started(pid: int) -> int | None:
    """When the process started, in the system's own ticks; None if no such process runs, or the system cannot say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may itself hold brackets and blanks.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
