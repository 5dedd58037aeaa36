"""CRC-32 has zlib's bits, with the processor's help and without."""

from __future__ import annotations

import random
import zlib

import pytest

from wherry.native import checksum, library


@pytest.mark.parametrize("fast", [True, False])
def test_any_length_from_any_place_and_in_parts(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(checksum, "_fast", lambda: None)
    elif (native := library()) is None or not native.wherry_has_crc32():
        pytest.skip("there is no native library here, or the processor has no carry-less multiplication")
    rng = random.Random(0)
    data = rng.randbytes(70_000)
    view = memoryview(data)
    for length in [*range(300), 4096, 65_536, *(rng.randrange(60_000) for _ in range(100))]:
        start = rng.randrange(len(data) - length)
        part = view[start : start + length]
        before = rng.getrandbits(32)
        assert checksum.crc32(part, before) == zlib.crc32(part, before), (start, length)
    middle = 12_345
    assert checksum.crc32(view[middle:], checksum.crc32(view[:middle])) == zlib.crc32(data)
    assert checksum.crc32(bytes(1 << 20)) == zlib.crc32(bytes(1 << 20))
