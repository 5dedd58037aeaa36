"""Whatever happens while a checkpoint is written, the one before stays whole, and what is damaged is never loaded."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, load_into, on, save_from, state_of, train
from tests.engine.test_processes import forks

from wherry.checkpoint import folder as folders
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import RankFiles
from wherry.parallel.comm import Comm

# Instants at which a training process is killed; WHERRY_KILLS asks for more.
KILLS = int(os.environ.get("WHERRY_KILLS", "12"))


def child(body: Callable[..., None], *arguments: Any) -> Any:
    process = forks.Process(target=body, args=arguments, daemon=True)
    process.start()
    return process


def status_of(process: Any) -> int:
    process.join(120)
    return process.exitcode


def train_and_save(folder: Path, ready: Any, config: dict[str, Any]) -> None:
    """Train for ever, one checkpoint a step. Each is promised once it has returned."""
    torch.set_num_threads(1)

    def body(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(folder)
        ready.send(True)
        while True:
            train(engine, comm, 1, first=engine.global_steps)
            engine.save_checkpoint(folder)
            (folder / "done").write_text(str(engine.global_steps))

    on(Shape(more={"wherry": {"checkpoint": config}}), body)


def save_on_a_limited_disk(folder: Path, background: bool) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    torch.set_num_threads(1)

    def body(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(folder)
        train(engine, comm, 1)
        with pytest.raises(CheckpointError, match=r"global_step3.*File too large"):
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
        assert (folder / "latest").read_text() == "global_step2"

    on(Shape(2, 2, more={"wherry": {"checkpoint": {"async_save": background}}}), body)


def begin_and_die(folder: Path) -> None:
    folders.Partial(folder, "global_step9")


def die_between_two_renames(folder: Path) -> None:
    rename = os.rename

    def fatal(one: Any, other: Any) -> None:
        rename(one, other)
        if "replaced" in str(other):
            os.kill(os.getpid(), signal.SIGKILL)

    os.rename = fatal
    save_from(Shape(), folder, steps=4, tag="same")


def train_undisturbed(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    save_from(Shape(), folder, steps=steps)


@pytest.mark.timeout(900)
def test_a_process_killed_at_any_instant(tmp_path: Path) -> None:
    """SIGKILL at random instants of training with saving, again and again over the same folder."""
    rng = random.Random(0)
    for kill in range(KILLS):
        background = kill % 2 == 1
        # A pipe has no lock that a killed process could keep.
        ready, tell = forks.Pipe(duplex=False)
        process = child(train_and_save, tmp_path, tell, {"keep_last": 2, "async_save": background})
        assert ready.poll(60)
        time.sleep(rng.uniform(0.0, 0.3))
        assert process.is_alive()
        process.kill()
        process.join()
        done = tmp_path / "done"
        promised = int(done.read_text() or 0) if done.exists() else 0
        found = folders.newest_whole(tmp_path)
        step = read_manifest(tmp_path / found).step if found else 0
        # What is written behind may be one step late.
        assert step >= promised - background, f"checkpoint {promised} had been finished, and {step} is what is left"
        done.unlink(missing_ok=True)
    # What it all came to is what one undisturbed run gives.
    path = folders.locate(tmp_path, None)
    assert path is not None
    steps = read_manifest(tmp_path / path).step
    assert steps > 0
    undisturbed = tmp_path / "undisturbed"
    assert status_of(child(train_undisturbed, undisturbed, steps)) == 0
    assert_same(load_into(Shape(2, 3), tmp_path), load_into(Shape(), undisturbed))
    # What the killed processes had left half-written is cleaned; a folder with nothing in it may wait for a day.
    assert not [found for found in tmp_path.iterdir() if found.name.startswith(".") and any(found.iterdir())]


def test_half_written_folders_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_from(Shape(), tmp_path)
    assert status_of(child(begin_and_die, tmp_path)) == 0
    left = next(found for found in tmp_path.iterdir() if "partial" in found.name)
    load_into(Shape(), tmp_path)
    assert not left.exists() and f"{left}: a checkpoint that was being written when its process ended" in caplog.text


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    """As long as its writer lives, which its lock says; where there is none, until long after its last change."""
    states = save_from(Shape(), tmp_path, tag="same")
    partial = folders.Partial(tmp_path, "same")
    between = tmp_path / ".same.replaced.0123456789ab"
    (tmp_path / "same").rename(between)
    older = tmp_path / ".mine.partial.a-machine~0123.1.1.0"  # as earlier versions named them
    older.mkdir()
    assert folders.clean(tmp_path) == [] and partial.path.exists() and between.exists()
    os.utime(older, (0, 0))
    partial._unlock()
    assert folders.clean(tmp_path) == [older, partial.path]
    assert_same(states, load_into(Shape(2, 2), tmp_path))


@pytest.mark.parametrize("background", [False, True])
def test_a_limit_of_the_size_of_files(tmp_path: Path, background: bool) -> None:
    """A write that fails, as on a full disk: the save says so, and the one before stays."""
    states = save_from(Shape(2, 2), tmp_path)
    assert status_of(child(save_on_a_limited_disk, tmp_path, background)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"global_step2", "latest"}
    assert_same(states, load_into(Shape(1, 0), tmp_path))


def test_flipped_bytes_and_missing_files(tmp_path: Path) -> None:
    older = save_from(Shape(2, 3), tmp_path, tag="older")
    save_from(Shape(2, 3), tmp_path, steps=3, tag="newer")
    rng = random.Random(1)
    newer = tmp_path / "newer"
    files = sorted(path for path in newer.iterdir())

    def attempt(engine: Any, comm: Comm) -> None:
        before = state_of(engine)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(tmp_path)
        assert damaged in str(error.value) and "the newest whole one is older" in str(error.value)
        assert_same(before, state_of(engine))  # bad input changes nothing

    for trial in range(24):
        path = files[trial % len(files)]
        damaged = path.name
        data = path.read_bytes()
        if trial % 8 == 7:
            path.unlink()
        elif trial % 8 == 6:
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            place = rng.randrange(len(data))
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
        on(Shape(1 + trial % 3, 2), attempt)
        path.write_bytes(data)
    assert_same(older, load_into(Shape(2, 1), tmp_path, tag="older"))
    (tmp_path / "newer").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "manifest.json").unlink()
    damaged = "newer"
    on(Shape(2, 2), attempt)


def test_latest_is_missing_after_a_first_save(tmp_path: Path) -> None:
    """The writer died between the name and the pointer."""
    states = save_from(Shape(), tmp_path, save_latest=False)
    assert not (tmp_path / "latest").exists()
    assert_same(states, load_into(Shape(2, 1), tmp_path))


def test_the_same_tag_again(tmp_path: Path) -> None:
    save_from(Shape(), tmp_path, tag="same")
    states = save_from(Shape(2, 3), tmp_path, steps=4, tag="same")
    assert_same(states, load_into(Shape(), tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"same", "latest"}


def test_killed_between_two_renames(tmp_path: Path) -> None:
    states = save_from(Shape(), tmp_path, tag="same")

    assert status_of(child(die_between_two_renames, tmp_path)) == -signal.SIGKILL
    assert not (tmp_path / "same").exists()
    assert_same(states, load_into(Shape(), tmp_path))


def test_a_rank_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's disk fails: all ranks hear of it, nothing of it stays, and the next save works."""
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


