"""Which backend a path allows: io_uring, threads with O_DIRECT, or buffered I/O; and why not a better one."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from wherry.native.disk import SECTOR
from wherry.tiers.disk_errors import DiskUseError, hint

BACKENDS = ("io_uring", "threads", "buffered")
# Names the backend where a caller leaves the choice, as engines do: for a system whose io_uring or O_DIRECT is amiss.
ENVIRONMENT = "WHERRY_DISK"
O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Probe:
    """What was chosen for some paths. `reasons` says why nothing better was."""

    backend: str
    native: bool
    reasons: tuple[str, ...] = ()

    @property
    def direct(self) -> bool:
        return self.backend != "buffered"


def probe(paths: str | Sequence[str], backend: str | None = None, native: bool | None = None) -> Probe:
    """The best backend that all the paths allow, or the named one (here, or in `WHERRY_DISK`) if they do.

    `native` is for tests: False leaves the C++ engine out, True insists on it.

    >>> probe("/dev/shm").backend in BACKENDS
    True
    """
    named = os.environ.get(ENVIRONMENT, "").strip().lower() if backend is None else ""
    backend, what = (named, f"{ENVIRONMENT}={named}") if named else (backend, f"disk backend {backend!r}")
    if backend is not None and backend not in BACKENDS:
        raise DiskUseError(f"{what}: expected one of {', '.join(BACKENDS)}, or nothing for the best")
    paths = [paths] if isinstance(paths, str) else paths
    missing = _why_no_library() if native is not False else "the native engine was left out by request"
    if native and missing:
        raise DiskUseError(f"the native disk engine was asked for and is missing: {missing}")
    uring = missing or _why_no_uring()
    direct = next(filter(None, map(_why_no_direct, paths)), "")
    why_not = {"io_uring": uring or direct, "threads": direct, "buffered": ""}
    if backend is not None:
        if why_not[backend]:
            raise DiskUseError(f"{what} was asked for and does not work here: {why_not[backend]}")
        better = BACKENDS[: BACKENDS.index(backend)] if named else ()
        return Probe(backend, not missing, tuple(f"no {name}: {what} asks for {backend}" for name in better))
    chosen = next(name for name in BACKENDS if not why_not[name])
    reasons = tuple(f"no {name}: {why}" for name, why in why_not.items() if why)
    return Probe(chosen, not missing, reasons)


def _why_no_library() -> str:
    from wherry import native

    library = native.library()
    if library is None:
        return f"the native library is not active: {native.why_not()}"
    if not hasattr(library, "wherry_disk_open"):
        return "the native library has no disk engine: it is of an older build; reinstall Wherry to build it again"
    return ""


def _why_no_uring() -> str:
    from wherry import native
    from wherry.native.disk import probe_uring

    library = native.library()
    assert library is not None
    code = probe_uring(library)
    if code == 0:
        return ""
    if code in (errno.EPERM, errno.EACCES):
        return "the system forbids io_uring (a container's seccomp profile, or kernel.io_uring_disabled)"
    return f"io_uring does not work: {os.strerror(code)} ({errno.errorcode.get(code, code)})"


def _why_no_direct(path: str) -> str:
    """Empty when a sector can be written to and read from a file under the path with O_DIRECT."""
    if not O_DIRECT:
        return "this system has no O_DIRECT"
    try:
        file, name = tempfile.mkstemp(prefix=".wherry-probe-", dir=path)
    except OSError as error:
        raise _no_use(path, "making a file", error) from error
    try:
        os.close(file)
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC | O_DIRECT)
        try:
            sector = mmap.mmap(-1, SECTOR)
            moved = os.pwritev(file, [sector], 0), os.preadv(file, [sector], 0)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            return f"the file system of {path} has no O_DIRECT ({error.strerror})"
        raise _no_use(path, "writing a first sector", error) from error
    finally:
        os.unlink(name)
    return "" if moved == (SECTOR, SECTOR) else f"O_DIRECT under {path} moved {moved} bytes of {SECTOR}"


def _no_use(path: str, what: str, error: OSError) -> DiskUseError:
    return DiskUseError(f"disk path {path}: {what} failed: {error.strerror}; {hint(error.errno)}")
