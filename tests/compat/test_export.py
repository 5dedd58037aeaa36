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

BF16 = {"bf16": {"enabled": True}}
NAMES = [name for name, _ in MODEL.named_parameters(remove_duplicate=False)]
FROZEN = "blocks.0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of two checkpoints by three ranks, and the masters at the second."""
    folder = tmp_path_factory.mktemp("saved")
    model = copy.deepcopy(MODEL)
    model.get_submodule(FROZEN).requires_grad_(False)

    def body(engine: Any, comm: Comm) -> Any:
        engine.save_checkpoint(folder)
        train(engine, comm, 2)
        engine.save_checkpoint(folder)
        return engine.consolidated_state_dict(torch.float32)

    return folder, on(Shape(3, 3, more=BF16), body, model=model)[0]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name


def test_state_dict(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, masters = saved
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    same(found, masters)
    assert found["head.weight"] is found["embed.weight"]
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert [(value.shape, value.dtype) for value in lazy.values()] == [(t.shape, t.dtype) for t in found.values()]
    same({name: value.contiguous() for name, value in lazy.items()}, masters)
    first = get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step0")
    assert not torch.equal(first["embed.weight"], masters["embed.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    same(trained, {name: t for name, t in masters.items() if not name.startswith(f"{FROZEN}.")})
    assert len(trained) < len(masters)


@pytest.mark.parametrize("size", ["5GB", "4KB", None])
def test_files_of_torch(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, size: str | None) -> None:
    folder, masters = saved
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, max_shard_size=size)
    files = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("*.bin")}
    if size != "4KB":
        assert set(files) == {path.name for path in tmp_path.iterdir()} == {"pytorch_model.bin"}
        return same(files["pytorch_model.bin"], masters)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    same({name: files[file][name] for name, file in index["weight_map"].items()}, masters)
    for weights in files.values():
        own = {t.data_ptr(): t.nbytes for t in weights.values()}
        assert sum(own.values()) <= 4000 or len(own) == 1


def test_the_command(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, forks: Any) -> None:
    folder, masters = saved
    module = "import runpy; runpy.run_module('deepspeed.utils.zero_to_fp32', run_name='__main__', alter_sys=True)"
    done = forks.of(as_deepspeed=True).run(
        "-c", module, folder, tmp_path / "out", "--safe_serialization", folder=tmp_path, launched=False
    )
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out" / "model.safetensors")
    same(found | {"head.weight": found["embed.weight"]}, masters)


def test_files_of_a_checkpoint(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """What a program reads beside the weights: the stage, the counts, and the client state."""
    folder, _ = saved
    place = folder / "global_step2"
    before = sorted(path.name for path in place.iterdir())
    (optimizer,) = get_optim_files(place)
    state = torch.load(optimizer, weights_only=True)["optimizer_state_dict"]
    assert state == {"zero_stage": 3, "partition_count": 3}
    found = torch.load(get_model_state_file(place, state["zero_stage"]), weights_only=True)
    assert (found["global_steps"], found["global_samples"], found["dp_world_size"]) == (2, 12, 3)
    assert set(found["param_shapes"][0]) == {n for n, _ in MODEL.named_parameters() if not n.startswith(FROZEN)}
    assert sorted(path.name for path in place.iterdir()) == before


def test_files_of_deepspeed_s_checkpoint(tmp_path: Path) -> None:
    """They are its own, by the number of the rank."""
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in (*names, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (tmp_path / name).touch()
    assert get_optim_files(tmp_path) == [str(tmp_path / name) for name in names]
    assert get_model_state_file(tmp_path, 2) == str(tmp_path / "mp_rank_00_model_states.pt")
    assert get_model_state_file(tmp_path, 3) == str(tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def test_ours_beside_one_of_deepspeed_s(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """A run that went on from theirs: `latest` says which is meant."""
    folder, masters = saved
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "global_step1").mkdir()
    (tmp_path / "run" / "global_step1" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "run" / "global_step1" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run"), masters)
    with pytest.raises(wherry.WherryError, match="wherry import-deepspeed"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", tag="global_step1")


def test_into_a_model(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, masters = saved
    model = copy.deepcopy(MODEL)
    assert load_state_dict_from_zero_checkpoint(model, folder) is model
    same(dict(model.state_dict()), {name: masters[name] for name in model.state_dict()})
    model.embed = torch.nn.Embedding(3, 16)
    with pytest.raises(wherry.WherryError, match=r"embed.weight is \(29, 16\) in the checkpoint and \(3, 16\) in the"):
        load_state_dict_from_zero_checkpoint(model, folder)
    with pytest.raises(wherry.WherryError, match="the model has none of its"):
        load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), folder)


def test_into_a_model_that_an_engine_trains(tmp_path: Path) -> None:
    from wherry.compat.deepspeed.engine import DeepSpeedEngine
    from wherry.testing import run_ranks

    def rank(comm: Comm) -> Any:
        model = copy.deepcopy(MODEL)
        config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine, *_ = wherry.initialize(model=model, mesh=comm, config=config, engine_class=DeepSpeedEngine)
        engine.save_checkpoint(tmp_path)
        masters = engine.consolidated_state_dict(torch.float32)
        train(engine, comm, 2)
        load_state_dict_from_zero_checkpoint(engine.module, tmp_path)
        assert engine.closed
        if masters is not None:
            same(dict(model.state_dict()), masters)
        return model.state_dict()

    first, second = run_ranks(2, rank)
    same(first, second)


def test_mistakes(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: Any) -> None:
    folder, _ = saved
    theirs = tmp_path / "theirs" / "global_step1"
    theirs.mkdir(parents=True)
    (theirs / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "theirs" / "latest").write_text("global_step1")
    for argv, said in (
        ([folder, tmp_path / "o", "-t", "global_step9"], "no checkpoint global_step9; those that are there: global_st"),
        ([tmp_path / "nowhere", tmp_path / "o"], "nowhere: there is no such folder"),
        ([folder, tmp_path / "o", "--max_shard_size", "much"], "max_shard_size: expected bytes"),
        ([tmp_path / "theirs", tmp_path / "o"], "wherry import-deepspeed"),
        ([theirs, tmp_path / "o"], "wherry import-deepspeed"),
    ):
        assert main(list(map(str, argv))) == 2
        told = capsys.readouterr().err
        assert told.startswith("zero_to_fp32: ") and said in told and told.count("\n") == 1, told
    assert not (tmp_path / "o").exists()
