"""Benchmarks as scripts whose workers are forks: an interpreter that imports torch takes seconds of a core."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Protocol

import pytest
from tests.forks import ENGINE, Child, Forks

from benchmarks import processes, systems

FOLDER = Path(__file__).parents[2] / "benchmarks"


class Script(Protocol):
    def __call__(self, name: str, *words: object) -> None: ...


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a benchmark sets for the processes that it starts ends with the test."""
    for name in (systems.DISK_FOLDER, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.fixture(scope="package")
def forks() -> Iterator[Forks]:
    with Forks(*ENGINE, "torch.distributed.fsdp", "benchmarks.worker") as made:
        yield made


@pytest.fixture
def script(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Runs a script of benchmarks/ to its end, which must be a good one."""

    def fork(command: list[str], *, env: dict[str, str], stderr: IO[bytes], **pipes: Any) -> Child:
        return forks.start(command[1:], env=env, stderr=stderr, **pipes)

    def run(name: str, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        assert ended.value.code == 0

    stand_in = SimpleNamespace(Popen=fork, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(processes, "subprocess", stand_in)
    return run
