"""Ranks that write behind training learn of each other's failures at once, and never wait without an end."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.harness import Shape, assert_same, load_into, on, save_from, train

from wherry.checkpoint import save
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import RankFiles
from wherry.checkpoint.save import FileRendezvous
from wherry.parallel.comm import Comm

# Longer than a test may take, so that a test that ends has not waited for it.
LONG = 3600.0


def come(folder: Path, ranks: int) -> list[FileRendezvous]:
    meetings = [FileRendezvous(folder, rank) for rank in range(ranks)]
    for each in meetings:
        each.come()
    return meetings


@pytest.mark.timeout(60)
def test_ranks_that_came_and_ranks_that_gave_up(tmp_path: Path) -> None:
    meetings = come(tmp_path, 3)
    for rank in (2, 0, 1):
        meetings[rank].report(f"part {rank}")
    parts: list[str] = []
    meetings[0].gather(3, LONG, parts.append)
    assert parts == ["part 0", "part 1", "part 2"]
    assert not list(tmp_path.iterdir())
    # Rank 1 has not come and never does; rank 2 has given up.
    meetings = come(tmp_path, 3)
    meetings[0].report("part 0")
    meetings[2].give_up()
    with pytest.raises(CheckpointError, match="rank 2 could not write its part"):
        meetings[0].gather(3, LONG, lambda text: None)
    FileRendezvous(tmp_path / "gone", 1).give_up()


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    meetings = come(tmp_path, 4)
    meetings[2].report("part 2")
    with pytest.raises(CheckpointError, match=r"ranks 0, 1, 3 have not written their part in 0\.05 s"):
        meetings[0].gather(4, 0.05, lambda text: None)
    meetings[0].report("part 0")
    meetings[3].report("part 3")
    with pytest.raises(CheckpointError, match=r"rank 1 has not written its part in 0\.05 s"):
        meetings[0].gather(4, 0.05, lambda text: None)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["states", "record"])
def test_a_disk_that_takes_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Rank 1 can create no file any more, not even one that reports it."""
    states = save_from(Shape(3, 2), tmp_path)
    put, write_text = RankFiles.put, save.write_text
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
        with pytest.raises(CheckpointError, match=r"rank 0: .*\n.*rank 1: .*No space left on device"):
            engine.save_checkpoint(tmp_path)
            engine.wait_for_checkpoint()

    monkeypatch.setattr(RankFiles, "put", no_room)
    monkeypatch.setattr(save, "write_text", no_file)
    on(Shape(3, 2, more={"wherry": {"timeout_s": LONG, "checkpoint": {"async_save": True}}}), body)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step2", "latest"}
    assert_same(states, load_into(Shape(), tmp_path))


def test_a_rank_that_never_finishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes nothing until rank 0 has given up."""
    put, gather = RankFiles.put, FileRendezvous.gather
    given_up = threading.Event()

    def stuck(self: Any, name: str, tensor: Any) -> str:
        if self.rank == 1:
            assert given_up.wait(60)
        return put(self, name, tensor)

    def gathered(self: Any, *arguments: Any) -> None:
        try:
            gather(self, *arguments)
        finally:
            given_up.set()

    def body(engine: Any, comm: Comm) -> None:
        with pytest.raises(CheckpointError, match=r"rank 0: .* rank 1 has not written its part in 0\.2 s"):
            engine.save_checkpoint(tmp_path)
            engine.wait_for_checkpoint()

    monkeypatch.setattr(RankFiles, "put", stuck)
    monkeypatch.setattr(FileRendezvous, "gather", gathered)
    on(Shape(2, 2, more={"wherry": {"timeout_s": 0.2, "checkpoint": {"async_save": True}}}), body)
    assert not list(tmp_path.iterdir())


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
