"""`save_checkpoint` and `load_checkpoint` of the alias's engine, and DeepSpeed's own files of every stage."""

from __future__ import annotations

import copy
import errno
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, on, state_of, train
from tests.compat.harness import engine_of
from tests.compat.their_files import GROUPS, MODEL, MOMENTS, TAG, adamw, counts, start, write, write_universal

import wherry
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.format import RankFiles
from wherry.cli import main
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.compat.deepspeed.export import get_fp32_state_dict_from_zero_checkpoint
from wherry.compat.deepspeed.importing import import_checkpoint
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

Body = Callable[[DeepSpeedEngine, Comm], Any]
PLAIN = torch.nn.Sequential(OrderedDict(a=torch.nn.Linear(3, 2), b=torch.nn.Linear(2, 2)))


def alias(
    body: Body, *, ranks: int = 1, stage: int = 0, model: Any = MODEL, optimizer: Any = adamw, **more: Any
) -> list[Any]:
    """Run `body(engine, comm)` on every rank of an engine of the alias."""

    def rank(comm: Comm) -> Any:
        mine = copy.deepcopy(model)
        given = optimizer(mine.parameters()) if optimizer is not None else None
        engine = engine_of(stage, model=mine, given=given, mesh=comm, **{"optimizer": None, **copy.deepcopy(more)})
        try:
            return body(engine, comm)
        finally:
            engine.close()

    return run_ranks(ranks, rank)


@pytest.fixture(scope="module")
def states() -> dict[str, torch.Tensor]:
    def begin(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 5)
        return state_of(engine)

    return on(Shape(), begin, model=MODEL, optimizer=adamw)[0]  # type: ignore[no-any-return]


def write_stage_0(folder: Path, states: dict[str, torch.Tensor], flat: bool) -> None:
    """Write the one file of stage 0: states of each parameter by number, or (16 bits) end to end of each group."""
    module: dict[str, torch.Tensor] = OrderedDict(
        (n, states[f"{n}:master"].view(t.shape).to(torch.bfloat16 if flat else t.dtype))
        if f"{n}:master" in states else (n, t) for n, t in MODEL.state_dict().items()
    )  # fmt: skip
    module["head.weight"] = module["embed.weight"]
    listed: list[dict[str, Any]] = [{"lr": 0.5, "weight_decay": decay} for decay in (0.1, 0.0)]
    state: dict[int, dict[str, Any]] = {}
    for group, options in zip(GROUPS, listed, strict=True):
        first = len(state)
        if flat:
            state[first] = {"step": 6, **{m: torch.cat([states[f"{n}:{m}"] for n, _ in group]) for m in MOMENTS}}
        else:
            options["step"] = 0
            for name, shape in group:
                # Some of DeepSpeed's optimizers leave the count of a group with its last parameter.
                count = 5 if name == group[-1][0] else 0
                state[len(state)] = {"step": count, **{m: states[f"{name}:{m}"].view(shape) for m in MOMENTS}}
        options["params"] = list(range(first, len(state)))
    optimizer: dict[str, Any] = {"state": state, "param_groups": listed}
    if flat:
        masters = [torch.cat([states[f"{n}:master"] for n, _ in group]) for group in GROUPS]
        optimizer = {
            "optimizer_state_dict": optimizer, "fp32_groups_flat": masters, "clip_grad": 1.0, "cur_scale": 512.0,
            "cur_iter": 9, "last_overflow_iter": 2, "scale_window": 3, "dynamic_loss_scale": True,
        }  # fmt: skip
    tag = start(folder)
    saved = {**counts(2), "module": module, "optimizer": optimizer, "param_shapes": None, "shared_params": None}
    torch.save(saved, tag / "mp_rank_00_model_states.pt")


def loads(states: dict[str, torch.Tensor], folder: Path, steps: int = 5, tag: str = TAG, **shape: Any) -> None:
    """Load DeepSpeed's checkpoint into engines, and hold their states, options and counts against what was written."""

    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        if shape.get("checkpoint"):
            with pytest.raises(ValueError, match="holds no latest_universal"):
                engine.load_checkpoint(folder / "nowhere")
            assert engine.load_checkpoint(folder, tag)[0] == str(folder / tag)
        path, client_state = engine.load_checkpoint(folder)
        assert path == str(folder / tag) and client_state["epoch"] == 7 and engine.global_steps == 5
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
        assert engine.get_lr() == [0.5, 0.5] and "step" not in engine.optimizer.param_groups[0]
        assert_same(states, state_of(engine))
        again = folder.parent / "again"
        engine.save_checkpoint(again, "counts")
        engine.comm.barrier()
        saved = read_manifest(again / "counts").engine["optimizer"]
        assert (saved["steps"], saved["parameter_steps"]) == (steps, {})

    alias(body, **{"ranks": 2, "stage": 2, **shape})


