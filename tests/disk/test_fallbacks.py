"""Where io_uring or O_DIRECT is refused, the next best backend does the same work, and reports the reason."""

from __future__ import annotations

import errno
import itertools
import os
import textwrap

import pytest
import torch

from wherry import native
from wherry.native import disk as engines
from wherry.tiers import disk_probe
from wherry.tiers.disk import DiskError, DiskStore, DiskUseError, Fault, probe

BLOCK = 64 << 10
needs_library = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")


def refuse_uring(monkeypatch, code=errno.EPERM):
    monkeypatch.setattr(engines, "probe_uring", lambda library: code)


def refuse_direct(monkeypatch):
    monkeypatch.setattr(disk_probe, "O_DIRECT", 0)


def named(name):
    return lambda monkeypatch: monkeypatch.setenv("WHERRY_DISK", name)


def both(monkeypatch):
    refuse_uring(monkeypatch, errno.ENOSYS)
    refuse_direct(monkeypatch)


def without_library(monkeypatch):
    monkeypatch.setenv("WHERRY_ISA", "torch")
    refuse_direct(monkeypatch)


# An obstacle: the backend that is taken then, and its reasons against those above it.
CASES = {
    "io_uring forbidden": (refuse_uring, "threads", ["no io_uring: the system forbids io_uring"]),
    "no io_uring and no O_DIRECT": (
        both,
        "buffered",
        ["no io_uring: io_uring does not work: Function not implemented", "no threads: this system has no O_DIRECT"],
    ),
    "no library and no O_DIRECT": (
        without_library,
        "buffered",
        ["no io_uring: the native library is not active", "no threads: this system has no O_DIRECT"],
    ),
    "WHERRY_DISK=threads": (named("threads"), "threads", ["no io_uring: WHERRY_DISK=threads asks for threads"]),
    "WHERRY_DISK=buffered": (
        named(" Buffered "),
        "buffered",
        ["no io_uring: WHERRY_DISK=buffered asks", "no threads: WHERRY_DISK=buffered asks for buffered"],
    ),
}


def often_busy(system):
    busy = itertools.cycle([True, True, False])

    def ask(*given):
        if next(busy):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return system(*given)

    return ask


def test_a_busy_system_is_retried(tmp_path, pool, monkeypatch):
    without_library(monkeypatch)
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, often_busy(getattr(os, name)))
    with DiskStore(tmp_path, block_size=BLOCK) as store:
        buffer = pool.take(3 * BLOCK)
        buffer.fill_(7)
        record = store.reserve("weights", 3 * BLOCK)
        store.write(record, buffer).wait()
        buffer.zero_()
        store.read(record, buffer).wait()
        assert bool((buffer == 7).all())
        pool.give(buffer)


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
    refuse_direct(monkeypatch)
    with pytest.raises(DiskUseError, match=r"WHERRY_DISK=threads was asked for and does not work here: .*O_DIRECT"):
        DiskStore(tmp_path)
    # The caller's choice is above the environment's.
    assert probe(str(tmp_path), "buffered").reasons == ()
    assert list(tmp_path.iterdir()) == []


# A filter of system calls, as of containers: those of io_uring fail with EPERM, all others pass.
FORBID = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x35, 0, 2, 425), (0x25, 1, 0, 427), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    raise SystemExit("no filter: " + str(ctypes.get_errno()))
"""


@needs_library
def test_a_kernel_that_forbids_io_uring(tmp_path, forks):
    script = FORBID + textwrap.dedent(f"""
        from wherry.tiers.buffers import HostPool
        from wherry.tiers.disk import DiskStore
        with DiskStore({str(tmp_path)!r}) as store, HostPool() as pool:
            record, out, back = store.reserve("layers.0", 1 << 20), pool.take(1 << 20), pool.take(1 << 20)
            store.write(record, out.random_(0, 256)).wait()
            store.read(record, back).wait()
            print(store.backend, bool((out == back).all()), store.probe.reasons[0])
    """)
    done = forks.run("-c", script, folder=tmp_path, launched=False)
    if done.stderr.startswith("no filter: "):
        pytest.skip(f"this system has no filters of system calls: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
    backend, equal, reason = done.stdout.strip().split(" ", 2)
    assert backend in ("threads", "buffered") and equal == "True"
    assert reason == (
        "no io_uring: the system forbids io_uring (a container's seccomp profile, or kernel.io_uring_disabled)"
    )


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
