"""What people do to a checkpoint that nobody asked them to."""

from __future__ import annotations

import os
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
from wherry.checkpoint.reader import CheckpointReader
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


def test_state_is_made_beside_the_master_that_it_is_of(tmp_path: Path) -> None:
    """An optimizer of torch's, whose state rests where the engine does not compute."""

    def rmsprop(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9)

    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, comm, 1, first=2)
        return state_of(engine)

    def go_on(engine: Any, comm: Comm) -> Any:
        here, engine.device = engine.device, torch.device("meta")
        engine.load_checkpoint(tmp_path)
        engine.device = here
        train(engine, comm, 1, first=2)
        return state_of(engine)

    expected = on(Shape(), body, optimizer=rmsprop)[0]
    assert_same(on(Shape(), go_on, optimizer=rmsprop)[0], expected)


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

    monkeypatch.setattr(folders, "_alive", lambda found, path, lost: False)
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


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second replaces a checkpoint of the same tag whole, and leaves the others."""
    first = save_from(Shape(), tmp_path, steps=1)
    save_from(Shape(2, 3), tmp_path, steps=2)
    other = save_from(Shape(2, 2), tmp_path, steps=1)
    assert_same(load_into(Shape(), tmp_path, tag="global_step1"), other)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert folders.newest_first(tmp_path) == ["global_step1", "global_step2"]
    with CheckpointReader(tmp_path / "global_step1") as source:
        assert len(source.manifest.files) == 2


def test_who_writes_is_told_by_its_machine_and_not_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine with two names is one; containers of one name are two, of which neither can ask for the other's
    processes: what they write stays until long after its last change."""
    states = save_from(Shape(), tmp_path, tag="same")
    partial = folders.begin(tmp_path, "mine")
    monkeypatch.setattr(folders.socket, "gethostname", lambda: "renamed")
    folders.clean(tmp_path)
    assert partial.exists()
    # Its process is gone, by the one name or the other.
    gone = partial.rename(partial.with_name(partial.name.replace(f".{os.getpid()}.", ".999999999.")))
    assert folders.clean(tmp_path) == [gone]

    monkeypatch.setattr(folders, "processes", lambda: "another container")
    theirs = folders.begin(tmp_path, "theirs")
    (tmp_path / "same").rename(between := folders.aside(tmp_path, "same", "replaced"))
    monkeypatch.setattr(folders, "processes", lambda: "this container")
    assert folders.clean(tmp_path) == [] and theirs.exists() and between.exists()
    # Of a checkpoint between two renames, and of a container by this name, one knows sooner than of a stranger.
    monkeypatch.setattr(folders, "BETWEEN_RENAMES_S", -1.0)
    assert folders.clean(tmp_path) == [] and not between.exists()
    assert_same(states, load_into(Shape(2, 2), tmp_path))
    monkeypatch.setattr(folders, "RESTARTED_S", -1.0)
    monkeypatch.setattr(folders.socket, "gethostname", lambda: "renamed-again")
    assert folders.clean(tmp_path) == []
    monkeypatch.setattr(folders.socket, "gethostname", lambda: "renamed")
    assert folders.clean(tmp_path) == [theirs]
