"""Rare uses of checkpoints: foreign files, gathered weights, evaluation, read-only disks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import BF16, MODEL, Shape, assert_same, forged, load_into, on, save_from, state_of, train

import wherry
from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import ModelWriter
from wherry.cli import main
from wherry.parallel.comm import Comm


def test_a_checkpoint_reads_its_own_files_alone(tmp_path: Path) -> None:
    save_from(Shape(), tmp_path, tag="a", client_state={"kind": torch.float16})
    manifest = tmp_path / "a" / "manifest.json"
    good = manifest.read_text()

    def elsewhere(value: Any) -> None:
        value["files"]["../../secret"] = value["files"].pop("rank-00000.safetensors")

    forged(manifest, elsewhere)
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./secret' is no file of its own folder"):
        load_into(Shape(), tmp_path)
    manifest.write_text(good)

    def module_of_torch(value: Any) -> None:
        value["engine"]["client_state"]["kind"]["value"] = "os"

    forged(manifest, module_of_torch)
    with pytest.raises(CheckpointError, match="'os' is no dtype of this torch"):
        load_into(Shape(), tmp_path)


def test_tensors_that_no_file_holds(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> None:
        for value, error in (
            (torch.zeros(2, dtype=torch.complex128), "torch.strided of torch.complex128"),
            (torch.eye(2).to_sparse(), "torch.sparse_coo of torch.float32"),
            (torch.empty(2, device="meta"), "on meta"),
        ):
            with pytest.raises(CheckpointError, match=rf"client_state\['x'\]: a tensor that is .*{error}"):
                engine.save_checkpoint(tmp_path, client_state={"x": value})

    on(Shape(), body)
    assert not list(tmp_path.iterdir())


def test_a_client_state_that_is_none_on_one_rank(tmp_path: Path) -> None:
    """All ranks raise, and none waits for the one that raised first."""

    def body(engine: Any, comm: Comm) -> None:
        with pytest.raises(CheckpointError, match="rank 1: client_state is a list, expected a dict"):
            engine.save_checkpoint(tmp_path, client_state=[1] if comm.rank else {"a": 1})
        engine.save_checkpoint(tmp_path, client_state={"a": 1})

    on(Shape(2, 1), body)


@pytest.mark.parametrize("stage", [0, 3])
def test_inside_gathered(tmp_path: Path, stage: int) -> None:
    """A save works; a load would be undone by the weights that the context writes back at its end."""

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1)
        states = state_of(engine)
        with wherry.gathered(engine.module):
            engine.save_checkpoint(tmp_path, tag="inside")
            with pytest.raises(CheckpointError, match=r"inside wherry\.gathered"):
                engine.load_checkpoint(tmp_path)
        train(engine, comm, 1)
        engine.load_checkpoint(tmp_path)
        assert_same(state_of(engine), states)

    on(Shape(2, stage, more=BF16), body)


def test_saved_and_loaded_in_an_evaluation(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.eval()
        with torch.inference_mode():
            engine.save_checkpoint(tmp_path)
        engine.train()
        train(engine, comm, 1, first=2)
        return state_of(engine)

    def resume(engine: Any, comm: Comm) -> Any:
        with torch.inference_mode():
            engine.load_checkpoint(tmp_path)
        train(engine, comm, 1, first=2)
        return state_of(engine)

    def rmsprop(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9)

    for make in (None, rmsprop):
        optimizer: dict[str, Any] = {} if make is None else {"optimizer": make}
        expected = on(Shape(1, 3), body, **optimizer)[0]
        assert_same(on(Shape(1, 3), resume, **optimizer)[0], expected)


def test_inspect_and_export_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_from(Shape(), tmp_path)
    left = tmp_path / ".global_step9.partial.here.1.1.0"
    left.mkdir()
    (tmp_path / ".latest.1.tmp").write_text("")
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    assert left.exists() and (tmp_path / ".latest.1.tmp").exists()
    capsys.readouterr()


def test_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load although half-written folders cannot be deleted."""
    states = save_from(Shape(), tmp_path)
    (tmp_path / ".latest.1.tmp").write_text("")
    replaced = tmp_path / ".best.replaced.here.1.1.0"
    replaced.mkdir()
    (replaced / "manifest.json").write_text("{}")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(folders, "_is_abandoned", lambda path: True)
    monkeypatch.setattr(folders.os, "rename", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert_same(load_into(Shape(), tmp_path), states)


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    mine = tmp_path / "model_best.safetensors"
    mine.write_text("mine")
    for count in (3, 1):
        with ModelWriter(tmp_path, 12, [str(n) for n in range(count)], {}) as writer:
            for number in range(count):
                writer.add(str(number), torch.zeros(3))
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"model_best.safetensors", "model.safetensors", "model.safetensors.index.json"}


def test_a_schedule_that_the_checkpoint_has_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_from(Shape(), tmp_path)
    model = copy.deepcopy(MODEL)
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        config={"train_micro_batch_size_per_gpu": 2},
    )
    engine.load_checkpoint(tmp_path)
    assert "holds no learning rate schedule: the engine's stays as it is" in caplog.text
    engine.close()
