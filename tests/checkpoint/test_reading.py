"""Bytes that a load reads, and the memory that saves, loads and exports take."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, on, save_from
from tests.engine.harness import make_model
from tests.parallel.handmade import Model

from wherry.checkpoint import files, reader
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.export import find
from wherry.parallel.comm import Comm


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes of tensors that each rank reads, by the name of its thread."""
    counted: Counter[str] = Counter()
    read = files.TensorReader.read

    def reading(source: Any, *arguments: Any, **more: Any) -> torch.Tensor:
        out = read(source, *arguments, **more)
        counted[threading.current_thread().name] += out.nbytes
        return out

    monkeypatch.setattr(files.TensorReader, "read", reading)
    return counted


def owned_bytes(engine: Any) -> int:
    """Count the fp32 weights and both moments of the parameters in this rank's shards."""
    ranges = [engine.states.local_range(name) for name, _ in engine.module.named_parameters()]
    return 12 * sum(stop - start for start, stop in ranges)


# States of generators, and other values that every rank reads.
VALUES = 30_000


@pytest.mark.parametrize("shape", [Shape(2, 3), Shape(3, 0), Shape(1, 3, tensor=2)], ids=str)
def test_a_rank_reads_its_own_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """All ranks together read every byte of sharded states once; a tensor-parallel rank that holds columns reads parts
    of rows, where short rows would be read whole."""
    model = make_model(Model)
    save_from(Shape(3, 3), tmp_path, steps=1, model=model)
    monkeypatch.setattr(reader, "WHOLE_ROWS", 0)
    counted = count_bytes(monkeypatch)

    def body(engine: Any, comm: Comm) -> int:
        engine.load_checkpoint(tmp_path)
        return owned_bytes(engine)

    owned = on(shape, body, model=model)
    for rank, own in enumerate(owned):
        assert own <= counted[f"rank{rank}"] <= own + VALUES, (rank, own)
    if shape.tensor == 1:
        whole = sum(entry.numel for _, entry in read_manifest(find(tmp_path)).parameters())
        assert sum(owned) == 12 * whole * (1 if shape.stage else shape.ranks)


def test_any_box_of_any_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whole rows and parts of rows, one by one and merged, into a target of another dtype."""
    from wherry.checkpoint.format import Entry, Manifest, Slice
    from wherry.checkpoint.reshard import Box, Run

    values = torch.arange(5 * 6 * 7, dtype=torch.float32)
    writer = files.TensorWriter(tmp_path / "f", 4096)
    writer.add("a", values[:100])
    writer.add("b", values[100:])
    record = writer.finish()
    slices = [Slice("f", "a", 0, 100), Slice("f", "b", 100, 210)]
    manifest = Manifest("t", "", {}, 1, {"w": Entry((5, 6, 7), "float32", states={"weight": slices})})
    manifest.files["f"] = record
    boxes = [
        Box((0, 0, 0), (5, 6, 7)), Box((1, 2, 3), (3, 2, 4)), Box((0, 0, 6), (5, 6, 1)), Box((4, 0, 0), (1, 6, 7)),
        Box((0, 5, 0), (5, 1, 7)), Box((2, 0, 0), (2, 6, 3)),
    ]  # fmt: skip
    for whole_rows, part in ((0, 1 << 22), (reader.WHOLE_ROWS, 1 << 22), (reader.WHOLE_ROWS, 50), (0, 5)):
        monkeypatch.setattr(reader, "WHOLE_ROWS", whole_rows)
        monkeypatch.setattr(reader, "PART", part)
        with reader.CheckpointReader(tmp_path, manifest) as reading:
            for box in boxes:
                place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))
                expected = values.view(5, 6, 7)[place].flatten()
                for start, stop in ((0, box.numel), (1, box.numel), (0, box.numel // 2)):
                    for dtype in (torch.float32, torch.float64):
                        out = torch.full((stop - start,), -1.0, dtype=dtype)
                        reading.read("w", "weight", Run(box, start, stop), out)
                        assert torch.equal(out, expected[start:stop].to(dtype)), (box, start, stop)
            assert torch.equal(torch.cat([part.clone() for part in reading.parts("w", "weight")]), values)


def test_long_tensors_are_written_and_read_by_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write tensors of many blocks, parts of blocks and none; compare every block's checksum with zlib's."""
    import zlib

    from safetensors.torch import load_file

    monkeypatch.setattr(files, "BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{index}": torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
        for index, size in enumerate([5, 1000, 0, 59, 64, 128, 3, 700, 1])
    }
    writer = files.TensorWriter(tmp_path / "f.safetensors", 8192)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    record = writer.finish()
    data = (tmp_path / "f.safetensors").read_bytes()
    assert len(data) == record.bytes
    body = data[record.data_start :]
    assert record.blocks == [zlib.crc32(body[at : at + 64]) for at in range(0, len(body), 64)]
    found = load_file(tmp_path / "f.safetensors")
    with closing(files.FilePool()) as pool:
        stored = files.TensorReader(tmp_path / "f.safetensors", pool)
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)
            assert torch.equal(stored.read(name), tensor)
        stored.close()
        blocks = range(len(record.blocks))
        assert files.check_blocks(tmp_path / "f.safetensors", record, blocks, pool) == []
        broken = bytearray(data)
        for place in (record.data_start + 70, record.data_start + 640, 20):
            broken[place] ^= 1
        (tmp_path / "f.safetensors").write_bytes(broken)
        problems = files.check_blocks(tmp_path / "f.safetensors", record, blocks, pool)
    assert [text.split(": ")[1] for text in problems] == [
        "its header is damaged",
        *(f"bytes {record.data_start + at:,} to {record.data_start + at + 64:,} are damaged" for at in (64, 640)),
    ]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_stays_within_a_unit_above_the_shards(tmp_path: Path, forks: Any) -> None:
    code = "from tests.checkpoint import peaks; peaks.main()"
    result = forks.run("-c", code, tmp_path, folder=Path(__file__).parents[2], launched=False)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    noise = 4 << 20  # of the interpreter and of malloc
    assert seen["states"] > 4 * (seen["unit"] + seen["buffers"] + noise)
    for what in ("load", "save", "async save from disk"):
        assert seen[what] <= seen["unit"] + seen["buffers"] + noise, (what, seen)
    # An export never holds a whole tensor.
    assert seen["export"] <= seen["buffers"] + (1 << 20) + noise, seen
