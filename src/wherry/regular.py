"""Files that come from elsewhere: only regular ones are opened, and a small one is read up to a limit.

Opening a FIFO waits for a writer, and reading a device need not end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path) -> int:
    """A descriptor of a regular file, open for reading; an OSError says what else the path is."""
    try:
        # The kind is looked at before the opening too: opening some devices does something.
        _refuse_others(os.stat(path).st_mode, path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError:
        raise OSError(errno.EINVAL, "is no path: it holds a NUL or what is no text", str(path)) from None
    try:
        _refuse_others(os.fstat(descriptor).st_mode, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def leads_out(folder: str | Path, file: str | Path) -> str | None:
    """Where a file's links lead, if that is neither in its folder nor, in the cache of a hub, among the blobs of it."""
    real, root = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    return None if any(real.is_relative_to(place) for place in (root, *blobs)) else str(real)


def _refuse_others(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"is {kind}, expected a regular file", str(path))


def read_regular(path: str | Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; an OSError of a longer one, before it is read."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"is longer than the {limit:,} bytes that such a file may have", str(path))
    return data
