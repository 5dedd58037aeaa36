"""States on disk under `async_save`: saved as they were, while updates write to them, and never all in memory."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, load_into, on, state_of, train

from wherry.checkpoint import copies
from wherry.checkpoint.collect import Piece
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.held import Held
from wherry.checkpoint.rank_files import RankFiles
from wherry.parallel.comm import Comm
from wherry.tiers import disk
from wherry.tiers.homes import KeptRecord

BF16 = {"bf16": {"enabled": True}}
POLICIES: dict[str, dict[str, Any]] = {
    "in_backward": {"wherry": {"update_policy": "in_backward", "master": "split"}, **BF16},
    "before_use": {"wherry": {"update_policy": "before_use", "master": "whole"}, **BF16},
    "at_step": {"wherry": {"update_policy": "at_step"}},
}


def shape(folder: Path, more: dict[str, Any], *, ranks: int = 2, parameters: bool = True) -> Shape:
    folder.mkdir(exist_ok=True)
    tier = {"device": "nvme", "nvme_path": str(folder)}
    zero = {"stage": 3, "offload_optimizer": tier} | ({"offload_param": tier} if parameters else {})
    own = {**more.get("wherry", {}), "checkpoint": {"async_save": True}}
    return Shape(ranks, 3, more={**more, "zero_optimization": zero, "wherry": own})


class Slow:
    """A checkpoint that is written much more slowly than the training beside it goes on; counts what is copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.002) -> None:
        self.copied = 0
        self.waited: list[float] = []
        put, copied, pieces = RankFiles.put, copies.copied, Held.pieces

        def slowly(files: Any, name: str, tensor: torch.Tensor) -> str:
            time.sleep(seconds)
            return put(files, name, tensor)

        def counted(item: Any) -> Any:
            self.copied += item.values.nbytes if isinstance(item, Piece) else 0
            return copied(item)

        def late(held: Held) -> Any:
            # What nobody may write to before it is read is not read before somebody wants to.
            deadline = time.monotonic() + 60  # only ends a test that would hang
            while any(isinstance(kept, KeptRecord) and kept._clone is None for kept in held._kept) and not any(
                kept.wanted for kept in held._kept
            ):
                assert time.monotonic() < deadline, "no update wants to write to what is held"
                time.sleep(0.001)
            yield from pieces(held)

        monkeypatch.setattr(Held, "pieces", late)
        monkeypatch.setattr(RankFiles, "put", slowly)
        monkeypatch.setattr(copies, "copied", counted)

    def run(self, engine: Any, comm: Comm, folder: Path) -> Any:
        train(engine, comm, 2)
        states = state_of(engine)
        engine.save_checkpoint(folder)
        losses = train(engine, comm, 3, first=2)
        engine.wait_for_checkpoint()
        self.waited.append(engine._checkpoints.last.waited)
        assert engine._checkpoints.last.stall >= self.waited[-1]
        return states, losses, state_of(engine)


def undisturbed(engine: Any, comm: Comm) -> Any:
    train(engine, comm, 2)
    return train(engine, comm, 3, first=2), state_of(engine)


@pytest.mark.parametrize("cloned", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_training_goes_on_and_what_is_saved_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str, cloned: bool
) -> None:
    given = shape(tmp_path / "states", POLICIES[policy])
    expected = on(given, undisturbed)[0]
    caplog.set_level("INFO", "wherry")

    def share(source: Any, target: Any) -> bool:
        if cloned:
            shutil.copyfile(source, target)  # as a file system does that can
        return cloned

    monkeypatch.setattr(disk, "share_extents", share)
    slow = Slow(monkeypatch)
    states, losses, after = on(given, lambda engine, comm: slow.run(engine, comm, tmp_path / "saved"))[0]
    assert losses == expected[0]
    assert_same(after, expected[1])
    found = load_into(Shape(1, 0, more={k: v for k, v in POLICIES[policy].items() if k == "bf16"}), tmp_path / "saved")
    assert found.keys() == states.keys()
    for name, value in states.items():  # of a split master the working weight may be rounded otherwise
        assert name.endswith(":working") or torch.equal(found[name], value), name
    assert slow.copied == 0
    assert (max(slow.waited) == 0) is cloned
    how = "were cloned by the file system" if cloned else "were read before updates wrote to them"
    assert f"states on disk {how}" in caplog.text
    assert not list((tmp_path / "states").rglob("*"))


