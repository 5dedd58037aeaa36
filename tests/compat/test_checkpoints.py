"""`save_checkpoint` and `load_checkpoint` of the alias's engine: DeepSpeed's own files, and their arguments."""

from __future__ import annotations

import copy
import errno
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, on, state_of, train
from tests.compat.test_importing import MODEL, adamw, write

import wherry
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.format import RankFiles
from wherry.cli import main
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.compat.deepspeed.export import get_fp32_state_dict_from_zero_checkpoint, get_optim_files
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
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **copy.deepcopy(more)}
        made = optimizer(mine.parameters()) if optimizer is not None else None
        engine, *_ = wherry.initialize(
            model=mine, optimizer=made, mesh=comm, config=config, engine_class=DeepSpeedEngine
        )
        assert isinstance(engine, DeepSpeedEngine)
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


def write_stage_0(folder: Path, states: dict[str, torch.Tensor], flat: bool, **more: Any) -> None:
    """The one file of stage 0: states of each parameter by number, or (16 bits) end to end of each group."""
    groups = [list(group["params"]) for group in adamw(MODEL.parameters()).param_groups]
    names = {p: n for n, p in MODEL.named_parameters()}
    moments = ("exp_avg", "exp_avg_sq")
    module: dict[str, torch.Tensor] = OrderedDict(
        (n, states[f"{n}:master"].view(t.shape) if f"{n}:master" in states else t)
        for n, t in MODEL.state_dict().items()
    )
    module["head.weight"] = module["embed.weight"]
    if flat:
        module = OrderedDict((n, t.bfloat16() if f"{n}:master" in states else t) for n, t in module.items())
        module["head.weight"] = module["embed.weight"]
        flats = {s: [torch.cat([states[f"{names[p]}:{s}"] for p in g]) for g in groups] for s in ("master", *moments)}
        state = {i: {"step": 6, **{m: flats[m][i] for m in moments}} for i in range(2)}
        inner = {
            "state": state,
            "param_groups": [{"lr": 0.5, "weight_decay": w, "params": [i]} for i, w in enumerate((0.1, 0.0))],
        }
        optimizer: dict[str, Any] = {
            "optimizer_state_dict": inner, "fp32_groups_flat": flats["master"], "clip_grad": 1.0, "cur_scale": 512.0,
            "cur_iter": 9, "last_overflow_iter": 2, "scale_window": 3, "dynamic_loss_scale": True,
        }  # fmt: skip
    else:
        state, listed = {}, []
        for group, decay in zip(groups, (0.1, 0.0), strict=True):
            first = len(state)
            for parameter in group:
                own = {m: states[f"{names[parameter]}:{m}"].view(parameter.shape) for m in moments}
                # Of some of DeepSpeed's optimizers the last parameter has the count of its group.
                state[len(state)] = {"step": 5 if parameter is group[-1] else 0, **own}
            listed.append({"lr": 0.5, "weight_decay": decay, "step": 0, "params": list(range(first, len(state)))})
        optimizer = {"state": state, "param_groups": listed}
    tag = folder / "global_step5"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    saved = {
        "module": module, "buffer_names": ["seen"], "optimizer": optimizer, "param_shapes": None, "shared_params": None,
        "global_steps": 5, "skipped_steps": 0, "global_samples": 20, "dp_world_size": 2, "epoch": 7,
        "lr_scheduler": {"last_batch_iteration": 4}, **more,
    }  # fmt: skip
    torch.save(saved, tag / "mp_rank_00_model_states.pt")


def steps_of(engine: DeepSpeedEngine, folder: Path) -> tuple[int, dict[str, int]]:
    """The updates that a checkpoint of it counts, and of parameters that have had fewer."""
    engine.save_checkpoint(folder, "counts")
    engine.comm.barrier()
    saved = read_manifest(folder / "counts").engine["optimizer"]
    return saved["steps"], saved["parameter_steps"]


def loaded(folder: Path) -> Body:
    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        path, client_state = engine.load_checkpoint(folder)
        assert path == str(folder / "global_step5") and client_state["epoch"] == 7 and engine.global_steps == 5
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
        assert engine.get_lr() == [0.5, 0.5] and "step" not in engine.optimizer.param_groups[0]
        comm.barrier()
        assert not [each for each in folder.iterdir() if each.name.startswith(".")]
        return state_of(engine), steps_of(engine, folder / "again")

    return body


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_theirs_load_as_they_are(states: dict[str, torch.Tensor], stage: int, tmp_path: Path) -> None:
    """By any number of ranks at any stage; nothing is left beside them."""
    write(tmp_path, states, stage, 2)
    for found, steps in alias(loaded(tmp_path), ranks=2, stage=3 - stage):
        assert_same(states, found)
        assert steps == (5, {})


