"""A save that fails at any event leaves the checkpoint before it whole, and a damaged checkpoint is never loaded."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, load_into, on, save_from, state_of, train
from tests.engine.harness import TinyLM, make_model, settings

import wherry
from wherry.checkpoint import folder as folders
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import RankFiles
from wherry.parallel.comm import Comm

ROOT = Path(__file__).parents[2]
# Processes that are killed; WHERRY_KILLS asks for more.
KILLS = int(os.environ.get("WHERRY_KILLS", "4"))


class DiskEvents:
    """Count the calls that change a disk; once `left` are done, call `stop` in place of each that follows."""

    CALLS = ("mkdir", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir")

    def __init__(self, patch: pytest.MonkeyPatch, stop: Callable[[], NoReturn]) -> None:
        self.left: float = float("inf")
        self.stopped = False
        self._stop = stop
        for name in self.CALLS:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def stop_after(self, events: float) -> None:
        self.left, self.stopped = events, False

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                self.stopped = True
                self._stop()
            return call(*arguments, **more)

        return counted


def raise_io_error() -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def kill_this_process() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize("config", [{}, {"async_save": True}, {"keep_last": 1}], ids=str)
def test_a_disk_that_stops_at_any_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """Repeat a save; each time one more event succeeds, and all that follow fail. The checkpoint before or the new one
    is found whole, and the next save leaves nothing of the failed one."""
    events = DiskEvents(monkeypatch, raise_io_error)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = wherry.initialize(
        model=model, optimizer=optimizer, config=settings(0, more={"wherry": {"checkpoint": config}})
    )
    tag = None if config.get("keep_last") else "same"

    def step() -> None:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()

    def save(folder: Path) -> None:
        engine.save_checkpoint(folder, tag=tag)
        engine.wait_for_checkpoint()

    step()
    save(tmp_path / "before")
    step()
    new = tag or "global_step2"
    for count in itertools.count():
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(count))
        events.stop_after(count)
        try:
            save(folder)
            failed = False
        except CheckpointError:
            failed = True
        stopped = events.stopped
        events.stop_after(float("inf"))
        found = folders.locate(folder, None)
        assert found is not None, f"no checkpoint after {count} events"
        manifest = read_manifest(folder / found)
        assert folders.damage(folder / found, manifest) == []
        assert manifest.step == 2 or stopped
        assert failed or read_manifest(folder / new).step == 2
        save(folder)
        assert {path.name for path in folder.iterdir()} == {new, "latest"}
        shutil.rmtree(folder)
        if not stopped:
            break
    engine.close()
    assert count > 15, "a save has fewer events than it must have"


def train_until_killed(folder: str, config: str, events: str) -> None:
    """Train without end, one checkpoint a step, and kill this process at an event of a save."""
    torch.set_num_threads(1)
    counted = DiskEvents(pytest.MonkeyPatch(), kill_this_process)

    def body(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(folder)
        counted.stop_after(int(events))
        while True:
            train(engine, comm, 1, first=engine.global_steps)
            engine.save_checkpoint(folder)
            Path(folder, "done").write_text(str(engine.global_steps))

    checkpoint = {"keep_last": 2, "async_save": config == "async"}
    on(Shape(more={"wherry": {"checkpoint": checkpoint}}), body)


def test_a_process_killed_at_any_event(tmp_path: Path, forks: Any) -> None:
    """Kill training again and again over the same folder; it ends where an undisturbed run does."""
    rng = random.Random(0)
    server = forks.of("tests.checkpoint.test_faults")
    done = tmp_path / "done"
    for kill in range(KILLS):
        config = "async" if kill % 2 else "sync"
        code = "import sys; from tests.checkpoint.test_faults import train_until_killed as run; run(*sys.argv[1:])"
        child = server.start(["-c", code, str(tmp_path), config, str(rng.randrange(20, 60))], folder=ROOT)
        assert child.wait() == -signal.SIGKILL
        newest = folders.newest_whole(tmp_path)
        step = read_manifest(tmp_path / newest).step if newest else 0
        finished = int(done.read_text() or 0) if done.exists() else 0
        # A save behind training may be one step late.
        assert step >= finished - (config == "async"), f"checkpoint {finished} was finished, and {step} is left"
    done.unlink()
    path = folders.locate(tmp_path, None)
    assert path is not None
    steps = read_manifest(tmp_path / path).step
    assert steps >= KILLS // 2
    assert_same(load_into(Shape(2, 3), tmp_path), save_from(Shape(), tmp_path / "undisturbed", steps=steps))
    # An empty folder may wait for a day; every other half-written one is cleaned.
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".") and any(left.iterdir())]


def test_half_written_folders_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_from(Shape(), tmp_path, steps=0)
    being_written = folders.Partial(tmp_path, "global_step9")
    left = being_written.path
    del being_written  # and its lock
    load_into(Shape(), tmp_path)
    assert not left.exists() and f"{left}: a checkpoint that was being written when its process ended" in caplog.text


def test_a_checkpoint_being_written_stays(tmp_path: Path) -> None:
    """A lock protects it as long as its writer lives; without one, the time of its last change does."""
    states = save_from(Shape(), tmp_path, tag="same")
    being_written = folders.Partial(tmp_path, "same")
    between = tmp_path / ".same.replaced.0123456789ab"
    (tmp_path / "same").rename(between)
    older = tmp_path / ".mine.partial.a-machine~0123.1.1.0"  # a name that earlier versions gave
    older.mkdir()
    assert folders.clean(tmp_path) == [] and being_written.path.exists() and between.exists()
    os.utime(older, (0, 0))
    left = being_written.path
    del being_written
    assert folders.clean(tmp_path) == [older, left]
    assert_same(states, load_into(Shape(2, 2), tmp_path))


@pytest.mark.parametrize("background", [False, True])
def test_a_limit_of_the_size_of_files(tmp_path: Path, background: bool) -> None:
    """A write that fails, as on a full disk, fails the save and leaves the checkpoint before it."""
    states = save_from(Shape(2, 2), tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def body(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(tmp_path)
        train(engine, comm, 1)
        comm.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(CheckpointError, match=r"global_step3.*File too large"):
            engine.save_checkpoint(tmp_path)
            engine.wait_for_checkpoint()

    try:
        on(Shape(2, 2, more={"wherry": {"checkpoint": {"async_save": background}}}), body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step2", "latest"}
    assert_same(states, load_into(Shape(1, 0), tmp_path))


def test_flipped_bytes_and_missing_files(tmp_path: Path) -> None:
    older = save_from(Shape(2, 3), tmp_path, tag="older", steps=1)
    save_from(Shape(2, 3), tmp_path, tag="newer")
    rng = random.Random(1)
    newer = tmp_path / "newer"
    files = sorted(newer.iterdir())
    assert len(files) == 3

    def damage(trial: int) -> None:
        path, kind = files[trial % 3], trial // 3
        data = path.read_bytes()
        if kind == 3:
            path.unlink()
        elif kind == 2:
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            place = rng.randrange(len(data))
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])

    def body(engine: Any, comm: Comm) -> None:
        before = state_of(engine)
        for trial in range(12):
            path = files[trial % 3]
            if comm.rank == 0:
                data = path.read_bytes()
                damage(trial)
            comm.barrier()
            with pytest.raises(CheckpointError) as error:
                engine.load_checkpoint(tmp_path)
            assert path.name in str(error.value) and "the newest whole one is older" in str(error.value)
            comm.barrier()
            if comm.rank == 0:
                path.write_bytes(data)
        assert_same(before, state_of(engine))  # none has changed the engine

    on(Shape(2, 2), body)
    assert_same(older, load_into(Shape(), tmp_path, tag="older"))
    newer.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"newer.*the newest whole one is older"):
        load_into(Shape(), tmp_path)


def test_a_rank_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's disk fails: all ranks raise its error, nothing of the save stays, and the next one works."""
    states = save_from(Shape(3, 2), tmp_path)
    put = RankFiles.put_piece

    def broken(files: RankFiles, piece: Any) -> None:
        if files.rank == 1:
            raise RuntimeError("the disk is gone")
        put(files, piece)

    def body(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        train(engine, comm, 1)
        comm.barrier()
        monkeypatch.setattr(RankFiles, "put_piece", broken)
        with pytest.raises(CheckpointError, match=r"rank 1: RuntimeError: the disk is gone"):
            engine.save_checkpoint(tmp_path)
        comm.barrier()
        assert {path.name for path in tmp_path.iterdir()} == {"global_step2", "latest"}
        comm.barrier()
        monkeypatch.setattr(RankFiles, "put_piece", put)
        engine.save_checkpoint(tmp_path)
        return state_of(engine)

    after = on(Shape(3, 2), body)[0]
    assert_same(after, load_into(Shape(1, 0), tmp_path))
    assert_same(states, load_into(Shape(1, 0), tmp_path, tag="global_step2"))


def test_nothing_to_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: Any, comm: Comm) -> None:
        assert engine.load_checkpoint(tmp_path / "never") == (None, None)
        assert engine.load_checkpoint(tmp_path, tag="best") == (None, None)

    on(Shape(2, 3), body)
    assert "holds no checkpoint best" in caplog.text
    assert "never holds no checkpoint: nothing is loaded" in caplog.text


