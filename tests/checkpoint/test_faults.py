"""A save that fails at any event leaves the checkpoint before it whole, and a damaged checkpoint is never loaded."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, before_disk_calls, load_into, on, save_from, state_of, train
from tests.engine.harness import TinyLM, engine_of, make_model, settings

from wherry.checkpoint import folder as folders
from wherry.checkpoint import save as saving
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import RankFiles
from wherry.checkpoint.save import FileRendezvous
from wherry.parallel.comm import Comm


@pytest.mark.parametrize("config", [{}, {"async_save": True}, {"keep_last": 1}], ids=str)
def test_a_disk_that_stops_at_any_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """Repeat a save; each time one more event succeeds, and all that follow fail. The checkpoint before or the new one
    is found whole, and the next save leaves nothing of the failed one."""
    left = float("inf")

    def stop() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    before_disk_calls(monkeypatch, stop)
    own = settings(0, more={"wherry": {"checkpoint": config}})
    engine = engine_of(torch.nn.Linear(2, 2), own, optimizer=partial(torch.optim.SGD, lr=0.1))
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
        left = count
        try:
            save(folder)
            failed = False
        except CheckpointError:
            failed = True
        stopped, left = left < 0, float("inf")
        latest = folders.locate(folder, None)
        assert latest is not None, f"no checkpoint after {count} events"
        manifest = read_manifest(folder / latest)
        assert folders.damage(folder / latest, manifest) == []
        assert manifest.step == 2 or stopped
        assert failed or read_manifest(folder / new).step == 2
        save(folder)
        assert {path.name for path in folder.iterdir()} == {new, "latest"}
        shutil.rmtree(folder)
        if not stopped:
            break
    engine.close()
    assert count > 15, "a save has fewer events than it must have"


def test_half_written_folders_are_cleaned_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lock protects one as long as its writer lives; without a lock, the time of its last change does."""
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
    assert f"{left}: a checkpoint that was being written when its process ended is deleted" in caplog.text
    assert_same(states, load_into(Shape(2, 2), tmp_path))


def test_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load although half-written folders cannot be deleted."""
    states = save_from(Shape(), tmp_path)
    (tmp_path / ".latest.1.tmp").write_text("")
    replaced = tmp_path / ".best.replaced.0123456789ab"
    replaced.mkdir()
    (replaced / "manifest.json").write_text("{}")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert_same(load_into(Shape(), tmp_path), states)


def test_flipped_bytes_and_missing_files(tmp_path: Path) -> None:
    older = save_from(Shape(2, 3), tmp_path, tag="older", steps=1)
    save_from(Shape(2, 3), tmp_path, tag="newer")
    rng = random.Random(1)
    files = sorted((tmp_path / "newer").iterdir())
    assert len(files) == 3

    def damaged(data: bytes, kind: str) -> bytes:
        place = rng.randrange(len(data))
        if kind == "cut":
            return data[:place]
        return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]

    def body(engine: Any, comm: Comm) -> None:
        before = state_of(engine)
        for path, kind in itertools.product(files, ("flipped", "flipped", "cut", "gone")):
            if comm.rank == 0:
                data = path.read_bytes()
                path.unlink() if kind == "gone" else path.write_bytes(damaged(data, kind))
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_load_check_all_bytes_together(ranks: int, tmp_path: Path) -> None:
    save_from(Shape(3, 3), tmp_path, steps=1)
    folder = tmp_path / "global_step1"
    manifest = folders.read_manifest(folder)
    for name in manifest.files:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        problems = [problem for rank in range(ranks) for problem in folders.damage(folder, manifest, rank, ranks)]
        assert len(problems) == 1 and name in problems[0], problems
        (folder / name).write_bytes(whole)


def test_which_checkpoint_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without `latest` the newest; the folder of a checkpoint itself; none where there is none; never a damaged one."""

    def nothing(engine: Any, comm: Comm) -> None:
        assert engine.load_checkpoint(tmp_path / "never") == (None, None)
        assert engine.load_checkpoint(tmp_path, tag="best") == (None, None)

    on(Shape(2, 3), nothing)
    assert "holds no checkpoint best" in caplog.text
    assert "never holds no checkpoint: nothing is loaded" in caplog.text
    states = save_from(Shape(), tmp_path, save_latest=False)
    assert_same(states, load_into(Shape(), tmp_path / "global_step2"))
    latest = tmp_path / "latest"
    assert not latest.exists()
    for content in (None, b""):
        if content is not None:
            latest.write_bytes(content)
        caplog.clear()
        assert_same(states, load_into(Shape(2, 1), tmp_path))
        assert "no latest that names a checkpoint: the newest is global_step2" in caplog.text
    latest.write_bytes(b"global_step9")
    whole = "the newest whole one is global_step2: load it with tag="
    with pytest.raises(CheckpointError, match=f"global_step9: there is no such folder.*{whole}"):
        load_into(Shape(), tmp_path)
    latest.unlink()
    # A damaged checkpoint that is the only one is not "none": training must not begin anew over it.
    manifest = tmp_path / "global_step2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*holds no other whole checkpoint"):
        load_into(Shape(), tmp_path)


