"""Checkpoints of any content: a load is refused with one error and changes nothing, and neighbors are left alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.forgery import CLIENT_STATE, CONFIG, Forgery, Model, engine_of, everything, sign

import wherry
from wherry.checkpoint import files
from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import verified
from wherry.checkpoint.format import KIND


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    engine = engine_of(3)
    engine.save_checkpoint(folder, client_state=CLIENT_STATE)
    engine.close()
    return folder / "global_step3"


@pytest.fixture(scope="module")
def engine(whole: Path) -> Iterator[Any]:
    made = engine_of(1, seed=7)
    yield made
    made.close()


def refused(engine: Any, path: Path, told: str) -> None:
    before = everything(engine)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(path)
    assert "broken off" not in str(error.value) and len(str(error.value)) < 5000
    assert str(error.value).isprintable()  # in one line
    assert told in str(error.value), str(error.value)
    assert everything(engine) == before


def test_a_checkpoint_written_again_loads(engine: Any, whole: Path, tmp_path: Path) -> None:
    before = everything(engine)
    _, state = engine.load_checkpoint(Forgery(whole).write(tmp_path / "same"))
    assert everything(engine) != before and engine.global_steps == 3
    assert state is not None and torch.equal(state.pop("tensor"), CLIENT_STATE["tensor"])
    assert state.pop("array").tolist() == [0, 1, 2, 3]
    assert state == {key: value for key, value in CLIENT_STATE.items() if key not in ("tensor", "array")}


def test_parts_that_fit_are_read(whole: Path, tmp_path: Path) -> None:
    """Boxes of a weight in slices: other numbers with checksums that match load."""
    forged = Forgery(whole)
    quarters = [(0, 4, [row, column], [2, 2]) for row in (0, 2) for column in (0, 2)]
    slices = []
    for number, (start, stop, offsets, shape) in enumerate(
        [*quarters[:3], (0, 1, [2, 2], [2, 2]), (1, 4, [2, 2], [2, 2])]
    ):
        forged.add(f"part{number}", "F32", [stop - start], b"\0" * 4 * (stop - start))
        place = {"file": forged.file, "tensor": f"part{number}", "offsets": offsets, "shape": shape}
        slices.append(place | {"start": start, "stop": stop})
    forged.entries["first.weight"]["states"]["weight"] = slices
    assert verified(forged.write(tmp_path / "forged")).entries["first.weight"].numel == 16


SIGNED = '{"format": "wherry checkpoint", "version": 1'
TEXTS = {
    "nothing": "",
    "no object": "[]",
    "deep": '{"format":' + "[" * 200_000,
    "a long number": '{"format": ' + "9" * 10_000 + "}",
    "a version of another kind": '{"format": "wherry checkpoint", "version": [1]}',
    "no checksum": SIGNED + "}",
    "an empty checksum": SIGNED + ', "sha256": ""}',
    "a checksum alone": SIGNED + ', "sha256": "' + "0" * 64 + '"}',
}


def test_a_manifest_of_any_text_is_refused(engine: Any, whole: Path, tmp_path: Path) -> None:
    path = Forgery(whole).write(tmp_path / "forged")
    text = (path / "manifest.json").read_text()
    for case in TEXTS.values():
        sign(path, case)
        refused(engine, path, "manifest.json")
    (path / "manifest.json").write_text(text.replace('"world_size": 1', '"world_size": 2', 1))
    refused(engine, path, "its checksum does not match")
    (path / "manifest.json").write_bytes(b"\xff{}")
    refused(engine, path, "manifest.json cannot be read")


def test_a_header_of_any_bytes_is_refused(engine: Any, whole: Path, tmp_path: Path) -> None:
    for header in (b"{", b"\xff\xfe{}", b'{"a":' + b"[" * 200_000):
        forged = Forgery(whole)
        forged.headers[forged.file] = header
        refused(engine, forged.write(tmp_path / "forged"), "header cannot be read")
    forged = Forgery(whole)
    forged.data[forged.file] += bytes(64)
    refused(engine, forged.write(tmp_path / "forged"), "and the file at")


# Neighbors of checkpoints.


def _deep(folder: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def _remove_deep(folder: Path) -> None:
    """Remove folders within each other that lie deeper than Python removes."""
    while (folder / "d" / "d").exists():
        (folder / "d" / "d").rename(folder / "inner")
        (folder / "d").rmdir()
        (folder / "inner").rename(folder / "d")


def _text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "manifest.json").write_text(text) and None


NEIGHBORS: list[Callable[[Path], Any]] = [
    _text("{"),
    _text('{"format": "wherry checkpoint", "version": 9}'),
    _text('{"files": []}'),
    _text("[" * 200_000),
    lambda folder: os.mkfifo(folder / "manifest.json"),
    lambda folder: (folder / "manifest.json").symlink_to("/dev/zero"),
    lambda folder: (folder / "manifest.json").mkdir(),
    lambda folder: None,
    _deep,
]


@pytest.mark.timeout(120)
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
    try:
        for _ in range(2):
            engine.global_steps += 1
            engine.save_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step22")
        (tmp_path / "latest").unlink()
        assert folders.newest_whole(tmp_path) == "global_step22"
        for path in neighbors:
            named = not path.name.startswith(".") and (path / "manifest.json").is_file()
            assert not named or f"{path} is passed over" in caplog.text, path
        assert (tmp_path / ".elses.removed.folder").is_dir()  # another program's
        assert not (tmp_path / "global_step21").exists()
    finally:
        engine.close()
        for path in neighbors[-2:]:
            _remove_deep(path)


def test_a_folder_of_the_users_is_no_checkpoint_to_replace(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    with pytest.raises(CheckpointError, match="is there and is no checkpoint"):
        engine.save_checkpoint(tmp_path, tag="data")
    assert (tmp_path / "data" / "precious").read_text() == "mine"


def test_a_save_that_is_committed_does_not_raise(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save_checkpoint(tmp_path, tag="first")
    write = folders.write_text

    def full(path: Path, text: str) -> None:
        if path.name == "latest":
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(folders, "write_text", full)
    engine.save_checkpoint(tmp_path, tag="second")
    assert "second is whole, and latest cannot be written" in caplog.text
    assert verified(tmp_path / "second").tag == "second"


def test_the_newest_is_that_of_the_highest_step_whatever_the_clock_says(engine: Any, tmp_path: Path) -> None:
    for step, created in ((10, "2031-01-01"), (30, "2029-01-01"), (20, "2030-01-01")):
        engine.global_steps = step
        engine.save_checkpoint(tmp_path)
        forged = Forgery(tmp_path / f"global_step{step}")
        forged.manifest["created"] = created
        forged.write(tmp_path / f"global_step{step}")
    assert folders.newest_first(tmp_path) == ["global_step30", "global_step20", "global_step10"]
    assert folders.newest_whole(tmp_path) == "global_step20"  # which `latest` says, after a run was taken back
    (tmp_path / "latest").unlink()
    assert folders.newest_whole(tmp_path) == "global_step30"


def test_a_checkpoint_in_the_cache_of_a_hub_loads(engine: Any, whole: Path, tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    Forgery(whole).write(folder)
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 3


class Own(torch.optim.lr_scheduler.LambdaLR):
    """A user's: its state grows, and changes its kinds."""

    best = None

    def __init__(self, optimizer: Any) -> None:
        self.history: list[float] = []
        self.phase: Any = 0
        super().__init__(optimizer, lambda step: 0.5)

    def step(self, *more: Any) -> None:
        super().step(*more)
        self.history.append(1.0)
        self.best, self.phase = 0.1, "warm"