def test_a_latest_that_says_nothing_sensible(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save_from(Shape(), tmp_path)
    latest = tmp_path / "latest"
    for content, told in (
        (b"\xff\xfe\x00", "latest is damaged"),
        (b"a/b", "latest is damaged: tag 'a/b'"),
        (b"global_step9", "global_step9: there is no such folder"),
    ):
        latest.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{told}.*the newest whole one is global_step2: load it with tag="):
            load_into(Shape(2, 1), tmp_path)
    latest.write_bytes(b"")
    assert_same(states, load_into(Shape(), tmp_path))
    assert "no latest that names a checkpoint: the newest is global_step2" in caplog.text
    # A lone checkpoint that cannot be read is not "none": training does not begin anew over it.
    latest.unlink()
    manifest = tmp_path / "global_step2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*holds no other whole checkpoint"):
        load_into(Shape(), tmp_path)


def test_folders_that_people_mean(tmp_path: Path) -> None:
    """The checkpoint's own folder is as good as the one above it; a file is neither."""
    states = save_from(Shape(), tmp_path / "all")
    assert_same(states, load_into(Shape(), tmp_path / "all" / "global_step2"))
    (tmp_path / "file").write_text("")
    for work in (load_into, save_from):
        with pytest.raises(CheckpointError, match="file is a file; expected a folder"):
            work(Shape(), tmp_path / "file")


@pytest.mark.parametrize("tag", ["a/b", "..", "", ".hidden", "latest", "a ", "two\nlines"])
def test_tags_that_are_no_names(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="expected the name of a folder"):
        save_from(Shape(), tmp_path, steps=0, tag=tag)


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
        """From an earlier step on: what counts are steps, but for what has just been saved."""
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
    from tests.engine.harness import TinyLM, make_model

    save_from(Shape(2, 2), tmp_path)
    for other, told in (
        (lambda: TinyLM(blocks=2), "which the model has not"),
        (lambda: TinyLM(blocks=4), "it lacks blocks.3"),
        (lambda: TinyLM(width=8), r"embed.weight has shape \(29, 16\) in the checkpoint and \(29, 8\) in the model"),
    ):

        def body(engine: Any, comm: Comm, told: str = told) -> None:
            before = state_of(engine)
            with pytest.raises(CheckpointError, match=told):
                engine.load_checkpoint(tmp_path)
            assert_same(before, state_of(engine))

        on(Shape(2, 3), body, model=make_model(other))  # type: ignore[arg-type]

    def partly(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        return state_of(engine)

    found = on(Shape(2, 3), partly, model=make_model(lambda: TinyLM(blocks=4)))[0]  # type: ignore[arg-type]
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