@pytest.mark.parametrize("stage", [1, 3])
def test_another_number_of_ranks(stage: int, tmp_path: Path) -> None:
    """DeepSpeed refuses these; here the optimizer's states come along."""

    def save(engine: DeepSpeedEngine, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path, "step")
        return state_of(engine)

    def load(engine: DeepSpeedEngine, comm: Comm) -> Any:
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "step") and engine.global_steps == 2
        return state_of(engine)

    states = alias(save, ranks=2, stage=stage)[0]
    for ranks in (1, 3):
        for found in alias(load, ranks=ranks, stage=stage):
            assert_same(states, found)


@pytest.mark.parametrize("flat", [False, True])
def test_theirs_of_stage_0(states: dict[str, torch.Tensor], flat: bool, tmp_path: Path) -> None:
    """Its optimizer numbers parameters: the engine knows their names."""
    write_stage_0(tmp_path, states, flat)
    for found, steps in alias(loaded(tmp_path), ranks=2, stage=2):
        assert_same(states, found)
        assert steps == ((6 if flat else 5), {})


def test_a_loss_scale_goes_on(states: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Of the 6 good steps after the overflow the first does not count, and every third doubles: 2 are left over."""
    write_stage_0(tmp_path, states, flat=True)

    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path / "again")
        return read_manifest(tmp_path / "again" / "global_step5").engine["loss_scale"]

    (found,) = alias(body, fp16={"enabled": True, "loss_scale_window": 3})
    assert found["scale"] == 512.0 and found["good_steps"] == (9 - 2 - 2) % 3


@pytest.mark.parametrize("flat", [False, True])
def test_stage_0_by_the_command(
    states: dict[str, torch.Tensor], flat: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows its groups there, so it says what it leaves."""
    write_stage_0(tmp_path / "theirs", states, flat)
    assert main(["import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0

    def body(engine: Any, comm: Comm) -> Any:
        with pytest.raises(wherry.WherryError, match="it holds no optimizer"):
            engine.load_checkpoint(tmp_path / "ours")
        engine.load_checkpoint(tmp_path / "ours", load_optimizer_states=False)
        return state_of(engine)

    found = on(Shape(), body, model=MODEL, optimizer=adamw)[0]
    assert torch.allclose(found["embed.weight:master"], states["embed.weight:master"], rtol=1e-2)


def test_one_group_of_stage_0_by_the_command(tmp_path: Path) -> None:
    tag = tmp_path / "step"
    tag.mkdir()
    state = {i: {"step": 3, "exp_avg": torch.full_like(p, i)} for i, p in enumerate(PLAIN.parameters())}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": [0, 1, 2, 3]}]}
    torch.save({"module": PLAIN.state_dict(), "optimizer": optimizer}, tag / "mp_rank_00_model_states.pt")
    assert main(["import-deepspeed", str(tag), str(tmp_path / "ours")]) == 0

    manifest = read_manifest(tmp_path / "ours" / "global_step0")
    assert manifest.engine["optimizer"]["steps"] == 3
    assert all("exp_avg" in entry.states for entry in manifest.entries.values())


def test_sub_groups_of_stage_3_are_parts_of_their_groups(tmp_path: Path) -> None:
    """The optimizer's groups name the numbers of theirs."""
    names = [name for name, _ in PLAIN.named_parameters()]
    order = ["a.weight", "b.weight", "a.bias", "b.bias"]
    shapes = [OrderedDict({n: PLAIN.get_parameter(n).shape}) for n in order]
    flats = [PLAIN.get_parameter(n).detach().flatten() for n in order]
    inner = {
        "state": {i: {"step": 2, "exp_avg": torch.ones_like(f)} for i, f in enumerate(flats)},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2, 3]}],
    }
    tag = tmp_path / "step"
    tag.mkdir()
    model = {"module": {n: torch.empty(0) for n in names}, "param_shapes": shapes}
    torch.save(model, tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    saved = {"optimizer_state_dict": {"fp32_flat_groups": flats, "optimizer_state_dict": inner}}
    torch.save(saved, tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert main(["import-deepspeed", str(tag), str(tmp_path / "ours")]) == 0
    groups = read_manifest(tmp_path / "ours" / "global_step0").engine["optimizer"]["groups"]
    assert groups == [
        {"options": {"lr": 0.1}, "parameters": ["a.weight", "b.weight"]},
        {"options": {"lr": 0.2}, "parameters": ["a.bias", "b.bias"]},
    ]


# Arguments.


def test_where_nothing_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
        with pytest.raises(AssertionError, match="holds no checkpoint other; those that are there: none"):
            engine.load_checkpoint(tmp_path, "other")
        engine.save_checkpoint(tmp_path, tag=7, save_latest=False)
        # Without `latest` a tag has to be given, which may be a number.
        assert engine.load_checkpoint(tmp_path) == (None, None)
        assert engine.load_checkpoint(tmp_path, 7)[0] == str(tmp_path / "7")
        with pytest.raises(AssertionError, match="those that are there: 7") as raised:
            engine.load_checkpoint(tmp_path, "other")
        assert isinstance(raised.value, wherry.WherryError)

    alias(body, ranks=2, stage=1, model=PLAIN)


@pytest.mark.parametrize("folder", [None, ""])
def test_saved_to_nowhere(folder: Any) -> None:
    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        with pytest.raises(ValueError, match="expected the path of a folder") as raised:
            engine.save_checkpoint(folder)
        assert isinstance(raised.value, wherry.WherryError)

    alias(body, ranks=2, model=PLAIN)


def test_tags_that_differ(tmp_path: Path) -> None:
    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        with pytest.raises(AssertionError, match="the ranks gave different tags"):
            engine.save_checkpoint(tmp_path, tag=f"tag-{comm.rank}")

    alias(body, ranks=2, model=PLAIN, checkpoint={"tag_validation": "Fail"})


def test_a_function_that_loads(tmp_path: Path) -> None:
    """It gets whole weights and the whole module, which keeps what it writes."""

    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})

        def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
            assert set(src) == set(dict(PLAIN.named_parameters()))
            dst.load_state_dict({name: tensor + 1 for name, tensor in src.items()})

        assert engine.load_checkpoint(tmp_path, custom_load_fn=load)[1]["epoch"] == 3
        return state_of(engine)

    for found in alias(body, ranks=2, stage=3, model=PLAIN):
        for name, parameter in PLAIN.named_parameters():
            for kind in ("working", "master"):
                assert torch.equal(found[f"{name}:{kind}"], parameter.detach().flatten() + 1)