def test_a_schedule_of_the_users_takes_over_what_it_has_saved(tmp_path: Path) -> None:
    engines = [engine_of(0, more={"scheduler": None}) for _ in range(2)]
    for engine in engines:
        engine.lr_scheduler = Own(engine.optimizer)
    for _ in range(2):
        engines[0].backward(engines[0](torch.ones(3, 4)))
        engines[0].step()
    engines[0].save_checkpoint(tmp_path)
    engines[1].load_checkpoint(tmp_path)
    schedule = engines[1].lr_scheduler
    assert (len(schedule.history), schedule.best, schedule.phase) == (3, 0.1, "warm")
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", ["lr_scheduler", "dataloader", "extra state"])
def test_an_object_that_refuses_its_state_changes_nothing(whole: Path, tmp_path: Path, kind: str) -> None:
    """A program's own objects may raise in the middle of a load: what was taken over by then is taken back."""
    engine = engine_of(1, seed=7)

    class Refusing:
        state = 1

        def state_dict(self) -> dict[str, int]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["state"]
            if self.state == 2:
                raise KeyError("none of mine")

    forged = Forgery(whole)
    if kind == "dataloader":
        engine.training_dataloader = Refusing()
        forged.manifest["ranks"][0]["data"] = {"state": 2}
    else:
        engine.training_dataloader = Refusing()
        forged.manifest["ranks"][0]["data"] = {"state": 3}
        if kind == "lr_scheduler":
            forged.engine["lr_scheduler"]["_last_lr"] = "x"
        else:
            module = engine.module.norm
            type(module).get_extra_state = lambda self: {"b": 1}  # type: ignore[method-assign]
            type(module).set_extra_state = lambda self, state: state["b"]  # type: ignore[method-assign]
            forged.engine["extra_state"] = {"norm._extra_state": {"c": 1}}
    try:
        refused(engine, forged.write(tmp_path / "forged"), "")
        assert engine.training_dataloader.state == 1
    finally:
        if kind == "extra state":
            del type(module).get_extra_state, type(module).set_extra_state
        engine.close()