def test_states_on_disk_and_weights_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split masters are put together of halves on both."""
    slow = Slow(monkeypatch)
    given = shape(tmp_path / "states", POLICIES["in_backward"], ranks=1, parameters=False)
    states = on(given, lambda engine, comm: slow.run(engine, comm, tmp_path / "saved"))[0][0]
    found = load_into(Shape(2, 2, more=BF16), tmp_path / "saved")
    for name, value in states.items():
        assert name.endswith(":working") or torch.equal(found[name], value), name


def test_updates_go_on_when_a_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = shape(tmp_path / "states", POLICIES["before_use"])
    expected = on(given, undisturbed)[0]

    def fails(files: Any, name: str, tensor: torch.Tensor) -> str:
        time.sleep(0.1)
        raise OSError(28, "No space left on device", str(files.partial))

    monkeypatch.setattr(RankFiles, "put", fails)

    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path / "saved")
        losses = train(engine, comm, 3, first=2)
        with pytest.raises(CheckpointError, match="No space left on device"):
            engine.wait_for_checkpoint()
        return losses, state_of(engine)

    losses, states = on(given, body)[0]
    assert losses == expected[0]
    assert_same(states, expected[1])


def test_little_room_and_nothing_is_cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes beside a clone take new room. Without it they would fail, in the middle of training."""
    monkeypatch.setattr(disk, "share_extents", lambda source, target: pytest.fail("there is no room for a clone"))
    with disk.DiskStore(tmp_path) as store:
        store.reserve("unit", 1 << 20)
        assert store.clone(sharers=1 << 40) is None


@pytest.fixture(params=["btrfs", "xfs"])
def sharing_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A file system that can share what files hold."""
    make = shutil.which(f"mkfs.{request.param}")
    if make is None:
        pytest.skip(f"mkfs.{request.param} is not there to make a file system that shares what files hold")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(320 << 20)
    subprocess.run([make, "-q", str(image)], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True).returncode:
        pytest.skip("mounting an image takes rights that this user has not")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_clone_keeps_what_was(sharing_disk: Path) -> None:
    with disk.DiskStore(sharing_disk) as store:
        nbytes = 8 << 20
        record = store.reserve("unit", nbytes)
        from wherry.tiers.buffers import HostPool

        with HostPool() as pool:
            buffer, other = pool.take(nbytes), pool.take(nbytes)
            buffer.fill_(7)
            store.write(record, buffer).wait()
            clone = store.clone()
            assert clone is not None, "the file system shares nothing"
            buffer.fill_(8)
            store.write(record, buffer).wait()
            clone.read(record, other).wait()
            assert bool((other == 7).all())
            store.read(record, other).wait()
            assert bool((other == 8).all())
            clone.close()
        assert len(list(sharing_disk.rglob("*.bin"))) == 1


def test_training_beside_a_clone_of_the_file_system(
    sharing_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wherry")
    slow = Slow(monkeypatch)
    given = shape(sharing_disk / "states", POLICIES["in_backward"])
    states = on(given, lambda engine, comm: slow.run(engine, comm, tmp_path / "saved"))[0][0]
    found = load_into(Shape(1, 0, more=BF16), tmp_path / "saved")
    for name, value in states.items():
        assert name.endswith(":working") or torch.equal(found[name], value), name
    assert max(slow.waited) == 0 and "states on disk were cloned by the file system" in caplog.text
