"""Processes in which systems are built and measured, one for each rank.

The script that measures stays outside and asks; what fails there, or hangs, costs these processes alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from benchmarks import systems
from benchmarks.harness import ROOT, without_folders
from wherry.errors import WherryError

TIMEOUT = 600.0
TOO_LATE = "no answer in time"
# Seconds for a killed process to be gone.
ENDS_S = 10.0
# Letters of a reason.
LONGEST = 300
_WORKER = Path(__file__).parent / "worker.py"


class Failed(WherryError):
    """There was no answer, or it is that of an error. The message is the reason, in a line."""


class Processes:
    """`ranks` processes that share the cores evenly, or are bound to one core each.

    >>> with Processes(ranks=2) as processes:
    ...     processes.ask(do="build", system="ddp", recipe=recipe)
    ...     answers = processes.ask(do="time", system="ddp", steps=10)     # one for each rank
    """

    def __init__(
        self,
        ranks: int,
        *,
        one_core: bool = False,
        worker: Path = _WORKER,
        gpu: bool = False,
        python: str = sys.executable,
    ) -> None:
        self.ranks = ranks
        self._command = [python, "-P", str(worker)]
        self._environment = systems.environment(ranks, gpu)
        self.threads = 1 if one_core else max(1, _cores() // ranks)
        self._one_core = one_core
        self._logs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._partial: list[bytes] = []
        systems.remove_dead_locks()
        self._port = _free_port()
        # What ranks leave on the disk goes with them.
        self._disk = tempfile.mkdtemp(prefix="benchmark-", dir=systems.disk_folder())
        try:
            for rank in range(ranks):
                self._start(rank, self._port)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, port: int) -> None:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **self._environment,
            systems.DISK_FOLDER: self._disk,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "OMP_NUM_THREADS": str(self.threads),
        }
        if self._one_core:
            environment["BENCHMARK_ONE_CORE"] = "1"
        log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as they do
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        self._logs.append(log)
        self._processes.append(process)
        self._partial.append(b"")

    def ask(self, timeout: float = TIMEOUT, **request: Any) -> list[Any]:
        """Send all ranks a request, and return their answers in rank order."""
        self.send(**request)
        return self.answers(timeout)

    def send(self, **request: Any) -> None:
        """A request whose answers are read later: the ranks are at work meanwhile."""
        line = json.dumps(request, default=dataclasses.asdict).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise Failed(self._reason(rank)) from None

    def answers(self, timeout: float = TIMEOUT) -> list[Any]:
        """Of the request that was sent last, in rank order."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise Failed(TOO_LATE)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        raise Failed(self._reason(key.data))
                    self._partial[key.data] += data
                    if b"\n" in data:
                        line, _, self._partial[key.data] = self._partial[key.data].partition(b"\n")
                        answers[key.data] = json.loads(line)
                        selector.unregister(key.fileobj)
                        if "failed" in answers[key.data]:
                            # The others may wait for it.
                            raise Failed(without_folders(answers[key.data]["failed"])[:LONGEST])
        return [answers[rank]["found"] for rank in range(self.ranks)]

    def wait(self, timeout: float) -> None:
        """Wait until the answers to the request that was sent last can be read, or the time is over."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ)
            deadline = time.monotonic() + timeout
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fileobj)

    def _reason(self, rank: int) -> str:
        """Why a rank has ended: the error at the end of what it printed."""
        try:
            status = self._processes[rank].wait(timeout=30)
        except subprocess.TimeoutExpired:
            return "it answers no more, and does not end"
        self._logs[rank].seek(0)
        return reason_in(self._logs[rank].read().decode(errors="replace"), status)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            # Nothing there is worth an orderly end, which may wait for a rank that is gone.
            started = _children(process.pid)
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # of a driver that does not let it go
                process.wait(ENDS_S)
            for child in started:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            with suppress(BrokenPipeError):  # of a request that it did not live to read
                process.stdin.close()
            process.stdout.close()
        for log in self._logs:
            log.close()
        self._processes.clear()
        self._logs.clear()
        shutil.rmtree(self._disk, ignore_errors=True)
        systems.remove_shared_memory(self._port)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reason_in(log: str, status: int) -> str:
    """The last exception of a log, as one line."""
    errors = re.findall(
        r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", log, flags=re.MULTILINE
    )
    if errors:
        # What matters may come after a long path.
        return without_folders(" ".join(errors[-1].split()))[:LONGEST]
    if status == -signal.SIGKILL:
        return "ended by signal 9, which is how the system ends what it has no memory for"
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _children(pid: int) -> list[psutil.Process]:
    """What a rank has started itself, as DeepSpeed starts processes that update: they outlive it otherwise."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _cores() -> int:
    """Those that this process may use: of a machine's there may be more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
