"""With `aio.checksum` a changed bit is found at the next read, of a store and in training."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.engine.harness import assert_equal, engine_of, make_model, settings, train_engine, train_step
from tests.tiers.rows import ROWS, offload

from wherry.errors import WherryError
from wherry.testing.late import topology
from wherry.tiers.disk import DiskError

SECTOR = 4096
BLOCK = 64 << 10


def flip(path: str | Path, place: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), place)
        os.fsync(file.fileno())


@pytest.mark.parametrize("row", ["disk-2", "infinity"])
def test_training_finds_a_changed_bit(tmp_path, row):
    config = offload(row, tmp_path, "at_step", aio={"checksum": True})
    stage = ROWS[row][0]
    on_disk, resident = (
        train_engine(make_model(), stage=stage, config=each, place=topology, steps=2) for each in (config, None)
    )
    assert_equal(on_disk, resident)
    model = make_model()
    engine = engine_of(model, settings(stage, more=config))

    def step(number: int) -> None:
        train_step(engine, number, 0)

    try:
        step(0)
        engine.save_checkpoint(str(tmp_path / "saved"))  # which waits for writes
        (path,) = map(str, tmp_path.glob("*/data-0.bin"))
        # Flip a bit in every sector, as any may be read first.
        for place in range(100, os.path.getsize(path), SECTOR):
            flip(path, place)
        with pytest.raises((DiskError, WherryError)) as caught:
            step(1)
    finally:
        engine.close()
    message = str(caught.value)
    found = re.search(r"unit '(.+?)': read of \d+ bytes at offset (\d+) of (\S+) failed: checksum mismatch", message)
    assert found is not None, message
    assert found[1] and int(found[2]) % SECTOR == 0 and found[3] == path