def test_a_universal_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        with pytest.raises(ValueError, match="holds no latest_universal"):
            engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step0")

    alias(body, ranks=2, model=PLAIN, checkpoint={"load_universal": True})


# Where theirs are turned into ours.


class Disks:
    """Theirs in a folder, read-only if asked for, and another for temporary files; both as they were at the end."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.theirs, self.temporary = folder / "theirs", folder / "temporary"
        self.temporary.mkdir()
        self.patch = patch
        patch.setattr(tempfile, "tempdir", str(self.temporary))

    def make_read_only(self, *folders: Path) -> None:
        mkdir = Path.mkdir

        def refuse(path: Path, *given: Any, **named: Any) -> None:
            if path.parent in folders:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            mkdir(path, *given, **named)

        self.patch.setattr(Path, "mkdir", refuse)

    def fill(self, code: int) -> None:
        """No tensor of more than some bytes can be written any more."""
        put = RankFiles.put

        def write(files: RankFiles, name: str, tensor: torch.Tensor) -> str:
            if tensor.nbytes > 1000:
                raise OSError(code, os.strerror(code), str(files.partial / "rank"))
            return put(files, name, tensor)

        self.patch.setattr(RankFiles, "put", write)

    def check_left(self, *beside: str) -> None:
        assert not [*self.temporary.iterdir()]
        assert {path.name for path in self.theirs.iterdir()} == {"global_step5", "latest", *beside}


@pytest.fixture
def disks(states: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    made = Disks(tmp_path, monkeypatch)
    write(made.theirs, states, 2, 2)
    return made


def test_theirs_in_a_folder_that_is_only_read(
    states: dict[str, torch.Tensor], disks: Disks, caplog: pytest.LogCaptureFixture
) -> None:
    """They load by way of a temporary folder, of which one line tells."""
    caplog.set_level("INFO", "wherry")
    disks.make_read_only(disks.theirs)

    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        path, client_state = engine.load_checkpoint(disks.theirs)
        assert path == str(disks.theirs / "global_step5") and client_state["epoch"] == 7
        return state_of(engine)

    for found in alias(body, ranks=2, stage=3):
        assert_same(states, found)
    disks.check_left()
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        "turned into one of Wherry's" in line and line.endswith("beside it (Read-only file system)") for line in lines
    )
    assert any(line.startswith(f"loaded {disks.theirs / 'global_step5'}: step 5") for line in lines)
    assert not any("wherry-" in line for line in lines)


@pytest.mark.parametrize("only_read", [False, True])
def test_errors_name_theirs(disks: Disks, only_read: bool) -> None:
    if only_read:
        disks.make_read_only(disks.theirs)

    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        with pytest.raises(wherry.WherryError, match=r"it lacks a\.weight") as raised:
            engine.load_checkpoint(disks.theirs)
        assert str(disks.theirs / "global_step5") in str(raised.value)
        assert "imported" not in str(raised.value) and "wherry-" not in str(raised.value)

    alias(body, ranks=2, stage=2, model=PLAIN)
    disks.check_left()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("only_read", [False, True])
def test_a_disk_that_is_full(disks: Disks, only_read: bool, code: int) -> None:
    if only_read:
        disks.make_read_only(disks.theirs)
    disks.fill(code)
    place = disks.temporary if only_read else disks.theirs

    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        before = state_of(engine)
        with pytest.raises(wherry.WherryError) as raised:
            engine.load_checkpoint(disks.theirs)
        told = str(raised.value)
        assert f"{disks.theirs / 'global_step5'} is DeepSpeed's" in told and "\n" not in told
        assert re.search(f"no room for it in {place}, up to [0-9.]+ [KM]B", told) and os.strerror(code) in told
        assert "Nothing was loaded" in told and "wherry import-deepspeed" in told
        assert engine.global_steps == 0
        assert_same(before, state_of(engine))

    alias(body, ranks=2, stage=1)
    disks.check_left()


def test_no_folder_to_turn_theirs_in(disks: Disks) -> None:
    disks.make_read_only(disks.theirs)
    disks.patch.setattr(tempfile, "tempdir", str(disks.temporary / "gone"))

    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        with pytest.raises(wherry.WherryError, match=r"Read-only .*, nor in a temporary folder \(No such file.*TMPDIR"):
            engine.load_checkpoint(disks.theirs)

    alias(body)


def test_a_temporary_folder_that_another_node_does_not_see(disks: Disks) -> None:
    disks.make_read_only(disks.theirs)
    here, is_dir = threading.local(), Path.is_dir

    def seen(path: Path, **named: Any) -> bool:
        return is_dir(path, **named) and not (path.parent == disks.temporary and here.rank)

    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        here.rank = comm.rank
        with pytest.raises(
            wherry.WherryError, match=r"rank 1: what rank 0 makes .* which this rank does not see; let all nodes"
        ):
            engine.load_checkpoint(disks.theirs)
        assert engine.global_steps == 0

    disks.patch.setattr(Path, "is_dir", seen)
    alias(body, ranks=2)
    disks.check_left()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_file_that_scripts_load(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where ranks hold the whole model it is in the file of DeepSpeed's name too, and the checkpoint stays Wherry's."""

    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        given = {"epoch": 7, "global_samples": "mine"}
        for name, frozen_too in (("all", True), ("trained", False)):
            engine.save_checkpoint(tmp_path / name, client_state=given, exclude_frozen_parameters=not frozen_too)
        comm.barrier()
        _, told = engine.load_checkpoint(tmp_path / "all")
        # What DeepSpeed leaves in it too; the schedule only where it has not been loaded.
        assert told["epoch"] == 7 and told["ds_version"] and told["param_shapes"] and "global_steps" not in told
        assert "lr_scheduler" not in told and told["global_samples"] == "mine"
        assert "lr_scheduler" in engine.load_checkpoint(tmp_path / "all", load_lr_scheduler_states=False)[1]
        assert "global_steps" in engine.load_checkpoint(tmp_path / "all", load_module_only=True)[1]
        engine.load_checkpoint(tmp_path / "all")
        return state_of(engine)

    states = alias(body, ranks=2, stage=stage)[0]
    file = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    paths = [tmp_path / name / "global_step0" / file for name in ("all", "trained")]
    full, part = (torch.load(path, weights_only=True) for path in paths)
    assert list(full["module"]) == list(MODEL.state_dict()) and (full["epoch"], full["global_steps"]) == (7, 0)
    assert torch.equal(full["module"]["seen"], MODEL.state_dict()["seen"]) and full["buffer_names"] == ["seen"]
    for name, tensor in full["module"].items():
        if name not in ("seen", "head.weight"):
            assert torch.equal(tensor.flatten(), states[f"{name}:working"][: 0 if stage == 3 else None])
    shapes = {name: shape for group in full["param_shapes"] for name, shape in group.items()}
    assert len(full["param_shapes"]) == 2 and "blocks.1.up.bias" not in shapes
    assert all(shape == MODEL.get_parameter(name).shape for name, shape in shapes.items())
    assert set(full["module"]) - set(part["module"]) == {"blocks.1.up.bias"}
    if stage == 3:  # whose weights are in the checkpoint's own files alone
        assert os.path.getsize(paths[0]) < 16384
    else:
        assert full["module"]["head.weight"].data_ptr() == full["module"]["embed.weight"].data_ptr()
        assert os.path.getsize(paths[1]) < os.path.getsize(paths[0])
    assert main(["import-deepspeed", str(tmp_path / "all"), str(tmp_path / "out")]) == 2
    assert "is one of Wherry's already" in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "bf16"), [(0, True), (1, False), (2, True), (3, False), (3, True)])
