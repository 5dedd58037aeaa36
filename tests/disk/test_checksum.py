"""With `aio.checksum` a changed bit is found at the next read, of a store, of a clone and in training."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.engine.harness import adamw, assert_equal, make_model, settings, token_batch
from tests.tiers.rows import ROWS
from tests.tiers.test_placements import offload, plain, train

import wherry
from wherry.errors import WherryError
from wherry.tiers import disk
from wherry.tiers.disk import DiskError, Fault

SECTOR = 4096
BLOCK = 64 << 10


def flip(path: str | Path, place: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), place)
        os.fsync(file.fileno())


@pytest.mark.parametrize("checksum", [True, False])
def test_a_clone_is_compared_with_what_was_written_before_it(make, roots, pool, monkeypatch, checksum):
    def share(source: str, target: Path) -> bool:
        shutil.copyfile(source, target)
        return True

    monkeypatch.setattr(disk, "share_extents", share)
    store = make(checksum=checksum)
    nbytes = 4 * BLOCK + 1000
    records = [store.reserve(f"layers.{i}", nbytes) for i in range(2)]
    old, new, back = (pool.take(nbytes) for _ in range(3))
    old.random_(0, 256)
    new.random_(0, 256)
    for record in records:
        store.write(record, old).wait()
    clone = store.clone()
    assert clone is not None
    # What the store writes next has other checksums, and neither meets the other's.
    store.write(records[0], new).wait()
    for record in records:
        clone.read(record, back.zero_()).wait()
        assert torch.equal(back, old)
    store.read(records[0], back).wait()
    assert torch.equal(back, new)
    (changed,) = roots[1].rglob("clone-*.bin")
    place = records[1].offsets[1] + SECTOR + 77
    flip(changed, place)
    ticket = clone.read(records[1], back)
    if checksum:
        with pytest.raises(DiskError, match=r"unit 'layers.1': read of .* failed: checksum mismatch") as caught:
            ticket.wait()
        assert (caught.value.filename, caught.value.offset) == (str(changed), place - 77)
    else:
        ticket.wait()
        assert not torch.equal(back, old)
    clone.read(records[0], back).wait()
    store.read(records[1], back).wait()
    assert torch.equal(back, old)
    clone.close()


def test_an_error_of_a_clone_names_its_file(make, pool, monkeypatch):
    monkeypatch.setattr(disk, "share_extents", lambda source, target: bool(shutil.copyfile(source, target)))
    store = make()
    record = store.reserve("layers.0", 2 * BLOCK)
    buffer = pool.take(2 * BLOCK).random_(0, 256)
    store.write(record, buffer).wait()
    clone = store.clone()
    assert clone is not None and clone._native is not None
    clone._native.inject(Fault("read", errno=5))
    with pytest.raises(DiskError, match="Input/output error") as caught:
        clone.read(record, buffer).wait()
    assert Path(caught.value.filename).name.startswith("clone-")
    clone.close()


@pytest.mark.parametrize("row", ["disk-2", "infinity"])
def test_training_reads_what_it_wrote_or_says_so(tmp_path, row):
    config = offload(row, tmp_path, "at_step", aio={"checksum": True})
    stage = ROWS[row][0]
    assert_equal(train(config, stage=stage), plain(row, 1, "fp32"))
    model = make_model()
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(stage, more=config)
    )

    def step(number: int) -> None:
        engine.backward(engine(*token_batch(number, 0, 0)))
        engine.step()

    try:
        step(0)
        (store,) = engine._offload.stores
        assert store.checksum
        store.drain()
        (path,) = store.paths
        # A bit in every sector: whichever is read first.
        for place in range(100, os.path.getsize(path), SECTOR):
            flip(path, place)
        with pytest.raises((DiskError, WherryError)) as caught:
            step(1)
    finally:
        engine.close()
    said = str(caught.value)
    found = re.search(r"unit '(.+?)': read of \d+ bytes at offset (\d+) of (\S+) failed: checksum mismatch", said)
    assert found is not None, said
    assert found[1] and int(found[2]) % SECTOR == 0 and found[3] == path
