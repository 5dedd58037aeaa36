"""Where io_uring or O_DIRECT is refused, the next best backend does the same work, and reports the reason."""

from __future__ import annotations

import errno
import itertools
import os
from functools import partial

import pytest
import torch

from wherry import native
from wherry.native import disk as engines
from wherry.tiers import disk_probe
from wherry.tiers.disk import DiskError, DiskStore, DiskUseError, Fault, probe

BLOCK = 64 << 10
needs_library = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")


def forbid(uring=0, direct=True, **environment):
    """Refuse io_uring with a code of the system's, or O_DIRECT, or set the environment."""

    def patch(monkeypatch):
        if uring:
            monkeypatch.setattr(engines, "probe_uring", lambda library: uring)
        if not direct:
            monkeypatch.setattr(disk_probe, "O_DIRECT", 0)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return patch


NO_DIRECT = "no threads: this system has no O_DIRECT"
# An obstacle: the backend that is taken then, and its reasons against those above it.
CASES = {
    "io_uring forbidden": (forbid(errno.EPERM), "threads", ["no io_uring: the system forbids io_uring"]),
    "neither": (
        forbid(errno.ENOSYS, direct=False),
        "buffered",
        ["no io_uring: io_uring does not work: Function not implemented", NO_DIRECT],
    ),
    "no library": (
        forbid(direct=False, WHERRY_ISA="torch"),
        "buffered",
        ["no io_uring: the native library is not active: WHERRY_ISA=torch", NO_DIRECT],
    ),
    "WHERRY_DISK=threads": (
        forbid(WHERRY_DISK="threads"),
        "threads",
        ["no io_uring: WHERRY_DISK=threads asks for threads"],
    ),
    "WHERRY_DISK=buffered": (
        forbid(WHERRY_DISK=" Buffered "),
        "buffered",
        ["no io_uring: WHERRY_DISK=buffered asks", "no threads: WHERRY_DISK=buffered asks for buffered"],
    ),
}


def test_a_busy_system_is_retried(tmp_path, pool, monkeypatch):
    CASES["no library"][0](monkeypatch)
    busy = itertools.cycle([True, True, False])

    def ask(system, *given):
        if next(busy):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return system(*given)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partial(ask, getattr(os, name)))
    with DiskStore(tmp_path, block_size=BLOCK) as store:
        out, back = pool.take(3 * BLOCK).fill_(7), pool.take(3 * BLOCK)
        record = store.reserve("weights", 3 * BLOCK)
        store.write(record, out).wait()
        store.read(record, back).wait()
        assert torch.equal(out, back)


@needs_library
@pytest.mark.parametrize("case", CASES)
def test_the_next_best_does_the_same(tmp_path, pool, monkeypatch, case):
    refuse, backend, reasons = CASES[case]
    direct = probe(str(tmp_path)).backend != "buffered"
    refuse(monkeypatch)
    if backend == "threads" and not direct:
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT")
    found = probe(str(tmp_path))
    assert found.backend == backend
    assert len(found.reasons) == len(reasons)
    assert all(said.startswith(reason) for said, reason in zip(found.reasons, reasons, strict=True))
    nbytes = 5 * BLOCK + 4321
    with DiskStore(tmp_path, block_size=BLOCK, queue_depth=4, checksum=True) as store:
        assert store.probe == found
        store.attach(pool)
        records = [store.reserve(f"layers.{i}", nbytes) for i in range(3)]
        out, back = pool.take(nbytes).random_(0, 256), pool.take(nbytes)
        for ticket in [store.write(record, out) for record in records]:
            ticket.wait()
        for record in records:
            store.read(record, back.zero_()).wait()
            assert torch.equal(out, back)
        store.inject(Fault("read", errno=errno.EIO))
        with pytest.raises(DiskError, match=r"layers.1.*Input/output error"):
            store.read(records[1], back).wait()
        store.read(records[1], back).wait()
        assert (store.stats.failures, store.stats.fixed) == (1, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_none_or_cannot_be_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_DISK", "aio")
    with pytest.raises(DiskUseError, match="WHERRY_DISK=aio: expected one of io_uring, threads, buffered"):
        DiskStore(tmp_path)
    monkeypatch.setenv("WHERRY_DISK", "threads")
    forbid(direct=False)(monkeypatch)
    with pytest.raises(DiskUseError, match=r"WHERRY_DISK=threads was asked for and does not work here: .*O_DIRECT"):
        DiskStore(tmp_path)
    # The caller's choice is above the environment's.
    assert probe(str(tmp_path), "buffered").reasons == ()
    assert list(tmp_path.iterdir()) == []


def test_a_path_where_no_file_can_be_made_is_an_error(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_probe.tempfile, "mkstemp", full)
    with pytest.raises(DiskUseError, match=r"making a file failed: No space left on device; free some space on that"):
        DiskStore(tmp_path)
    monkeypatch.undo()
    if probe(str(tmp_path)).direct:  # else nothing is written
        monkeypatch.setattr(os, "pwritev", lambda *_: full())
        with pytest.raises(DiskUseError, match="writing a first sector failed: No space left"):
            DiskStore(tmp_path)
    assert list(tmp_path.iterdir()) == []
