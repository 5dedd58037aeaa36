"""Gloo ranks that live as long as the test worker and run the functions that tests send them.

    def add_up(rank, value): ...

    def test_sums(warm):
        assert warm(2).run(add_up, 1.0) == [2.0, 2.0]

Functions and arguments travel pickled, so a function is one of a module. Ranks are forks of a process that has imported
the engine.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from tests.cli.programs import environment, free_port
from tests.forks import QUIET, ROOT, Child, engine

PRELOADED = ("pytest", "tests.engine.harness", "tests.warm")
# Seconds until a rank hangs, and until the others of one that failed do.
ANSWERS_S, ANSWERS_AFTER_FAILURE_S = 120.0, 15.0


@dataclass(frozen=True)
class Failure:
    """The exception that a function raised on a rank, or the exit status of a rank that ended."""

    error: str
    message: str
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.error} {self.message}"


class Pool:
    """Ranks of one gloo group. A failure of any of them ends all; the next function gets new ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Connection, Child]] = []
        self._log: IO[bytes] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(rank, *args)` on every rank and return the results in rank order."""
        outcomes = self.outcomes(function, *args)
        failures = [f"rank {rank}: {found}" for rank, found in enumerate(outcomes) if isinstance(found, Failure)]
        assert not failures, "\n".join(failures)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on every rank; a rank that raised, ended or hung has a `Failure` in place of its result."""
        if not self._ranks:
            self._start()
        message = pickle.dumps((sys.path, pickle.dumps((function, args))))
        waiting = {}
        for rank, (pipe, _) in enumerate(self._ranks):
            pipe.send_bytes(message)
            waiting[pipe] = rank
        outcomes: list[Any] = [Failure("Hang", f"no answer in {ANSWERS_S:.0f} s")] * self.size
        deadline, failed = time.monotonic() + ANSWERS_S, False
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                outcomes[rank] = self._outcome(rank)
                if isinstance(outcomes[rank], Failure) and not failed:
                    deadline, failed = min(deadline, time.monotonic() + ANSWERS_AFTER_FAILURE_S), True
        if failed or waiting:
            self.close()
        return outcomes

    def close(self) -> None:
        """End the ranks."""
        for pipe, child in self._ranks:
            pipe.close()
            child.kill()
            child.wait()
        self._ranks.clear()

    def _start(self) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # while the ranks live
        forks = engine().of(*PRELOADED)
        for rank in range(self.size):
            mine, theirs = socket.socketpair()
            with theirs:
                child = forks.start(
                    ["-c", "from tests.warm import serve; serve()"],
                    stdin=theirs,
                    stdout=self._log,
                    stderr=self._log,
                    env=environment(**QUIET, **place, RANK=str(rank), LOCAL_RANK=str(rank)),
                    folder=ROOT,
                )
            self._ranks.append((Connection(mine.detach()), child))

    def _outcome(self, rank: int) -> Any:
        pipe, child = self._ranks[rank]
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            assert self._log is not None
            self._log.seek(0)
            return Failure("Exit", str(child.wait()), f"exit status {child.wait()}\n{self._log.read().decode()}")


class Pools:
    """A pool for each number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, size: int) -> Pool:
        return self._pools.setdefault(size, Pool(size))

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()


def serve() -> None:
    """Run the functions that come over standard input, as one rank of a group."""
    import torch
    import torch.distributed as dist

    pipe = Connection(os.dup(0))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    while True:
        try:
            path, task = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            sys.path[:] = path
            function, args = pickle.loads(task)
            result = pickle.dumps(function(rank, *args))
        except Exception as error:
            # The process stays: it may hold the store, in which the others read why it failed.
            result = pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(result)