def test_a_latest_that_names_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save_from(Shape(), tmp_path, save_latest=False)
    latest = tmp_path / "latest"
    assert not latest.exists()
    for content, error in (
        (b"\xff\xfe\x00", "latest is damaged"),
        (b"a/b", "latest is damaged: tag 'a/b'"),
        (b"global_step9", "global_step9: there is no such folder"),
    ):
        latest.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{error}.*the newest whole one is global_step2: load it with tag="):
            load_into(Shape(), tmp_path)
    for content in (b"", None):
        latest.unlink() if content is None else latest.write_bytes(content)
        caplog.clear()
        assert_same(states, load_into(Shape(2, 1), tmp_path))
        assert "no latest that names a checkpoint: the newest is global_step2" in caplog.text
    # A damaged checkpoint that is the only one is not "none": training must not begin anew over it.
    manifest = tmp_path / "global_step2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*holds no other whole checkpoint"):
        load_into(Shape(), tmp_path)


def test_the_folder_of_a_checkpoint_itself(tmp_path: Path) -> None:
    """Load from the checkpoint's own folder as from the one above it; refuse a file."""
    states = save_from(Shape(), tmp_path / "all")
    assert_same(states, load_into(Shape(), tmp_path / "all" / "global_step2"))
    (tmp_path / "file").write_text("")
    for work in (load_into, save_from):
        with pytest.raises(CheckpointError, match="file is a file; expected a folder"):
            work(Shape(), tmp_path / "file")


