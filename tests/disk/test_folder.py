"""Swap folders are private, go with their run, and are swept when a killed run left them behind."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from wherry.tiers.disk import DiskStore, sweep
from wherry.tiers.disk_folder import SwapFolder


def left_behind(parent: Path, *, uid: int | None = None, pid: int = 4_000_000_000, started: int = 1) -> Path:
    """Make the folder that a dead run leaves, with an unlocked lock file."""
    path = parent / f"wherry-swap-{os.getuid() if uid is None else uid}-{pid}-{started}-0badcafe"
    path.mkdir(mode=0o700)
    (path / "lock").write_text("boot x\n")
    (path / "data-0.bin").write_bytes(bytes(8192))
    return path


def test_everything_is_private(tmp_path):
    with DiskStore(tmp_path, name="run 7") as store:
        store.reserve("layers.0", 1 << 16)
        folder = Path(store.paths[0]).parent
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert sorted(path.name for path in folder.iterdir()) == ["data-0.bin", "lock"]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
        assert "run 7" in (folder / "lock").read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_process_id_given_again_does_not_protect_a_dead_run(tmp_path):
    path = left_behind(tmp_path, pid=os.getpid(), started=12345)
    with DiskStore(tmp_path) as live:
        assert not path.exists()
        assert sweep(tmp_path) == []
        assert [Path(live.paths[0]).parent] == list(tmp_path.iterdir())


def test_a_lock_protects_a_run_whose_process_is_not_seen_here(tmp_path):
    path = left_behind(tmp_path)
    with open(path / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [path]


def test_a_running_process_is_believed_where_locks_do_not_work(tmp_path):
    folder = SwapFolder(tmp_path)
    os.unlink(folder.path / "lock")
    (folder.path / "lock").write_text("boot x\n")
    assert sweep(tmp_path) == []
    folder.close()


def test_without_locks_another_machine_is_left_alone(tmp_path):
    path = left_behind(tmp_path)
    (path / "lock").write_text("no locks here\nboot of-another-machine\n")
    assert sweep(tmp_path) == []
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (path / "lock").write_text(f"no locks here\nboot {boot}\n")
    assert sweep(tmp_path) == [path]


def test_a_folder_being_made_is_left_alone(tmp_path):
    path = left_behind(tmp_path)
    (path / "lock").unlink()
    assert sweep(tmp_path) == []
    os.utime(path, (time.time() - 3600,) * 2)
    assert sweep(tmp_path) == [path]


def test_what_is_not_ours_is_left_alone(tmp_path):
    other = left_behind(tmp_path, uid=os.getuid() + 1)
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / f"wherry-swap-{os.getuid()}-1-1-abcd").symlink_to(target)
    named = tmp_path / "wherry-swap-notes"
    named.mkdir()
    assert sweep(tmp_path) == []
    assert other.exists() and target.exists() and named.exists()


def test_a_folder_that_somebody_removed_closes_quietly(tmp_path):
    store = DiskStore(tmp_path)
    folder = Path(store.paths[0]).parent
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    store.close()
    assert list(tmp_path.iterdir()) == []