@pytest.mark.parametrize("flat", [False, True])
def test_theirs_of_stage_0(states: dict[str, torch.Tensor], flat: bool, tmp_path: Path) -> None:
    """Name the parameters that its optimizer numbers, as the engine knows them."""
    write_stage_0(tmp_path / "theirs", states, flat)
    loads(states, tmp_path / "theirs", 6 if flat else 5)
    made = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", None, [[n for n, _ in group] for group in GROUPS])
    # Of the 6 good steps after the overflow the first does not count, and every third doubles: 2 are left over.
    scale, good = (512.0, (9 - 2 - 2) % 3) if flat else (1.0, 0)
    assert read_manifest(made).engine["loss_scale"] == {"scale": scale, "patience": 1, "good_steps": good}


@pytest.mark.parametrize(("stage", "ranks"), [(2, 3), (3, 1)])
def test_theirs_universal(states: dict[str, torch.Tensor], stage: int, ranks: int, tmp_path: Path) -> None:
    """Load universal checkpoints on other numbers of ranks, by `latest_universal` and by the tag."""
    folder, tag = tmp_path / "theirs", f"{TAG}_universal"
    write_universal(folder, states, stage)
    loads(states, folder, tag=tag, ranks=ranks, stage=4 - stage, checkpoint={"load_universal": True})
    assert main(["import-deepspeed", str(folder), str(tmp_path / "ours")]) == 0
    manifest = read_manifest(tmp_path / "ours" / tag)
    assert manifest.engine["loss_scale"]["scale"] == 64.0 and (tmp_path / "ours" / "latest").read_text() == tag


def test_sub_groups_of_stage_3_are_parts_of_their_groups(tmp_path: Path) -> None:
    """The optimizer's groups name the numbers of theirs."""
    parts = {n: PLAIN.get_parameter(n).detach() for n in ("a.weight", "b.weight", "a.bias", "b.bias")}
    flats = [weight.flatten() for weight in parts.values()]
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2, 3]}]
    state = {i: {"step": 2, "exp_avg": torch.ones_like(f)} for i, f in enumerate(flats)}
    saved = {"fp32_flat_groups": flats, "optimizer_state_dict": {"state": state, "param_groups": groups}}
    empty = {n: torch.empty(0) for n in PLAIN.state_dict()}
    for kind, value in (
        ("model", {"module": empty, "param_shapes": [OrderedDict({n: p.shape}) for n, p in parts.items()]}),
        ("optim", {"optimizer_state_dict": saved}),
    ):
        torch.save(value, tmp_path / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt")
    assert main(["import-deepspeed", str(tmp_path), str(tmp_path / "ours")]) == 0
    assert read_manifest(tmp_path / "ours" / "global_step0").engine["optimizer"]["groups"] == [
        {"options": {"lr": 0.1}, "parameters": ["a.weight", "b.weight"]},
        {"options": {"lr": 0.2}, "parameters": ["a.bias", "b.bias"]},
    ]


def test_where_nothing_is(tmp_path: Path) -> None:
    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
        with pytest.raises(AssertionError, match="holds no checkpoint other; those that are there: none"):
            engine.load_checkpoint(tmp_path, "other")
        engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
        # Without `latest` a tag has to be given, which may be a number.
        assert engine.load_checkpoint(tmp_path) == (None, None)
        assert engine.load_checkpoint(tmp_path, 7)[0] == str(tmp_path / "7")
        with pytest.raises(AssertionError, match="those that are there: 7"):
            engine.load_checkpoint(tmp_path, "other")
        with pytest.raises(AssertionError, match="the ranks gave different tags"):
            engine.save_checkpoint(tmp_path, tag=f"tag-{comm.rank}")

    alias(body, ranks=2, stage=1, model=PLAIN, checkpoint={"tag_validation": "Fail"})


@pytest.fixture(params=[("writable", 3, 3), ("read-only", 1, 2)])
def theirs(
    request: pytest.FixtureRequest, states: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Write DeepSpeed's files beside an empty temporary folder; hold both against what they were, at the end."""
    folder, temporary, mkdir = tmp_path / "theirs", tmp_path / "temporary", Path.mkdir
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    disk, stage, ranks = request.param
    write(folder, states, stage, ranks)

    def refuse(path: Path, *given: Any, **named: Any) -> None:
        if path.parent == folder and disk == "read-only":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *given, **named)

    monkeypatch.setattr(Path, "mkdir", refuse)
    yield folder
    assert not [*temporary.iterdir()] and {path.name for path in folder.iterdir()} == {TAG, "latest"}


def test_theirs_load_from_a_folder_that_can_only_be_read(
    states: dict[str, torch.Tensor], theirs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wherry")
    loads(states, theirs)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"loaded {theirs / TAG}: step 5") for line in lines)
    assert not any("wherry-" in line for line in lines)


