"""Profiles in files: the figures of those that were just made, without torch, and only while the code is the same."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.cli.programs import environment
from tests.plan import shipped
from tests.plan.measured import make

from wherry import config as configs
from wherry.cli import main
from wherry.forecast import Forecaster
from wherry.plan import kept
from wherry.plan.kept import KeptProfiles
from wherry.plan.machine import known
from wherry.plan.profile import Profile
from wherry.sources import SHAPES, Source, find, of_shape
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


def loaded_by(commands: list[list[str]]) -> tuple[str, list[str]]:
    """What a process of their own prints, and the modules that it has imported at its end."""
    program = (
        "import sys\nfrom wherry.cli import main\n"
        f"for command in {commands!r}: main(command)\n"
        "print('LOADED', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    told, _, loaded = done.stdout.partition("LOADED")
    assert "wherry.plan.peaks" in loaded.split()
    return told, loaded.split()


def test_the_first_plan_of_a_preset_needs_no_torch(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ("gpt2-10m", "--set", "bf16.enabled=true")
    commands = [["plan", *plan, "--machine", "h100"], ["plan", *plan, "--machine", "4090", "--auto"]]
    told, loaded = loaded_by(commands)
    assert "torch" not in loaded and not files(folder)
    # They say what a plan says that has nothing to read.
    monkeypatch.setattr(kept, "shipped", lambda model, name: None)
    assert all(main(command) == 0 for command in commands)
    assert files(folder) and told == capsys.readouterr().out


def test_a_second_plan_needs_neither_torch_nor_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="models of Hugging Face need transformers")
    shape = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    shared = ["plan", "gpt2-10m", "--machine", "h100", "--tensor-parallel", "2", "--pipeline-parallel", "2"]
    commands = [["plan", str(tmp_path), "--machine", "4090"], shared]
    assert all(main(command) == 0 for command in commands)
    told, loaded = loaded_by(commands)
    assert told == capsys.readouterr().out
    assert "torch" not in loaded and "transformers" not in loaded


# What comes with Wherry.


def test_a_profile_that_comes_with_wherry_is_what_is_made_of_the_preset() -> None:
    wanted = list(shipped.settings("gpt2-10m"))
    assert len(wanted) == 3 * 2 * 11
    # Each precision with and without recomputation, each with another micro-batch.
    chosen = wanted[::13]
    for preset, settings in (("gpt2-10m", chosen), ("gpt2-124m", [({}, 1)])):
        made = shipped.profiles(preset, iter(settings))
        assert len(made) == len(settings)
        for name, profile in made.items():
            found = kept.shipped(repr(SHAPES[preset]), name)
            if kept.torch_release() == kept.release_of_shipped():
                assert found is not None and found.same(profile), "python -m tests.plan.shipped --update"
            else:
                assert found is None


def test_all_presets_are_there_for_the_torch_that_made_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for preset, shape in SHAPES.items():
        names = set(shipped.profiles(preset, shipped.settings(preset), named=True))
        assert names == kept._shipped_of(repr(shape)).keys()
        monkeypatch.setattr(kept, "torch_release", kept.release_of_shipped)
        found = kept.shipped(repr(shape), min(names))
        assert found is not None and found.parameters == shape.parameters
        assert kept.shipped(repr(shape), "another") is None and kept.shipped("another", min(names)) is None
        monkeypatch.setattr(kept, "torch_release", lambda: "0.1")
        assert kept.shipped(repr(shape), min(names)) is None
