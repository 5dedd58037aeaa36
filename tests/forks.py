"""Programs that run in forks of a process that has imported what they need.

An interpreter that imports torch takes seconds of a core, and one that imports transformers many; a fork takes
milliseconds. Ranks are forks where a test is about what their program does, and not about how it is started.

    with Forks("wherry.engine") as forks:
        done = forks.run("script.py", "argument", ranks=2, folder=tmp_path)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

from tests.cli.programs import environment, free_port

ROOT = Path(__file__).parents[1]
# What nearly every program imports, and torch itself when it first makes an optimizer.
ENGINE = ("wherry.build", "wherry.engine", "torch._dynamo")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_SET_PARENT_DEATH_SIGNAL = 1


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Child:
    """A fork, with the face of a subprocess.Popen."""

    def __init__(self, forks: Forks, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._forks = forks

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float = 120.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, f"process {self.pid} does not end"
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """A process that has imported `modules`, and forks. With `as_deepspeed`, `import deepspeed` gives Wherry there.

    It is itself a fork of one that has imported the engine, if that is among them and it need not be `apart`.
    """

    def __init__(self, *modules: str, as_deepspeed: bool = False, apart: bool = False) -> None:
        self._environment = environment(**QUIET)
        if as_deepspeed:
            from wherry.compat import deepspeed as alias

            self._environment["PYTHONPATH"] = os.pathsep.join([str(alias.FOLDER), self._environment["PYTHONPATH"]])
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | Child
        with theirs:
            if apart or not set(ENGINE) <= set(modules):
                code = f"from tests.forks import serve; serve({theirs.fileno()}, {modules!r})"
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    cwd=ROOT,
                    env=self._environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            else:
                code = f"from tests.forks import serve; serve(0, {modules!r})"
                self._process = _engine().start(
                    ["-c", code],
                    stdin=theirs,
                    stdout=sys.__stdout__,
                    stderr=sys.__stderr__,
                    env=self._environment,
                    folder=ROOT,
                )

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        message = json.dumps(request).encode()
        if fds:
            socket.send_fds(self._socket, [message], fds)
        else:
            self._socket.send(message)
        answer = self._socket.recv(1 << 12)
        assert answer, "the process that forks has ended; what it said stands above"
        return json.loads(answer)

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: int | HasFileno = subprocess.DEVNULL,
        stdout: int | HasFileno = subprocess.DEVNULL,
        stderr: int | HasFileno = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        launched: bool = False,
    ) -> Child:
        """Run what an interpreter would with these arguments: a script, perhaps after -P, or the code after -c.

        `launched`: a script as a rank of `wherry run`.
        """
        with contextlib.ExitStack() as stack:
            mine: dict[int, IO[bytes]] = {}
            theirs = []
            for number, wanted in enumerate((stdin, stdout, stderr)):
                if wanted == subprocess.DEVNULL:
                    theirs.append(stack.enter_context(open(os.devnull, "r+b")).fileno())
                elif wanted == subprocess.PIPE:
                    read, write = os.pipe()
                    theirs.append(write if number else read)
                    stack.callback(os.close, theirs[-1])
                    mine[number] = os.fdopen(read, "rb") if number else os.fdopen(write, "wb")
                else:
                    assert not isinstance(wanted, int)
                    theirs.append(wanted.fileno())
            request = {
                "command": list(command),
                "environment": dict(self._environment if env is None else env),
                "folder": str(folder or os.getcwd()),
                "launched": launched,
            }
            return Child(self, self.ask(request, theirs), mine.get(0), mine.get(1))

    def run(
        self,
        *command: object,
        folder: Path,
        ranks: int = 1,
        launched: bool = True,
        timeout: float = 240.0,
        **extra: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on so many ranks to their end, or until one has failed for a while."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        words = list(map(str, command))
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            children = [
                self.start(
                    words,
                    stdout=out,
                    stderr=errors,
                    env={**self._environment, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), **extra},
                    folder=folder,
                    launched=launched,
                )
                for rank in range(ranks)
            ]
            deadline = time.monotonic() + timeout
            try:
                while None in [child.poll() for child in children] and time.monotonic() < deadline:
                    if any(child.returncode for child in children):
                        deadline = min(deadline, time.monotonic() + 10.0)
                    time.sleep(0.01)
            finally:
                for child in children:
                    child.kill()
            status = next((code for child in children if (code := child.wait())), 0)
            told = []
            for file in (out, errors):
                file.seek(0)
                told.append(file.read().decode())
        return subprocess.CompletedProcess(words, status, *told)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def _engine() -> Forks:
    """What test workers fork the others from, as long as they live."""
    forks = Forks(*ENGINE, apart=True)
    atexit.register(forks.close)
    return forks


# The process that forks.


def serve(fd: int, modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # no fork need look at what was imported
    with socket.socket(fileno=fd) as link:
        while True:
            message, fds, *_ = socket.recv_fds(link, 1 << 20, 3)
            if not message:
                return
            request = json.loads(message)
            if "ended" in request:
                pid, status = os.waitpid(request["ended"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                answer = os.fork()
                if answer == 0:
                    link.close()
                    _become(request, fds)
            for each in fds:
                os.close(each)
            link.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], fds: Sequence[int]) -> None:
    """From here on this process is the program."""
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, max(fds) + 1)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:] = dict.fromkeys(["", *paths, *sys.path])
        if request["launched"]:
            from wherry.cli import rank

            sys.argv = ["rank", "--", *request["command"]]
            rank.main()
        sys.argv = request["command"]
        _run(sys.argv)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _run(command: list[str]) -> None:
    """Run a program as an interpreter with these arguments does, and end as it does."""
    status = 0
    try:
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        if command[0] == "-c":
            path, text = "<string>", command.pop(1)
        else:
            if command[0] == "-P":
                del command[0], sys.path[0]
            else:
                sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            path = main.__file__ = command[0]
            text = Path(path).read_text()
        sys.modules["__main__"] = main
        exec(compile(text, path, "exec"), main.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    from wherry.cli.rank import _end

    _end(status)
