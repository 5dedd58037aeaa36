"""Profiles in files: the figures of those that were just made, without torch, and only while the code is the same."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.cli.programs import environment
from tests.plan.measured import make

from wherry import config as configs
from wherry.cli import main
from wherry.forecast import Forecaster
from wherry.plan import kept
from wherry.plan.kept import KeptProfiles
from wherry.plan.machine import known
from wherry.plan.profile import Profile
from wherry.sources import Source, find, of_shape
from wherry.train.presets import Shape

SHAPE = Shape(layers=2, hidden=64, heads=2, sequence=32)
CONFIG = {"bf16": {"enabled": True}, "activation_checkpointing": {"policy": "recompute"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "wherry" / "profiles"


def files(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.exists() else set()


def profiled(source: Source, micro: int = 2) -> Profile:
    return Forecaster(source, known("4090"), 1).profile(configs.load(CONFIG), micro)


def test_what_was_kept_is_what_was_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = profiled(of_shape("small", SHAPE))
    assert len(files(folder)) == 1
    traced = Forecaster._traced
    monkeypatch.delattr(Forecaster, "_traced")
    again = profiled(of_shape("by another name", SHAPE))
    assert again is not made and again.same(made)
    for name, values in vars(made.operations).items():
        assert values.dtype == vars(again.operations)[name].dtype, name
    # Another micro-batch, length or model is another profile.
    for other in (SHAPE, Shape(layers=3, hidden=64, heads=2, sequence=32)):
        with pytest.raises(AttributeError, match="_traced"):
            profiled(of_shape("small", other), micro=2 if other != SHAPE else 3)
    monkeypatch.setattr(Forecaster, "_traced", traced, raising=False)
    assert not profiled(of_shape("small", SHAPE), micro=3).same(made)
    assert len(files(folder)) == 2


def test_other_code_makes_other_profiles_and_a_broken_file_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = profiled(of_shape("small", SHAPE))
    (file,) = files(folder)
    whole = file.read_bytes()
    for broken in (whole[:-20], whole[:40] + b"\xff" * 40 + whole[80:], b"", gzip.compress(b"[1]")):
        file.write_bytes(broken)
        assert profiled(of_shape("small", SHAPE)).same(made)
    (file,) = files(folder)
    monkeypatch.setattr(kept, "_code", lambda: "changed")
    assert profiled(of_shape("small", SHAPE)).same(made)
    assert len(files(folder)) == 2


def test_code_of_ones_own_is_run_each_time(folder: Path) -> None:
    profiled(find(make))
    assert not files(folder)


def test_the_newest_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 3)
    profile, store = Profile.of_sizes((), 1), KeptProfiles("model")
    assert len(profile.operations.flops) == 0 and np.array_equal(profile.operations.backward, [])
    for number in range(5):
        store.write(profile, number)
        for file in files(folder) if number == 2 else ():
            os.utime(file, (0, 0))
    assert len(files(folder)) == 3 and store.read(3) is not None
    found = store.read(4)
    assert found is not None and found.same(profile)


def test_a_folder_that_cannot_be_written_is_done_without(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("not a folder")
    assert profiled(of_shape("small", SHAPE)).parameters == SHAPE.parameters


def test_a_second_plan_needs_no_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = ("gpt2-10m", "--set", "bf16.enabled=true")
    commands = [["plan", *plan, "--machine", "h100"], ["plan", *plan, "--machine", "4090", "--auto"]]
    assert all(main(command) == 0 for command in commands)
    first = capsys.readouterr().out
    program = (
        "import sys\nfrom wherry.cli import main\n"
        f"for command in {commands!r}: main(command)\n"
        "print('LOADED', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    told, _, loaded = done.stdout.partition("LOADED")
    assert told == first
    assert "wherry.plan.peaks" in loaded.split() and "torch" not in loaded.split()
