"""Checkpoints with their neighbors in a folder, and loads that objects of a program or a disk break off."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.forgery import Forgery, engine_of, everything
from tests.security.kinds import Kind

from wherry.checkpoint import files
from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import verified


@pytest.fixture
def kind(kind_of: Callable[[str], Kind]) -> Kind:
    return kind_of("manifest")


@pytest.fixture
def engine(kind: Kind) -> Any:
    return kind.load.engine  # type: ignore[attr-defined]


def test_parts_that_fit_are_read(kind: Kind, tmp_path: Path) -> None:
    """Boxes of a weight in slices: other numbers with checksums that match load."""
    forged = Forgery(kind.folder)
    slices = []
    boxes = [(0, 4, [row, column]) for row in (0, 2) for column in (0, 2)]
    for number, (start, stop, offsets) in enumerate([*boxes[:3], (0, 1, [2, 2]), (1, 4, [2, 2])]):
        forged.add(f"part{number}", [stop - start], b"\0" * 4 * (stop - start))
        place = {"file": forged.file, "tensor": f"part{number}", "offsets": offsets, "shape": [2, 2]}
        slices.append(place | {"start": start, "stop": stop})
    forged.manifest["entries"]["first.weight"]["states"]["weight"] = slices
    assert verified(forged.write(tmp_path / "forged")).entries["first.weight"].numel == 16


# Neighbors of checkpoints.


def _text(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "manifest.json").write_text(text)


NEIGHBORS: list[Callable[[Path], Any]] = [
    _text('{"format": "wherry checkpoint", "version": 9}'),
    _text("[" * 200_000),
    lambda folder: os.mkfifo(folder / "manifest.json"),
    lambda folder: (folder / "manifest.json").symlink_to("/dev/zero"),
    lambda folder: None,
]


@pytest.mark.timeout(60)
def test_a_bad_neighbor_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(1, more={"wherry": {"checkpoint": {"keep_last": 1}}})
    engine.global_steps = 20
    neighbors = []
    for number, make in enumerate(NEIGHBORS):
        for name in (f"global_step{number}", f".global_step{number}.removed.0123456789ab"):
            neighbors.append(tmp_path / name)
            neighbors[-1].mkdir()
            make(neighbors[-1])
    (tmp_path / ".elses.removed.folder").mkdir()
    for _ in range(2):
        engine.global_steps += 1
        engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step22")
    (tmp_path / "latest").unlink()
    assert folders.newest_whole(tmp_path) == "global_step22"
    for path in neighbors[:4:2]:
        assert path.is_dir() and f"{path} is passed over" in caplog.text
    assert (tmp_path / ".elses.removed.folder").is_dir()  # another program's
    assert not (tmp_path / "global_step21").exists()
    engine.close()


def test_a_folder_of_the_users_is_no_checkpoint_to_replace(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    with pytest.raises(CheckpointError, match="is there and is no checkpoint"):
        engine.save_checkpoint(tmp_path, tag="data")
    assert (tmp_path / "data" / "precious").read_text() == "mine"


def test_the_newest_is_that_of_the_highest_step_whatever_the_clock_says(engine: Any, tmp_path: Path) -> None:
    before = engine.global_steps
    for step, created in ((10, "2031-01-01"), (30, "2029-01-01"), (20, "2030-01-01")):
        engine.global_steps = step
        engine.save_checkpoint(tmp_path)
        forged = Forgery(tmp_path / f"global_step{step}")
        forged.manifest["created"] = created
        forged.write(tmp_path / f"global_step{step}")
    engine.global_steps = before
    assert folders.newest_first(tmp_path) == ["global_step30", "global_step20", "global_step10"]
    assert folders.newest_whole(tmp_path) == "global_step20"  # which `latest` says, after a run was taken back
    (tmp_path / "latest").unlink()
    assert folders.newest_whole(tmp_path) == "global_step30"


def test_latest_names_a_folder_beside_it(kind: Kind, engine: Any, tmp_path: Path) -> None:
    Forgery(kind.folder).write(tmp_path / "in" / "step")
    latest = tmp_path / "in" / "latest"
    for text in (b"../in/step", b"..", b"/etc", b"step\0", b"\x1b[2J", b"\xff\xfe", b"x" * 5000, b"step7"):
        latest.write_bytes(text)
        with pytest.raises(CheckpointError, match=r"latest|step7|tag") as error:
            engine.load_checkpoint(latest.parent)
        assert all(line.isprintable() for line in str(error.value).splitlines())
    latest.write_bytes(b"step")
    assert engine.load_checkpoint(latest.parent)[0] == str(latest.parent / "step")


# Objects of the program's own.


class Own(torch.optim.lr_scheduler.LambdaLR):
    """A user's: its state grows, and changes its kinds."""


