"""With `aio.checksum` a changed bit is found at the next read in training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.engine.harness import engine_of, make_model, settings, train_step
from tests.tiers.rows import offload

from wherry.errors import WherryError
from wherry.tiers.disk import DiskError

SECTOR = 4096


def test_training_finds_a_changed_bit(tmp_path: Path) -> None:
    config = offload("infinity", tmp_path, "at_step", aio={"checksum": True})
    engine = engine_of(make_model(), settings(3, more=config))
    try:
        train_step(engine, 0, 0)
        engine.save_checkpoint(str(tmp_path / "saved"))  # which waits for writes
        (path,) = tmp_path.glob("*/data-0.bin")
        data = bytearray(path.read_bytes())
        # Flip a bit in every sector, as any may be read first.
        for place in range(100, len(data), SECTOR):
            data[place] ^= 4
        with open(path, "r+b") as file:
            file.write(data)
        with pytest.raises((DiskError, WherryError)) as caught:
            train_step(engine, 1, 0)
    finally:
        engine.close()
    message = str(caught.value)
    found = re.search(r"unit '(.+?)': read of \d+ bytes at offset (\d+) of (\S+) failed: checksum mismatch", message)
    assert found is not None, message
    assert found[1] and int(found[2]) % SECTOR == 0 and found[3] == str(path)
