"""Rooms of ranks that are forks: what starts them is tested in test_common."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.programs import free_port
from tests.forks import ENGINE, Child, Forks

from benchmarks import rooms


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with Forks("benchmarks.systems", "psutil", *ENGINE) as forks:
        yield forks


@pytest.fixture(autouse=True)
def ports_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that the system may give to a connection of another test before the ranks meet there."""
    monkeypatch.setattr(rooms, "_free_port", free_port)


@pytest.fixture
def forked_rooms(monkeypatch: pytest.MonkeyPatch, forks: Forks) -> None:
    def popen(command: list[str], **options: Any) -> Child:
        _, *arguments = command
        return forks.start(arguments, **options)

    monkeypatch.setattr(rooms, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