def test_a_disk_that_is_full(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = RankFiles.put

    def write(files: RankFiles, name: str, tensor: torch.Tensor) -> str:
        if tensor.nbytes > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(files.partial / "rank"))
        return put(files, name, tensor)

    monkeypatch.setattr(RankFiles, "put", write)
    message = "no room for it in .*, up to [0-9.]+ [KM]B .No space left.* Nothing was loaded; .*wherry import-deepspeed"

    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        before = state_of(engine)
        with pytest.raises(wherry.WherryError, match=message):
            engine.load_checkpoint(theirs)
        assert engine.global_steps == 0
        assert_same(before, state_of(engine))

    alias(body, ranks=2, stage=1)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_files_that_scripts_load(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hold the whole model in the file of DeepSpeed's name too, where ranks do; keep the checkpoint Wherry's."""

    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        client_state = {"epoch": 7, "global_samples": "mine"}
        before = comm.traffic.bytes.get("all_gather", 0)
        for name, without_frozen in (("all", False), ("trained", True)):
            engine.save_checkpoint(tmp_path / name, client_state=client_state, exclude_frozen_parameters=without_frozen)
        assert stage < 3 or comm.traffic.bytes.get("all_gather", 0) == before, "a save at stage 3 gathers no weights"
        comm.barrier()
        # What DeepSpeed leaves in it too; the schedule only where it has not been loaded.
        _, left = engine.load_checkpoint(tmp_path / "all")
        assert {"ds_version", "param_shapes"} <= left.keys() and not {"global_steps", "lr_scheduler"} & left.keys()
        assert (left["epoch"], left["global_samples"]) == (7, "mine")
        assert "lr_scheduler" in engine.load_checkpoint(tmp_path / "all", load_lr_scheduler_states=False)[1]
        assert "global_steps" in engine.load_checkpoint(tmp_path / "all", load_module_only=True)[1]
        engine.load_checkpoint(tmp_path / "all")
        return state_of(engine)

    more = {"bf16": {"enabled": stage == 3}, "zero": {"stage3_param_persistence_threshold": 0}}
    states = alias(body, ranks=2, stage=stage, **more)[0]
    of_model, of_optimizer = ("zero_pp_rank_0_", "bf16_") if stage == 3 else ("", "")
    folders = [tmp_path / name / "global_step0" for name in ("all", "trained")]
    file = f"{of_model}mp_rank_00_model_states.pt"
    full, part = (torch.load(folder / file, weights_only=True) for folder in folders)
    assert list(full["module"]) == list(MODEL.state_dict()) and (full["epoch"], full["global_steps"]) == (7, 0)
    assert torch.equal(full["module"]["seen"], MODEL.state_dict()["seen"]) and full["buffer_names"] == ["seen"]
    for name, tensor in full["module"].items():
        if name not in ("seen", "head.weight"):  # at stage 3 weights are in the checkpoint's own files alone
            assert torch.equal(tensor.flatten(), states[f"{name}:working"][: 0 if stage == 3 else None])
    shapes = {name: shape for group in full["param_shapes"] for name, shape in group.items()}
    assert len(full["param_shapes"]) == 2 and "blocks.1.up.bias" not in shapes
    assert all(shape == MODEL.get_parameter(name).shape for name, shape in shapes.items())
    assert set(full["module"]) - set(part["module"]) == {"blocks.1.up.bias"}
    # Each rank has one of the optimizer, without states.
    paths = sorted(folders[0].glob("*_optim_states.pt"))
    assert [path.name for path in paths] == [
        f"{of_optimizer}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    ]
    for path in paths:
        saved = torch.load(path, weights_only=True)
        assert saved["optimizer_state_dict"] == {"zero_stage": stage, "partition_count": 2}
        assert saved["ds_config"]["zero_optimization"]["stage"] == stage and "safetensors" in saved["states"]
    # Nobody takes it for one of DeepSpeed's because of them.
    assert set(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "all")) == set(MODEL.state_dict())
    for name, message in (("all", "is one of Wherry's already"), ("", "is no checkpoint of DeepSpeed's")):
        assert main(["import-deepspeed", str(tmp_path / name), str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "optimizer"), [(0, adamw), (1, None)])
def test_without_partitions_there_are_no_files_of_the_optimizer(stage: int, optimizer: Any, tmp_path: Path) -> None:
    alias(lambda engine, _: engine.save_checkpoint(tmp_path), ranks=2, stage=stage, model=PLAIN, optimizer=optimizer)
    assert (tmp_path / "latest").exists() and not [*tmp_path.rglob("*_optim_states.pt")]
