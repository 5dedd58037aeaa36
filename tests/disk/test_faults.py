"""A failure is raised at the ticket of its transfer, names the file and offset, and disturbs nothing else."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import threading

import pytest
import torch

from wherry.tiers.disk import DiskError, DiskSpaceError, DiskStore, Fault

SECTOR = 4096
BLOCK = 64 << 10


@pytest.fixture
def out(pool):
    return pool.take(8 * BLOCK).random_(0, 256)


@pytest.fixture
def back(pool):
    return pool.take(8 * BLOCK)


def failing(ticket) -> DiskError:
    with pytest.raises(DiskError) as caught:
        ticket.wait()
    with pytest.raises(DiskError) as again:
        ticket.wait()
    assert again.value is caught.value
    return caught.value


@pytest.mark.parametrize(
    ("direction", "code"),
    [("read", errno.EIO), ("write", errno.ENOSPC), ("write", errno.EDQUOT), ("read", errno.ENODEV)],
)
def test_an_error_of_the_system(store, out, back, direction, code):
    healthy, sick = store.reserve("layers.0", 8 * BLOCK), store.reserve("layers.1", 8 * BLOCK)
    for record in (healthy, sick):
        store.write(record, out).wait()
    store.inject(Fault(direction, errno=code, skip=2))
    ticket = store.write(sick, out) if direction == "write" else store.read(sick, back)
    error = failing(ticket)
    assert (error.errno, error.unit, error.nbytes) == (code, "layers.1", BLOCK)
    assert error.filename in store.paths and error.offset % BLOCK == 0
    for part in ("layers.1", direction, error.filename, str(error.offset), os.strerror(code), "; "):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.errno, copy.filename, copy.unit) == (str(error), code, error.filename, error.unit)
    store.read(healthy, back).wait()
    assert torch.equal(out, back)
    store.write(sick, out).wait()
    store.read(sick, back.zero_()).wait()
    assert torch.equal(out, back)
    assert store.stats.failures == 1


def test_only_the_ticket_that_failed_raises(make, roots, out, back):
    # On one path chunks go in the order of their requests.
    store = make(roots[0])
    store.inject(Fault("write", errno=errno.EIO, skip=8))
    records = [store.reserve(f"layers.{i}", 8 * BLOCK) for i in range(3)]
    first, second, third = (store.write(record, out) for record in records)
    first.wait()
    assert failing(second).unit == "layers.1"
    third.wait()
    for record in (records[0], records[2]):
        store.read(record, back.zero_()).wait()
        assert torch.equal(out, back)


def test_a_partial_transfer_goes_on(store, out, back):
    for direction in ("read", "write"):
        for limit in (SECTOR, 3 * SECTOR + 100):
            store.inject(Fault(direction, limit=limit))
    record = store.reserve("layers.0", 8 * BLOCK)
    store.write(record, out).wait()
    store.read(record, back).wait()
    assert torch.equal(out, back)
    assert store.stats.resumed == 4


@pytest.mark.parametrize(("direction", "limit"), [("read", 0), ("write", 100)])
def test_a_transfer_that_moves_nothing_is_short(store, out, back, direction, limit):
    store.inject(Fault(direction, limit=limit, skip=3))
    record = store.reserve("layers.3", 8 * BLOCK)
    write = store.write(record, out)
    if direction == "read":
        write.wait()
    error = failing(write if direction == "write" else store.read(record, back))
    assert f"short {direction}, {limit} of {BLOCK} bytes" in str(error)
    assert ("something truncated it" if direction == "read" else "the drive took no more") in str(error)
    assert error.errno == errno.EIO


def test_a_file_that_vanished(store, out, back):
    record = store.reserve("layers.0", 8 * BLOCK)
    store.write(record, out).wait()
    os.unlink(store.paths[1])
    for ticket in (store.read(record, back), store.write(record, out)):
        error = failing(ticket)
        assert "vanished" in str(error) and error.filename == store.paths[1]
    store.read(record, back, nbytes=BLOCK).wait()
    assert torch.equal(back[:BLOCK], out[:BLOCK])


@pytest.mark.parametrize("checksum", [True, False])
def test_a_checksum_finds_a_changed_bit(make, out, back, checksum):
    store = make(checksum=checksum)
    record = store.reserve("layers.5", 8 * BLOCK)
    store.write(record, out).wait()
    with open(store.paths[1], "r+b", buffering=0) as file:
        place = BLOCK + 2 * SECTOR + 17
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), place)
        os.fsync(file.fileno())
    if not checksum:
        store.read(record, back).wait()
        assert not torch.equal(out, back)
        return
    error = failing(store.read(record, back))
    assert "checksum mismatch" in str(error)
    assert (error.filename, error.offset) == (store.paths[1], BLOCK + 2 * SECTOR)
    store.read(record, back, nbytes=BLOCK).wait()


def test_a_checksum_covers_every_part(make, pool):
    store = make(checksum=True)
    nbytes = 3 * BLOCK + 1000
    record = store.reserve("layers.0", nbytes)
    buffer, back = pool.take(nbytes).random_(0, 256), pool.take(nbytes)
    store.read(record, back).wait()  # never written, so there is no checksum
    store.write(record, buffer).wait()
    store.write(record, buffer[:SECTOR], offset=BLOCK).wait()
    store.read(record, back).wait()
    store.read(record, back[: BLOCK + 77], offset=2 * SECTOR).wait()
    with open(store.paths[1], "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff", BLOCK + 997)
    assert "checksum" in str(failing(store.read(record, back)))


def test_an_interrupt_is_heard_during_a_wait(store, out):
    record = store.reserve("layers.0", BLOCK)
    main = threading.main_thread().ident
    assert main is not None
    for doubled in range(6):  # a busy machine may take longer to interrupt than the write takes
        store.inject(Fault("write", delay_ms=200 << doubled))
        ticket = store.write(record, out[:BLOCK])
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            ticket.wait()
            timer.join()
        if not ticket.done():
            break
        ticket.wait()
    else:
        raise AssertionError("the wait ended before the interrupt was heard, however long it was")
    ticket.wait()


def test_room_that_is_not_there_is_refused_at_once(store, roots, out):
    free = os.statvfs(roots[0]).f_bavail * os.statvfs(roots[0]).f_frsize
    with pytest.raises(DiskSpaceError, match=r"layers.0.*are missing"):
        store.reserve("layers.0", 64 * free)
    store.check_free(1 << 20)
    with pytest.raises(DiskSpaceError, match="missing; free some space") as caught:
        store.check_free(4 * free)
    # Both paths are on one drive: what they miss, they miss together.
    assert 2.5 * free < caught.value.missing < 3.5 * free
    record = store.reserve("layers.1", 8 * BLOCK)
    store.write(record, out).wait()
    assert [os.path.getsize(path) for path in store.paths] == [4 * BLOCK] * 2


def test_a_limit_of_file_size_names_itself(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DiskStore(tmp_path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(DiskError, match=r"layers\.0.*ulimit -f"):
                store.reserve("layers.0", 2 << 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