def test_the_files_of_the_optimizer_that_scripts_look_for(stage: int, bf16: bool, tmp_path: Path) -> None:
    """One of each rank where DeepSpeed has them; they say what they are, and hold no states."""

    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        engine.save_checkpoint(tmp_path, "step")

    alias(body, ranks=2, stage=stage, model=PLAIN, bf16={"enabled": bf16})
    found = sorted((tmp_path / "step").glob("*_optim_states.pt"))
    prefix = "bf16_" if bf16 else ""
    names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2 if stage else 0)]
    assert [path.name for path in found] == names
    for path in found:
        saved = torch.load(path, weights_only=True)
        assert saved["optimizer_state_dict"] == {"zero_stage": stage, "partition_count": 2}
        assert saved["ds_config"]["zero_optimization"]["stage"] == stage and "safetensors" in saved["states"]
        assert path.stat().st_size < 8192
    assert get_optim_files(tmp_path / "step") == list(map(str, found)) or not stage
    # Nobody takes it for one of DeepSpeed's because of them.
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(weights) == set(dict(PLAIN.named_parameters()))


def test_without_an_optimizer_no_file_of_one(tmp_path: Path) -> None:
    def body(engine: DeepSpeedEngine, comm: Comm) -> None:
        engine.save_checkpoint(tmp_path, "step")

    alias(body, ranks=2, stage=3, model=PLAIN, optimizer=None)
    found = [path.name for path in (tmp_path / "step").glob("*.pt")]
    assert found == ["zero_pp_rank_0_mp_rank_00_model_states.pt"]


def test_modules_without_experts() -> None:
    """A script that splits groups for experts gets them back; there are no experts of DeepSpeed's."""
    from wherry.compat.deepspeed import moe

    group = {"params": list(PLAIN.parameters()), "name": "all"}
    assert moe.split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert moe.split_params_into_different_moe_groups_for_optimizer([group]) == [group]
    assert moe.has_moe_layers(PLAIN) == (False, 0)
    expert = torch.nn.Parameter(torch.ones(1))
    expert.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="experts"):
        moe.split_params_into_different_moe_groups_for_optimizer({"params": [expert]})


def test_a_save_at_stage_3_gathers_no_weights(tmp_path: Path) -> None:
    def body(engine: DeepSpeedEngine, comm: Comm) -> Any:
        before = comm.traffic.bytes.get("all_gather", 0)
        engine.save_checkpoint(tmp_path)
        return comm.traffic.bytes.get("all_gather", 0) - before

    persistent = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    assert alias(body, ranks=2, stage=3, **persistent) == [0, 0]
