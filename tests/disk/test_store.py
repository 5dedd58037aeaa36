"""Write records to disk and read them back, on every backend."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wherry.tiers.buffers import HostPool
from wherry.tiers.disk import DiskStore, DiskUseError, Fault

SECTOR = 4096
BLOCK = 64 << 10


def noise(pool: HostPool, nbytes: int, seed: int = 0) -> torch.Tensor:
    buffer = pool.take(nbytes)
    buffer.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return buffer


@pytest.mark.parametrize("checksum", [True, False])
def test_many_records_at_once_are_kept_apart(make, pool, checksum):
    store = make(checksum=checksum)
    store.attach(pool)
    sizes = [1, SECTOR - 1, 5000, BLOCK, BLOCK + 1, 10 * BLOCK, 777_777]
    buffers = [noise(pool, size, seed) for seed, size in enumerate(sizes)]
    records = [store.reserve(f"layers.{i}", size) for i, size in enumerate(sizes)]
    tickets = [store.write(record, buffer) for record, buffer in zip(records, buffers, strict=True)]
    for ticket in reversed(tickets):
        ticket.wait()
        ticket.wait()
        assert ticket.done()
    back = [pool.take(size) for size in sizes]
    for ticket in [store.read(record, buffer) for record, buffer in zip(records, back, strict=True)]:
        ticket.wait()
    assert all(torch.equal(a, b) for a, b in zip(buffers, back, strict=True))
    stats = store.stats
    assert (stats.reads, stats.writes, stats.bytes_read, stats.bytes_written) == (7, 7, sum(sizes), sum(sizes))
    assert stats.failures == stats.resumed == 0


def test_reads_and_writes_share_a_bounded_queue(make, tmp_path, pool):
    store = make(tmp_path / "a", queue_depth=4)
    first, second = store.reserve("first", 64 * BLOCK), store.reserve("second", 64 * BLOCK)
    out, back = noise(pool, 64 * BLOCK), pool.take(64 * BLOCK)
    store.write(first, out).wait()
    store.inject(Fault("write", delay_ms=200, count=2))
    writing, reading = store.write(second, out), store.read(first, back)
    reading.wait()
    writing.wait()
    assert torch.equal(out, back)
    assert store.stats.both > 0
    assert 1 < store.stats.deepest <= 4


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_equal_to_a_model_in_memory(make, roots, pool, data):
    """Any sequence of writes and reads of parts gives what the same sequence on bytes in memory gives."""
    paths = data.draw(st.sampled_from([roots[:1], roots, [roots[0], roots[1], roots[0]]]))
    store = make(paths, block_size=SECTOR * data.draw(st.sampled_from([1, 3, 16])))
    nbytes = data.draw(st.integers(1, 20 * SECTOR))
    store.reserve("before", data.draw(st.integers(1, 3 * SECTOR)))
    record = store.reserve("layers.0", nbytes)
    model = torch.zeros(nbytes, dtype=torch.uint8)
    store.write(record, pool.take(nbytes).zero_()).wait()
    for seed in range(data.draw(st.integers(1, 6))):
        begin = SECTOR * data.draw(st.integers(0, (nbytes - 1) // SECTOR))
        sectors = data.draw(st.integers(1, 20))
        length = min(sectors * SECTOR, nbytes - begin)
        buffer = noise(pool, length, seed)
        store.write(record, buffer, offset=begin).wait()
        model[begin : begin + length] = buffer
        length = data.draw(st.integers(1, nbytes - begin))
        back = pool.take(length + SECTOR).fill_(7)
        store.read(record, back[:length], offset=begin).wait()
        assert torch.equal(back[:length], model[begin : begin + length])
        assert (back[length:] == 7).all(), "memory beyond a ragged end is left alone"
    store.close()


def test_buffers_dropped_in_flight_stay_alive(store, pool):
    record = store.reserve("layers.0", 8 * BLOCK)
    out = noise(pool, 8 * BLOCK)
    for _ in range(3):
        private = HostPool()
        buffer = private.take(8 * BLOCK)
        buffer.copy_(out)
        store.write(record, buffer)
        del buffer, private
    gc.collect()
    while store.stats.bytes_written < 3 * out.numel():
        time.sleep(0.01)
    back = pool.take(8 * BLOCK)
    store.read(record, back).wait()
    assert torch.equal(back, out)


def test_registered_memory_is_used_where_there_is_io_uring(store, pool):
    early = pool.take(4 * BLOCK)
    store.attach(pool)
    late = pool.take(3 << 20)
    record = store.reserve("layers.0", 3 << 20)
    store.write(record, early.zero_()).wait()
    store.write(record, late.zero_()).wait()
    stranger = torch.zeros(BLOCK + SECTOR, dtype=torch.uint8)
    begin = -stranger.data_ptr() % SECTOR
    store.write(record, stranger[begin : begin + BLOCK]).wait()
    # The system may refuse it, by its limit of locked memory.
    assert store.stats.fixed in ((0, store.stats.chunks_written - 1) if store.backend == "io_uring" else (0,))


def test_memory_that_a_pool_gave_up_is_not_registered_any_more(store, pool):
    record = store.reserve("layers.0", 4 * BLOCK)
    for seed in range(3):
        passing = HostPool()
        store.attach(passing)
        buffer = noise(passing, 4 * BLOCK, seed)
        store.write(record, buffer).wait()
        back = noise(pool, 4 * BLOCK, seed + 100)
        store.read(record, back).wait()
        assert torch.equal(back, buffer)
        pool.give(back)
        if seed % 2:
            passing.give(buffer)
            passing.close()
        del buffer, passing
        if seed % 2 == 0:
            gc.collect()


def test_options_are_checked(tmp_path):
    for message, options in [
        ("block_size 1000", {"block_size": 1000}),
        ("queue_depth 0", {"queue_depth": 0}),
        ("disk backend 'aio'", {"backend": "aio"}),
    ]:
        with pytest.raises(DiskUseError, match=message):
            DiskStore(tmp_path, **options)
    with pytest.raises(DiskUseError, match=r"'.*/missing/inner' is not a directory, and cannot be made \(No such file"):
        DiskStore(tmp_path / "missing" / "inner")
    with pytest.raises(DiskUseError, match="got 0"):
        DiskStore([])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DiskUseError, match="file' is not a directory: make it"):
        DiskStore(tmp_path / "file")


def test_a_missing_folder_is_made_and_logged(tmp_path, caplog):
    for _ in range(2):
        DiskStore([tmp_path, tmp_path / "new"]).close()
    (record,) = caplog.records
    assert record.getMessage() == f"disk path {tmp_path}/new was not there, and is made"


def test_a_closed_store_says_so_and_its_tickets_live_on(store, pool):
    record, buffer = store.reserve("layers.0", 16 * BLOCK), noise(pool, 16 * BLOCK)
    store.inject(Fault("write", delay_ms=50))
    ticket = store.write(record, buffer)
    store.close()
    store.close()
    assert ticket.done()
    ticket.wait()
    with pytest.raises(DiskUseError, match="closed"):
        store.read(record, buffer)
    assert not os.path.exists(store.paths[0])


def test_garbage_collection_closes(make, pool, kind, tmp_path):
    root = tmp_path / "collected"
    root.mkdir()
    store = DiskStore(root, **kind)
    ticket = store.write(store.reserve("layers.0", 1 << 20), noise(pool, 1 << 20))
    assert len(list(root.iterdir())) == 1
    before = threading.active_count()
    del store
    ticket.wait()
    del ticket
    gc.collect()
    assert list(root.iterdir()) == []
    assert threading.active_count() <= before


def test_the_folder_goes_at_interpreter_exit_but_not_with_a_forked_child(tmp_path, launched):
    script = f"""
        import os, sys
        os.dup2(1, 2)  # an error at the end is output too
        from wherry.tiers.buffers import HostPool
        from wherry.tiers.disk import DiskStore, DiskUseError
        pool = HostPool()
        stores = []
        for native in (None, False):
            store = DiskStore({str(tmp_path)!r}, native=native)
            stores.append(store)
            store.attach(pool)
            buffer = pool.take(1 << 20)
            record = store.reserve("layers.0", 1 << 20)
            store.write(record, buffer).wait()
            if os.fork() == 0:
                try:
                    store.read(record, buffer)
                except DiskUseError:
                    sys.exit(7)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
            assert os.path.exists(store.paths[0])
            store.read(record, buffer).wait()
            store.write(record, buffer)
        print("fine")
    """
    assert launched.interpret(script) == "fine\n"
    assert list(tmp_path.iterdir()) == []
