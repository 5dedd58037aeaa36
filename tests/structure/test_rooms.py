"""Rooms of the sources have tests, and planted faults fit today's sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants.__main__ import HERE, applies, fields
from tests.rooms import ALWAYS, ROOT, SOURCES, TESTS, near, paths_of, room_of

PATCHES = sorted(HERE.glob("*.patch"))


def test_every_room_has_tests() -> None:
    rooms = {path.stem for path in (ROOT / SOURCES).iterdir() if not path.stem.startswith("_")}
    assert TESTS.keys() <= rooms
    for path in paths_of(rooms):
        assert (ROOT / path).exists(), path


def test_a_change_calls_for_the_tests_of_its_room() -> None:
    assert room_of("src/wherry/tiers/disk.py") == "tiers" and room_of("src/wherry/window.py") == "window"
    assert near(["src/wherry/tiers/disk.py"]) == [*ALWAYS, "tests/disk", "tests/tiers"]
    assert near(["tests/train/test_loop.py", "docs/config.md"]) == [*ALWAYS, "tests/train", "tests/docs"]
    assert "tests/tiers/test_delayed.py" in near(["tests/engine/harness.py"])
    assert near(["tests/engine/test_gone.py", "tests/conftest.py"]) == ["tests"]
    assert near(["LICENSE"]) == list(ALWAYS)


def test_planted_faults_name_their_room() -> None:
    assert len(PATCHES) >= 50
    for patch in PATCHES:
        said = fields(patch)
        assert said.keys() == {"Fault", "Room", "Origin"}, patch.name
        assert list((ROOT / SOURCES).glob(f"{said['Room']}*")), f"{patch.name}: no room is called {said['Room']}"


@pytest.mark.nightly
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_planted_fault_applies(patch: Path) -> None:
    assert applies(patch), f"{patch} no longer applies; plant the same fault in today's code"
