"""Rooms are in no circle with each other, as their own imports show; those that are made in functions count too."""

from __future__ import annotations

import pytest
from tests.structure import imports


@pytest.mark.long  # parses the package; the layers of pyproject.toml are checked by `make lint` as well
def test_no_circle_joins_files_of_different_rooms():
    assert imports.circles_of_rooms(at_once=False) == []


def test_a_circle_would_be_seen(tmp_path, monkeypatch):
    for name, text in {
        "engine": "from wherry.tiers import disk",
        "tiers/__init__": "",
        "tiers/disk": "def f():\n    from wherry.engine import Engine",
        "errors": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wherry.engine",
    }.items():
        (tmp_path / "wherry" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "wherry" / f"{name}.py").write_text(text)
    monkeypatch.setattr(imports, "PACKAGE", tmp_path / "wherry")
    assert imports.circles_of_rooms(at_once=False) == [["wherry.engine", "wherry.tiers.disk"]]
    assert imports.circles_of_rooms(at_once=True) == []
