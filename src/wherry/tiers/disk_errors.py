"""What goes wrong on the disk tier, and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from wherry.errors import WherryError
from wherry.native.disk import Cause, DiskFailure

_HINTS = {
    errno.ENOSPC: "free some space on that file system, or name another path",
    errno.EDQUOT: "the user's quota there is used up: free some space, or name another path",
    errno.EFBIG: "the size of one file is limited there: raise `ulimit -f`, or name a path on another file system",
    errno.EIO: "the drive or its link reported it: look at `dmesg` and at the drive's health",
    errno.EROFS: "the file system is or became read-only: look at `dmesg`, then mount it for writing again",
    errno.EINVAL: "the drive refused the transfer's size or alignment: use a block size that its sector divides",
}


class DiskError(OSError):
    """A read or write of the disk tier that failed, raised where its ticket is waited for.

    `unit` names the record, `filename` the file, `offset` the place in it and `nbytes` the length of the transfer that
    failed; `errno` is set where the system gave one.
    """

    def __init__(self, message: str, code: int | None, path: str, offset: int, nbytes: int, unit: str) -> None:
        super().__init__(code, message, path)
        self.message, self.offset, self.nbytes, self.unit = message, offset, nbytes, unit

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.errno, self.filename, self.offset, self.nbytes, self.unit)


class DiskSpaceError(WherryError):
    """The disk tier does not fit: `missing` bytes more are needed under `path`."""

    def __init__(self, message: str, missing: int, path: str) -> None:
        super().__init__(message)
        self.missing, self.path = missing, path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.missing, self.path)


class DiskUseError(WherryError):
    """The disk tier was asked for something it cannot do: an option, a buffer or a range."""


def disk_error(failure: DiskFailure, write: bool, unit: str, paths: Sequence[str]) -> DiskError:
    """The error to raise for a request's failure."""
    path = paths[failure.lane]
    what, advice = _explain(failure, write, path)
    action = "write" if write else "read"
    where = f"{failure.wanted} bytes at offset {failure.offset} of {path}"
    message = f"unit {unit!r}: {action} of {where} failed: {what}; {advice}"
    code = failure.code if failure.cause is Cause.SYSTEM else errno.EIO
    return DiskError(message, code, path, failure.offset, failure.wanted, unit)


def _explain(failure: DiskFailure, write: bool, path: str) -> tuple[str, str]:
    if failure.cause is Cause.SYSTEM:
        name = errno.errorcode.get(failure.code, str(failure.code))
        return f"{os.strerror(failure.code)} ({name})", hint(failure.code)
    if failure.cause is Cause.SHORT:
        advice = (
            "the drive took no more: look at its free space and at `dmesg`"
            if write
            else "the file is shorter than what was reserved: something truncated it; keep other programs away from it"
        )
        return f"short {'write' if write else 'read'}, {failure.got} of {failure.wanted} bytes", advice
    if failure.cause is Cause.CHECKSUM:
        return (
            "checksum mismatch: what was read is not what was written",
            "something else writes to the file, or a drive, its link or the memory is faulty: look at `dmesg`",
        )
    return (
        "the file vanished: its last name was removed while in use",
        f"keep temporary-file cleaners away from {os.path.dirname(path)}, or name another path",
    )


def hint(code: int | None) -> str:
    """What to do about an errno."""
    return _HINTS.get(code or 0, "look at the system's log (`dmesg`), or name another path")


def human(nbytes: int) -> str:
    """A size as people read it: 1.50 GiB."""
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{nbytes} bytes" if units[0] == "bytes" else f"{value:.2f} {units[0]}"