def test_tags_that_are_no_names(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> None:
        for tag in ("a/b", "..", "", ".hidden", "latest", "a ", "two\nlines"):
            with pytest.raises(CheckpointError, match="expected the name of a folder"):
                engine.save_checkpoint(tmp_path, tag=tag)

    on(Shape(), body)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("validation", ["WARN", "FAIL", "IGNORE"])
def test_tags_that_differ(tmp_path: Path, validation: str, caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: Any, comm: Comm) -> None:
        engine.save_checkpoint(tmp_path, tag=f"from{comm.rank}")

    shape = Shape(2, 1, more={"checkpoint": {"tag_validation": validation}})
    if validation == "FAIL":
        with pytest.raises(CheckpointError, match="rank 0: from0, rank 1: from1"):
            on(shape, body)
        return
    on(shape, body)
    assert (tmp_path / "latest").read_text() == "from0"
    assert ("different tags" in caplog.text) == (validation == "WARN")


def test_keep_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: Any, comm: Comm) -> None:
        for step in range(6):
            train(engine, comm, 1, first=step)
            engine.save_checkpoint(tmp_path)
            if step == 1:
                engine.save_checkpoint(tmp_path, tag="best", save_latest=False)

    on(Shape(2, 3, more={"wherry": {"checkpoint": {"keep_last": 2}}}), body)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "global_step5", "global_step6", "latest"}

    def back(engine: Any, comm: Comm) -> None:
        """Go back to an earlier step: the highest steps stay, and so do those that are saved now."""
        engine.load_checkpoint(tmp_path, tag="best")
        for step in (2, 3):
            train(engine, comm, 1, first=step)
            engine.save_checkpoint(tmp_path)

    (tmp_path / "global_step5" / "manifest.json").write_text("{}")
    on(Shape(1, 3, more={"wherry": {"checkpoint": {"keep_last": 2}}}), back)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"best", "global_step3", "global_step4", "global_step5", "global_step6", "latest"}
    assert "global_step6: of a later step than global_step4, which is saved" in caplog.text
    assert "global_step5 is passed over" in caplog.text


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save_from(Shape(2, 2), tmp_path)
    for size, error in (
        ({"blocks": 1}, "which the model has not"),
        ({"blocks": 3}, "it lacks blocks.2"),
        (
            {"blocks": 2, "width": 8},
            r"embed.weight has shape \(29, 16\) in the checkpoint and \(29, 8\) in the model",
        ),
    ):

        def body(engine: Any, comm: Comm, error: str = error) -> None:
            before = state_of(engine)
            with pytest.raises(CheckpointError, match=error):
                engine.load_checkpoint(tmp_path)
            assert_same(before, state_of(engine))

        on(Shape(1, 3), body, model=make_model(partial(TinyLM, **size)))

    def partly(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        return state_of(engine)

    found = on(Shape(2, 3), partly, model=make_model(partial(TinyLM, blocks=3)))[0]
    expected = load_into(Shape(), tmp_path)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_another_optimizer_is_refused_and_weights_alone_load(tmp_path: Path) -> None:
    states = save_from(Shape(2, 2), tmp_path)

    def body(engine: Any, comm: Comm) -> Any:
        with pytest.raises(CheckpointError, match=r"AdamW with exp_avg, exp_avg_sq.*load_optimizer_states=False"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert engine.global_steps == 0
        return state_of(engine)

    found = on(Shape(2, 3), body, optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9))[0]
    for name, value in found.items():
        if name.endswith((":master", ":working")):
            assert torch.equal(value, states[name])


def test_a_manifest_of_a_newer_version(tmp_path: Path) -> None:
    save_from(Shape(), tmp_path, tag="a")
    path = tmp_path / "a" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="version 2 of the format, and this Wherry reads version 1"):
        load_into(Shape(), tmp_path)