def test_tags_and_folders_that_cannot_be(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> None:
        for tag in ("a/b", "", ".hidden", "latest", "a ", "two\nlines"):
            with pytest.raises(CheckpointError, match="expected the name of a folder"):
                engine.save_checkpoint(tmp_path, tag=tag)
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").write_text("")
        for work in (engine.load_checkpoint, engine.save_checkpoint):
            with pytest.raises(CheckpointError, match="file is a file; expected a folder"):
                work(tmp_path / "file")

    on(Shape(), body)


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
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"best", "global_step3", "global_step4", "global_step5", "global_step6", "latest"}
    assert "global_step6: of a later step than global_step4, which is saved" in caplog.text
    assert "global_step5 is passed over" in caplog.text


def test_another_model_or_optimizer_is_refused_and_loads_in_part(tmp_path: Path) -> None:
    states = save_from(Shape(2, 2), tmp_path)

    def another_model(engine: Any, comm: Comm) -> Any:
        before = state_of(engine)
        with pytest.raises(CheckpointError, match=r"it lacks blocks\.2"):
            engine.load_checkpoint(tmp_path)
        assert_same(before, state_of(engine))
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        return state_of(engine)

    states_after = on(Shape(2, 3), another_model, model=make_model(lambda: TinyLM(blocks=3)))[0]
    assert all(torch.equal(states_after[name], value) for name, value in states.items())

    def another_optimizer(engine: Any, comm: Comm) -> Any:
        with pytest.raises(CheckpointError, match=r"AdamW with exp_avg, exp_avg_sq.*load_optimizer_states=False"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert engine.global_steps == 0
        return state_of(engine)

    states_after = on(Shape(2, 3), another_optimizer, optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9))[0]
    for name, value in states_after.items():
        if name.endswith((":master", ":working")):
            assert torch.equal(value, states[name])


# Ranks that write in the background: a failure of one ends the wait of all others at once.

# Longer than a test may take, so that a test that ends has not waited for it.
LONG = 3600.0


def come(folder: Path, ranks: int) -> list[FileRendezvous]:
    meetings = [FileRendezvous(folder, rank) for rank in range(ranks)]
    for each in meetings:
        each.come()
    return meetings


@pytest.mark.timeout(60)
def test_ranks_that_came_that_gave_up_and_that_never_come(tmp_path: Path) -> None:
    meetings = come(tmp_path, 3)
    for rank in (2, 0, 1):
        meetings[rank].report(f"part {rank}")
    parts: list[str] = []
    meetings[0].gather(3, LONG, parts.append)
    assert parts == ["part 0", "part 1", "part 2"]
    assert not list(tmp_path.iterdir())
    # Rank 1 never joins; rank 2 has left.
    meetings = come(tmp_path, 3)
    meetings[0].report("part 0")
    meetings[2].give_up()
    with pytest.raises(CheckpointError, match="rank 2 could not write its part"):
        meetings[0].gather(3, LONG, lambda text: None)
    FileRendezvous(tmp_path / "gone", 1).give_up()
    # All may still come, and none does.
    (tmp_path / "later").mkdir()
    meetings = come(tmp_path / "later", 4)
    meetings[2].report("part 2")
    for missing in ("ranks 0, 1, 3 have not written their part", "rank 1 has not written its part"):
        with pytest.raises(CheckpointError, match=rf"{missing} in 0\.05 s"):
            meetings[0].gather(4, 0.05, lambda text: None)
        meetings[0].report("part 0")
        meetings[3].report("part 3")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("when", "behind"), [("states", False), ("states", True), ("record", True)])
def test_a_disk_that_takes_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, behind: bool
) -> None:
    """Rank 1 can create no file any more, not even one that reports it: all ranks raise, and nothing is left."""
    states = save_from(Shape(3, 2), tmp_path)
    put, write_text = RankFiles.put, saving.write_text
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a disk")

    def no_room(self: Any, name: str, tensor: Any) -> str:
        if self.rank == 1 and when == "states":
            raise full
        return put(self, name, tensor)

    def no_file(path: Path, text: str) -> None:
        if path.name.startswith("1."):
            raise full
        write_text(path, text)

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 3)
        both = r"rank 0: .*\n.*" if behind else ""
        with pytest.raises(CheckpointError, match=rf"{both}rank 1: .*No space left on device"):
            engine.save_checkpoint(tmp_path)
            engine.wait_for_checkpoint()

    monkeypatch.setattr(RankFiles, "put", no_room)
    monkeypatch.setattr(saving, "write_text", no_file)
    on(Shape(3, 2, more={"wherry": {"timeout_s": LONG, "checkpoint": {"async_save": behind}}}), body)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step2", "latest"}
    assert_same(states, load_into(Shape(), tmp_path))


def test_the_folder_may_be_moved_as_soon_as_the_last_record_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, whole = tmp_path / "partial", tmp_path / "whole"
    partial.mkdir()
    replace = os.replace

    def seen_at_once(aside: Path, path: Path) -> None:
        replace(aside, path)
        partial.rename(whole)

    monkeypatch.setattr(os, "replace", seen_at_once)
    FileRendezvous(partial, 1).report("what it wrote")
    (record,) = whole.iterdir()
    assert record.read_text() == "what it wrote"
