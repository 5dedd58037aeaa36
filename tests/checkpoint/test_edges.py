"""What people do to a checkpoint that nobody asked them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, forged, load_into, on, save_from, state_of, train
from tests.engine.harness import make_model

import wherry
from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import ModelWriter
from wherry.cli import main
from wherry.parallel.comm import Comm


def test_a_strangers_checkpoint_reads_its_own_files_alone(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(2, dtype=torch.complex128), "torch.strided of torch.complex128"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo of torch.float32"),
        (torch.empty(2, device="meta"), "on meta"),
    ],
)
def test_tensors_that_no_file_holds(tmp_path: Path, value: torch.Tensor, told: str) -> None:
    with pytest.raises(CheckpointError, match=rf"client_state\['x'\]: a tensor that is .*{told}"):
        save_from(Shape(), tmp_path, steps=0, client_state={"x": value})
    assert not list(tmp_path.iterdir())


def test_a_client_state_that_is_none_on_one_rank(tmp_path: Path) -> None:
    """All ranks hear of it, instead of waiting for the one that has raised."""

    def body(engine: Any, comm: Comm) -> None:
        with pytest.raises(CheckpointError, match="rank 1: client_state is a list, expected a dict"):
            engine.save_checkpoint(tmp_path, client_state=[1] if comm.rank else {"a": 1})
        engine.save_checkpoint(tmp_path, client_state={"a": 1})

    on(Shape(2, 1), body)


def test_inside_gathered(tmp_path: Path) -> None:
    """A save has what is there; a load would be undone by what is written back at the end."""

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

    for stage in (0, 3):
        on(Shape(2, stage, more={"bf16": {"enabled": True}}), body)


def test_saved_and_loaded_in_an_evaluation(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.eval()
        with torch.inference_mode():
            engine.save_checkpoint(tmp_path)
        engine.train()
        train(engine, comm, 1, first=2)
        expected = state_of(engine)
        return expected

    def go_on(engine: Any, comm: Comm) -> Any:
        with torch.inference_mode():
            engine.load_checkpoint(tmp_path)
        train(engine, comm, 1, first=2)
        return state_of(engine)

    def rmsprop(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9)

    for make in (None, rmsprop):
        given: dict[str, Any] = {} if make is None else {"optimizer": make}
        expected = on(Shape(2, 3), body, **given)[0]
        assert_same(on(Shape(2, 3), go_on, **given)[0], expected)


def test_who_only_looks_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_from(Shape(), tmp_path)
    left = tmp_path / ".global_step9.partial.here.1.1.0"
    left.mkdir()
    (tmp_path / ".latest.1.tmp").write_text("")
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    assert left.exists() and (tmp_path / ".latest.1.tmp").exists()
    capsys.readouterr()


def test_a_disk_that_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be cleaned is no reason not to load."""
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
    model = make_model()
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        config={"train_micro_batch_size_per_gpu": 2},
    )
    engine.load_checkpoint(tmp_path)
    assert "holds no learning rate schedule: the engine's stays as it is" in caplog.text
    engine.close()