def test_a_schedule_of_the_users_takes_over_what_it_has_saved(tmp_path: Path) -> None:
    first, second = (engine_of(0, more={"scheduler": None}) for _ in range(2))
    for engine in (first, second):
        engine.lr_scheduler = Own(engine.optimizer, lambda step: 0.5)
        engine.lr_scheduler.history, engine.lr_scheduler.phase = [], 0
    first.lr_scheduler.history, first.lr_scheduler.phase = [1.0, 1.0], "warm"
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert (second.lr_scheduler.history, second.lr_scheduler.phase) == ([1.0, 1.0], "warm")
    for engine in (first, second):
        engine.close()


class Refusing:
    """A data loader that refuses the state 2."""

    state = 1

    def state_dict(self) -> dict[str, int]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state["state"]
        if self.state == 2:
            raise KeyError("none of mine")


REFUSALS = {
    "dataloader": "the state of the training dataloader is not taken: KeyError: 'none of mine'",
    "lr_scheduler": "the state of the learning rate schedule: _last_lr is 'x', expected the like of [0.0005]",
    "extra state": "KeyError: 'b'",
}


def test_an_object_that_refuses_its_state_changes_nothing(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's own objects may raise in the middle of a load: what was taken over by then is taken back."""
    engine = engine_of(1, seed=7)
    engine.training_dataloader = Refusing()
    norm = type(engine.module.norm)
    monkeypatch.setattr(norm, "get_extra_state", lambda self: {"b": 1}, raising=False)
    monkeypatch.setattr(norm, "set_extra_state", lambda self, state: state["b"], raising=False)
    for refusing, told in REFUSALS.items():
        forged = Forgery(kind.folder)
        forged.manifest["ranks"][0]["data"] = {"state": 2 if refusing == "dataloader" else 3}
        forged.manifest["engine"]["extra_state"] = {"norm._extra_state": {"c" if refusing == "extra state" else "b": 1}}
        if refusing == "lr_scheduler":
            forged.manifest["engine"]["lr_scheduler"]["_last_lr"] = "x"
        path, before = forged.write(tmp_path / "forged"), everything(engine)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(path)
        assert str(error.value) == f"loading {path}: {told}"
        assert everything(engine) == before and engine.training_dataloader.state == 1
    engine.close()


def test_a_disk_that_fails_in_the_middle_leaves_an_engine_that_says_so(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(1, seed=7)
    read = files.TensorReader.read

    def failing(self: Any, name: str, *more: Any) -> torch.Tensor:
        if name.endswith("second.weight:weight"):
            raise CheckpointError("the disk has a fault")
        return read(self, name, *more)

    with monkeypatch.context() as patch:
        patch.setattr(files.TensorReader, "read", failing)
        with pytest.raises(CheckpointError, match="the disk has a fault"):
            engine.load_checkpoint(kind.folder)
    with pytest.raises(ValueError, match="was broken off"):
        engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(kind.folder)
    assert engine.global_steps == 3
    engine.close()
