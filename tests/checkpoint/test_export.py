"""Exports of weights from checkpoints and from live engines, and the output of the commands."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from tests.checkpoint.harness import BF16, MODEL, Shape, on, save_from, state_of, train
from torch import nn

import wherry
from wherry.checkpoint.export import ModelWriter
from wherry.cli import main
from wherry.parallel.comm import Comm


def exported(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert sum(map(len, files.values())) == len(tensors), "a tensor is written twice"
    return tensors


@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
def test_export(tmp_path: Path, more: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Without --dtype an export has the working weights, with it the masters in that dtype."""
    states = save_from(Shape(3, 3, more=more), tmp_path / "in")
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        out = tmp_path / str(dtype)
        name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
        flags = ["--dtype", name] if name else []
        assert main(["export", str(tmp_path / "in"), str(out), *flags, "--max-shard-size", "2KB"]) == 0
        weights = exported(out)
        assert set(weights) == {name for name, _ in MODEL.named_parameters()}
        for name, weight in weights.items():
            expected = states[f"{name}:master"].to(dtype) if dtype else states[f"{name}:working"]
            assert weight.dtype == expected.dtype and torch.equal(weight.flatten(), expected), name
        sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
        assert len(sizes) > 2 and max(sizes) < 2000 + 16384
        assert "19 tensors" in capsys.readouterr().out


def test_buffers_keep_their_dtype(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with wherry.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0] as engine:
        engine.save_checkpoint(tmp_path / "in")
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["1.weight"].dtype is torch.bfloat16 and tensors["1.running_mean"].dtype is torch.float32


def test_one_file_loads_with_its_tied_names(tmp_path: Path) -> None:
    states = save_from(Shape(2, 2), tmp_path / "in")
    assert main(["export", str(tmp_path / "in" / "global_step2"), str(tmp_path / "out")]) == 0
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    model = copy.deepcopy(MODEL)
    load_model(model, str(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(model.head.weight.flatten(), states["embed.weight:master"])
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out")]) == 2, "it holds weights already"


@pytest.mark.parametrize("shape", [Shape(1, 0), Shape(3, 3, more=BF16)], ids=str)
def test_from_a_live_engine(tmp_path: Path, shape: Shape) -> None:
    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        states = state_of(engine)
        for _ in range(2):
            assert engine.save_16bit_model(tmp_path / "a")
        engine.save_16bit_model(tmp_path / "b", "pytorch_model.bin")
        whole, precise = engine.consolidated_state_dict(), engine.consolidated_state_dict(torch.float32)
        assert (whole is None) == (comm.rank > 0)
        train(engine, comm, 1, first=2)  # the engine goes on, and the weights that it gave do not change
        return states, whole, precise

    states, whole, precise = on(shape, body)[0]
    files = exported(tmp_path / "a")
    pickled = torch.load(tmp_path / "b" / "pytorch_model.bin", weights_only=True)
    assert list(whole) == [name for name, _ in MODEL.named_parameters(remove_duplicate=False)]
    for name, weight in files.items():
        assert torch.equal(weight.flatten(), states[f"{name}:working"])
        assert torch.equal(weight, whole[name]) and torch.equal(weight, pickled[name])
        assert torch.equal(precise[name].flatten(), states[f"{name}:master"])
    assert whole["head.weight"] is whole["embed.weight"]


def test_tiles_are_exported_as_their_layers(tmp_path: Path) -> None:
    """Names, values and the sum of bytes are those of the model before it was tiled, in files as well."""
    model = copy.deepcopy(MODEL)
    wherry.tile(model, max_bytes=700)
    assert any("tiles.1" in name for name, _ in model.named_parameters())

    def body(engine: Any, comm: Comm) -> Any:
        engine.save_16bit_model(tmp_path, "model.safetensors")
        return engine.consolidated_state_dict(), engine.consolidated_state_dict(torch.float32)

    whole, precise = on(Shape(3, 3), body, model=model)[0]
    assert list(whole) == [name for name, _ in MODEL.named_parameters(remove_duplicate=False)]
    for name, weight in MODEL.state_dict().items():
        assert torch.equal(whole[name], weight) and torch.equal(precise[name], weight), name
    files = exported(tmp_path)
    assert set(files) == {name for name, _ in MODEL.named_parameters()}
    assert all(torch.equal(weight, whole[name]) for name, weight in files.items())


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_from(Shape(2, 3, more=BF16), tmp_path, client_state={"epoch": 1})
    left = tmp_path / ".global_step9.partial.0123456789ab"
    left.mkdir()
    os.utime(left, (0, 0))
    assert main(["inspect", str(tmp_path), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= max(80, 2 + len(str(tmp_path)) + len("global_step2"))
    said = " ".join(shown.split())
    for words in ("AdamW after 2 updates: exp_avg, exp_avg_sq", "every byte checked", "epoch", "bfloat16"):
        assert words in said
    assert "embed.weight (29, 16) bfloat16 parameter: weight, exp_avg, exp_avg_sq (also head.weight)" in said
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    file = tmp_path / "global_step2" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "rank-00001.safetensors: bytes" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert left.exists(), "inspect deletes nothing"


def test_a_failed_export_leaves_nothing_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "model_best.safetensors").write_text("mine")
    with pytest.raises(RuntimeError), ModelWriter(tmp_path, 100, ["a"], {}) as writer:
        writer.add("a", torch.zeros(3))
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["model_best.safetensors"]
    for count in (3, 1):  # shards of an earlier export go
        with ModelWriter(tmp_path, 12, [str(n) for n in range(count)], {}) as writer:
            for number in range(count):
                writer.add(str(number), torch.zeros(3))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model_best.safetensors", "model.safetensors", "model.safetensors.index.json"}