class Seeing(torch.optim.AdamW):
    """With a count of its own for each parameter, and one that is a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state.update(seen=state.get("seen", 0) + 1, lasts=[state["exp_avg"].sum()])


def seeing(steps: int) -> Any:
    model = Model()
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "scheduler": CONFIG["scheduler"],
    }
    engine, *_ = wherry.initialize(model=model, optimizer=Seeing(model.parameters()), config=config)
    for _ in range(steps):
        engine.backward(engine(torch.randn(3, 4)))
        engine.step()
    return engine


def test_values_that_an_optimizer_keeps_beside_tensors(tmp_path: Path) -> None:
    saved, engine = seeing(2), seeing(1)
    saved.save_checkpoint(tmp_path)
    forged = Forgery(tmp_path / "global_step2")
    rank = forged.manifest["ranks"][0]
    assert rank["objects"]["first.weight"]["seen"] == 2
    for objects, told in (
        ([1], "objects: expected them by parameter, got a list"),
        ({"first.weight": [1, 2]}, "the optimizer's state of first.weight: expected values by name, got a list"),
        ({"first.weight": None}, "the optimizer's state of first.weight: expected values by name, got a NoneType"),
        ({"first.weight": {KIND: "what", "value": 1}}, "a value of kind 'what' is not known"),
        ({"first.weight": {KIND: "tensor", "value": "nowhere"}}, "said in no place which file holds it"),
        ({"first.weight": {"exp_avg": 3}}, "exp_avg is there as a tensor and as a value of its own"),
        ({"first.weight": {"step": "x"}}, "expected step to be a number, got a str"),
    ):
        rank["objects"] = objects
        refused(engine, forged.write(tmp_path / "forged"), told)
    engine.backward(engine(torch.randn(3, 4)))
    engine.step()
    for each in (saved, engine):
        each.close()


def test_a_disk_that_fails_in_the_middle_leaves_an_engine_that_says_so(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(1, seed=7)
    read, calls = files.TensorReader.read, []

    def failing(self: Any, name: str, *more: Any) -> torch.Tensor:
        calls.append(name)
        if name.endswith("second.weight:weight"):
            raise CheckpointError("the disk has a fault")
        return read(self, name, *more)

    monkeypatch.setattr(files.TensorReader, "read", failing)
    with pytest.raises(CheckpointError, match="the disk has a fault"):
        engine.load_checkpoint(whole)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="was broken off"):
        engine.save_checkpoint(whole.parent, tag="half")
    engine.load_checkpoint(whole)
    assert engine.global_steps == 3
    engine.close()
