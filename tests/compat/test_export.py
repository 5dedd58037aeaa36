"""`zero_to_fp32` on checkpoints of engines: the masters, whole, whatever ranks have written them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.harness import MODEL, Shape, on, train
from tests.compat.harness import engine_of

import wherry
from wherry.compat.deepspeed.export import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    main,
)
from wherry.parallel.comm import Comm

FROZEN = "blocks.0"
Saved = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder of two checkpoints by three ranks, and the masters at the second."""
    folder = tmp_path_factory.mktemp("saved")
    model = copy.deepcopy(MODEL)
    model.get_submodule(FROZEN).requires_grad_(False)

    def body(engine: Any, comm: Comm) -> Any:
        engine.save_checkpoint(folder)
        train(engine, comm, 2)
        engine.save_checkpoint(folder)
        return engine.consolidated_state_dict(torch.float32)

    return folder, on(Shape(3, 3, more={"bf16": {"enabled": True}}), body, model=model)[0]


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(weights) == set(expected)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name


def test_weights(saved: Saved, tmp_path: Path) -> None:
    """Read the weights, and write one file of torch's, several with their index, and safetensors."""
    folder, masters = saved
    weights = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert_equal(weights, masters)
    assert weights["head.weight"] is weights["embed.weight"]
    first = get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step0")
    assert not torch.equal(first["embed.weight"], masters["embed.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert_equal(trained, {name: t for name, t in masters.items() if not name.startswith(f"{FROZEN}.")})
    assert len(trained) < len(masters)
    one, several, safe = (tmp_path / name for name in ("one", "several", "safe"))
    convert_zero_checkpoint_to_fp32_state_dict(folder, one, max_shard_size=None)
    assert [path.name for path in one.iterdir()] == ["pytorch_model.bin"]
    assert_equal(torch.load(one / "pytorch_model.bin", weights_only=True), masters)
    assert main([str(folder), str(safe), "--safe_serialization"]) == 0
    weights = load_file(safe / "model.safetensors")
    assert_equal(weights | {"head.weight": weights["embed.weight"]}, masters)
    convert_zero_checkpoint_to_fp32_state_dict(folder, several, max_shard_size="4KB")
    files = {path.name: torch.load(path, weights_only=True) for path in several.glob("*.bin")}
    index = json.loads((several / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert len(files) > 2 and set(index.values()) == set(files)
    assert_equal({name: files[file][name] for name, file in index.items()}, masters)
    for weights in files.values():
        own = {t.data_ptr(): t.nbytes for t in weights.values()}
        assert sum(own.values()) <= 4000 or len(own) == 1


def test_files_of_a_checkpoint(saved: Saved, tmp_path: Path) -> None:
    """Give what a program reads beside the weights: the stage, the counts, and the client state."""
    step = saved[0] / "global_step2"
    before = sorted(path.name for path in step.iterdir())
    (optimizer,) = get_optim_files(step)
    state = torch.load(optimizer, weights_only=True)["optimizer_state_dict"]
    assert state == {"zero_stage": 3, "partition_count": 3}
    model = torch.load(get_model_state_file(step, state["zero_stage"]), weights_only=True)
    assert (model["global_steps"], model["global_samples"], model["dp_world_size"]) == (2, 12, 3)
    assert set(model["param_shapes"][0]) == {n for n, _ in MODEL.named_parameters() if not n.startswith(FROZEN)}
    assert sorted(path.name for path in step.iterdir()) == before
    # Those of DeepSpeed's are its own, by the number of the rank.
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in (*names, "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (tmp_path / name).touch()
    assert get_optim_files(tmp_path) == [str(tmp_path / name) for name in names]
    assert get_model_state_file(tmp_path, 3) == str(tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def test_into_a_model(saved: Saved) -> None:
    folder, masters = saved
    model = copy.deepcopy(MODEL)
    engine = engine_of(3, model=model)
    assert load_state_dict_from_zero_checkpoint(model, folder) is model and engine.closed
    assert_equal(dict(model.state_dict()), {name: masters[name] for name in model.state_dict()})
    model.embed = torch.nn.Embedding(3, 16)
    with pytest.raises(wherry.WherryError, match=r"embed.weight is \(29, 16\) in the checkpoint and \(3, 16\) in the"):
        load_state_dict_from_zero_checkpoint(model, folder)
    with pytest.raises(wherry.WherryError, match="the model has none of its"):
        load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), folder)


def test_mistakes(saved: Saved, tmp_path: Path, capsys: Any) -> None:
    """Refuse in one line; tell DeepSpeed's checkpoints by `latest`, also beside Wherry's in one folder."""
    folder, masters = saved
    both = tmp_path / "run"
    shutil.copytree(folder, both)
    (theirs := both / "global_step1").mkdir()
    (theirs / "mp_rank_00_model_states.pt").touch()
    (theirs / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(both), masters)
    out = tmp_path / "out"
    for argv, message in (
        ([folder, out, "-t", "global_step9"], "no checkpoint global_step9; those that are there: global_st"),
        ([tmp_path / "nowhere", out], "nowhere: there is no such folder"),
        ([folder, out, "--max_shard_size", "much"], "max_shard_size: expected bytes"),
        ([both, out, "-t", "global_step1"], "wherry import-deepspeed"),
        ([theirs, out], "wherry import-deepspeed"),
    ):
        assert main(list(map(str, argv))) == 2
        error = capsys.readouterr().err
        assert error.startswith("zero_to_fp32: ") and message in error and error.count("\n") == 1, error
    assert not out.exists()
