"""Universal checkpoints: written of what Wherry has saved, in DeepSpeed's layout, and loaded."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import assert_same, state_of, train
from tests.compat.test_checkpoints import alias, steps_of
from tests.compat.test_importing import MODEL

from wherry.cli import main as wherry_main
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.compat.deepspeed.universal import get_model_ckpt_name_for_rank, get_zero_ckpt_name_for_rank, main
from wherry.parallel.comm import Comm

TRAINED = {name: p.shape for name, p in MODEL.named_parameters() if p.requires_grad}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}}


def saved(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        train(engine, comm, 3)
        engine.save_checkpoint(folder, "step", client_state={"epoch": 7})
        return state_of(engine)

    return alias(body, ranks=2, stage=stage, scheduler=SCHEDULE)[0]  # type: ignore[no-any-return]


def convert(folder: Path) -> Path:
    out = folder / "step_universal"
    main(SimpleNamespace(input_folder=str(folder / "step"), output_folder=str(out), num_extract_workers=1))
    return out


@pytest.mark.parametrize("stage", [1, 3])
def test_the_layout(stage: int, tmp_path: Path) -> None:
    """What DeepSpeed reads: it cuts `param` for its ranks itself."""
    states = saved(tmp_path, stage)
    out = convert(tmp_path)
    assert (tmp_path / "latest_universal").read_text() == "step_universal"
    assert {path.name for path in (out / "zero").iterdir() if path.is_dir()} == set(TRAINED)
    for name, shape in TRAINED.items():
        for file, state in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            found = torch.load(out / "zero" / name / f"{file}.pt", weights_only=True)
            assert found["cat_dim"] == 0 and torch.equal(found["param"], states[f"{name}:{state}"].view(shape))
        assert torch.load(out / "zero" / name / "step.pt", weights_only=True) == 3
    optimizer = torch.load(out / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.1]
    assert [group["params"] for group in optimizer["param_groups"]] == [[0], [1]]
    # Of stage 3 the count is looked for in the first state.
    assert optimizer["optimizer_state_dict"]["state"][0]["step"] == 3 and optimizer["ds_version"]
    model = torch.load(get_model_ckpt_name_for_rank(out, "00"), weights_only=True)
    assert (model["global_steps"], model["dp_world_size"], model["mp_world_size"], model["epoch"]) == (3, 2, 1, 7)
    assert [set(shapes) for shapes in model["param_shapes"]] == [
        {name for name, shape in TRAINED.items() if (len(shape) > 1) == matrix} for matrix in (True, False)
    ]
    assert model["shared_params"] == {"head.weight": "embed.weight"} and model["buffer_names"] == ["seen"]
    assert "last_batch_iteration" in model["lr_scheduler"]
    # At stage 3 nobody holds the whole model, there neither.
    assert model["module"]["embed.weight"].numel() == (0 if stage == 3 else MODEL.embed.weight.numel())  # type: ignore[union-attr]
    other = out / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert other.read_bytes() == Path(get_model_ckpt_name_for_rank(out, "00")).read_bytes()


@pytest.mark.parametrize(("stage", "ranks"), [(1, 3), (3, 1)])
def test_it_is_loaded(stage: int, ranks: int, tmp_path: Path) -> None:
    """With `checkpoint.load_universal` what `latest_universal` names is; its tag needs no word in the config."""
    states = saved(tmp_path, stage)
    convert(tmp_path)

    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "step_universal") and client_state["epoch"] == 7
        assert engine.global_steps == 3 and steps_of(engine, tmp_path / "again") == (3, {})
        assert engine.load_checkpoint(tmp_path, "step_universal")[0] == path
        return state_of(engine)

    for found in alias(body, ranks=ranks, stage=4 - stage, scheduler=SCHEDULE, checkpoint={"load_universal": True}):
        assert_same(states, found)


def test_states_that_have_not_an_element_for_each(tmp_path: Path) -> None:
    adafactor = partial(torch.optim.Adafactor, lr=0.01)

    def first(engine: DeepSpeedEngine, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path, "step")
        return state_of(engine)

    def again(engine: DeepSpeedEngine, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path, "step_universal")
        return state_of(engine)

    states = alias(first, ranks=2, stage=2, optimizer=adafactor)[0]
    rows = torch.load(convert(tmp_path) / "zero" / "embed.weight" / "row_var.pt", weights_only=True)
    assert rows["param"].shape == (MODEL.embed.weight.shape[0], 1)  # type: ignore[union-attr]
    for found in alias(again, ranks=3, stage=3, optimizer=adafactor):
        assert_same(states, found)


def test_moments_end_to_end_and_no_counts(tmp_path: Path) -> None:
    """As DeepSpeed's stage 3 leaves them: flat, and their count in the optimizer's first state."""
    states = saved(tmp_path, 3)
    out = convert(tmp_path)
    for folder in (path for path in (out / "zero").iterdir() if path.is_dir()):
        (folder / "step.pt").unlink()
        for file in folder.glob("*.pt"):
            torch.save(torch.load(file, weights_only=True)["param"].flatten(), file)
    (out / "mp_rank_00_model_states.pt").unlink()

    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path, "step_universal")
        assert steps_of(engine, tmp_path / "again") == (3, {})
        return state_of(engine)

    assert_same(states, alias(body, stage=1, scheduler=SCHEDULE)[0])


def test_again_and_of_what_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 1)
    for _ in range(2):  # in the place of the one before
        arguments = ["--input_folder", str(tmp_path / "step"), "--output_folder", str(convert(tmp_path))]
        assert main([*arguments, "--num_extract_workers", "1", "--num_merge_workers", "1", "--no_strict"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir() if "universal" in path.name) == [
        "latest_universal",
        "step_universal",
    ]
    capsys.readouterr()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    for source, out, told in (
        ("nowhere", "out", "there is no such folder"),
        ("step", "mine", "mine is there and is no universal checkpoint"),
    ):
        assert main(["--input_folder", str(tmp_path / source), "--output_folder", str(tmp_path / out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("ds_to_universal: ") and told in said and said.count("\n") == 1
    assert (tmp_path / "mine" / "letter").exists() and not (tmp_path / "out").exists()


def test_of_deepspeed_s_own_and_by_the_command(tmp_path: Path) -> None:
    """What DeepSpeed has written is turned into a universal one too, and that into one of Wherry's."""
    name, weight = "a", torch.randn(2, 3)
    tag = tmp_path / "step"
    tag.mkdir()
    model = {"module": {name: weight}, "param_shapes": [OrderedDict({name: weight.shape})], "global_steps": 4}
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    inner = {"state": {0: {"step": 4, "exp_avg": torch.arange(6.0)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    rank = {"single_partition_of_fp32_groups": [weight.flatten()], "base_optimizer_state": inner}
    torch.save({"optimizer_state_dict": rank}, get_zero_ckpt_name_for_rank(tag, 0, 0))
    before = sorted(path.name for path in tag.iterdir())
    out = convert(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_universal", "step", "step_universal"]
    assert sorted(path.name for path in tag.iterdir()) == before
    found = torch.load(out / "zero" / name / "exp_avg.pt", weights_only=True)["param"]
    assert torch.equal(found, torch.arange(6.0).view(2, 3))
    assert wherry_main(["import-deepspeed", str(tmp_path), str(tmp_path / "ours")]) == 0
    assert (tmp_path / "ours" / "latest").read_text() == "step_universal"
