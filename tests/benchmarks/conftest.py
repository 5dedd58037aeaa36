"""Run benchmarks as scripts whose workers are forks."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Protocol

import pytest

from benchmarks import machine, processes, systems

FOLDER = Path(__file__).parents[2] / "benchmarks"


class Script(Protocol):
    def __call__(self, name: str, *words: object) -> None: ...


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore what a benchmark sets for the processes that it starts."""
    for name in (systems.DISK_FOLDER, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe this machine without asking git or a driver."""
    monkeypatch.setattr(machine, "commit", lambda _: "unknown")
    monkeypatch.setattr(machine, "_said", lambda _: [])


@pytest.fixture
def script(forks: Any, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run a script of benchmarks/ to its end, which must be a good one."""
    workers = forks.of("torch.distributed.fsdp", "benchmarks.worker")

    def fork(command: list[str], *, env: dict[str, str], stderr: IO[bytes], **pipes: Any) -> Any:
        return workers.start(command[1:], env=env, stderr=stderr, **pipes)

    def run(name: str, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        assert ended.value.code == 0

    stand_in = SimpleNamespace(Popen=fork, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(processes, "subprocess", stand_in)
    return run
