"""Run programs in forks of a process that has imported what they need.

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
import io
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

import psutil
from tests.cli.programs import SSH, environment, free_port

ROOT = Path(__file__).parents[1]
# What nearly every program imports, and torch itself when it first makes an optimizer.
ENGINE = ("wherry.build", "wherry.engine", "torch._dynamo")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_SET_PARENT_DEATH_SIGNAL = 1


class Child:
    """A fork, with the methods of subprocess.Popen."""

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

    def communicate(self, timeout: float = 60.0) -> tuple[str, None]:
        """Return the rest of the output, once the program has closed it and ended."""
        assert self.stdout is not None
        shown = self.stdout.read().decode()
        self.wait(timeout)
        return shown, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """A process that has imported `modules`, and forks. With `as_deepspeed`, `import deepspeed` gives Wherry there.

    The process is itself a fork of one that has imported the engine, if the engine is among `modules` and `apart` is
    false. With `forked_ranks`, the launchers among its programs fork their ranks too.
    """

    def __init__(
        self, *modules: str, as_deepspeed: bool = False, apart: bool = False, forked_ranks: bool = False
    ) -> None:
        self._environment = environment(**QUIET)
        if as_deepspeed:
            from wherry.compat import deepspeed as alias

            self._environment["PYTHONPATH"] = os.pathsep.join([str(alias.FOLDER), self._environment["PYTHONPATH"]])
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | Child
        code = f"from tests.forks import serve; serve({modules!r}, {forked_ranks})"
        how = {"stdin": theirs, "stdout": sys.__stdout__, "stderr": sys.__stderr__, "env": self._environment}
        with theirs:
            if apart or not set(ENGINE) <= set(modules):
                self._process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **how)
            else:
                self._process = engine().start(["-c", code], folder=ROOT, **how)

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        message = json.dumps(request).encode()
        if fds:
            socket.send_fds(self._socket, [message], fds)
        else:
            self._socket.send(message)
        answer = self._socket.recv(1 << 12)
        assert answer, "the process that forks has ended; its output stands above"
        return json.loads(answer)

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        launched: bool = False,
    ) -> Child:
        """Run the script, or the code after -c, that an interpreter with these arguments would; `launched`: a script as
        a rank of `wherry run`."""
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
                    mine[number] = os.fdopen(read, "rb", 0) if number else os.fdopen(write, "wb")
                elif wanted == subprocess.STDOUT:
                    theirs.append(theirs[1])
                else:
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

    def of(self, *modules: str, as_deepspeed: bool = False) -> Forks:
        """Forks of a process that imported these modules too, kept as long as the test worker."""
        return kept(*modules, as_deepspeed=as_deepspeed)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def kept(*modules: str, **how: bool) -> Forks:
    """Forks of a process that lives as long as the test worker."""
    forks = Forks(*ENGINE, *modules, **how)
    atexit.register(forks.close)
    return forks


def engine() -> Forks:
    """Forks of the process that imported the engine, which is one for each test worker and forked by all others."""
    return kept(apart=True)


# The process that forks.


def serve(modules: Sequence[str], forked_ranks: bool) -> None:
    """Fork as the requests that come over standard input ask for."""
    for name in modules:
        importlib.import_module(name)
    if forked_ranks:
        fork_interpreters()
    gc.freeze()  # no fork need look at what was imported
    with socket.socket(fileno=0) as link:
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
                    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
                    command = request["command"]
                    if request["launched"]:
                        command = ["-m", "wherry.cli.rank", "--", *command]
                    _become(command, fds, request["environment"], request["folder"], last=max(fds) + 1)
            for each in fds:
                os.close(each)
            link.send(json.dumps(answer).encode())


def _become(
    command: Sequence[str], fds: Sequence[int], environ: Mapping[str, str], folder: str | None, last: int
) -> NoReturn:
    """Run a command as a new interpreter would, in this fork; close its file descriptors from 3 to `last`."""
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, last)
        environ = dict(environ)
        os.environ.clear()
        os.environ.update(environ)
        if folder is not None:
            os.chdir(folder)
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:] = dict.fromkeys(["", *paths, *sys.path])
        _run(list(command))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _run(command: list[str]) -> None:
    """Run a program as an interpreter with these arguments does, and end as it does."""
    status = 0
    try:
        while command[0] in ("-I", "-S", "-P", "-u"):
            flag = command.pop(0)
            if flag == "-P":
                del sys.path[0]
            elif flag == "-u":
                sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), "utf-8", write_through=True)
        sys.argv = command
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        if command[0] == "-m":
            name = command.pop(1)
            sys.modules.pop(name, None)  # runpy warns of a module that was imported before
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            if command[0] == "-c":
                path, text = "<string>", command.pop(1)
            else:
                if sys.path[0] == "":
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


# Interpreters that a forked launcher starts.


def fork_interpreters() -> None:
    """Let torch's elastic agent, and a launcher of several hosts, fork the interpreters that they start."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from wherry.cli import supervise

    read = psutil.Process.environ
    # The kernel shows the environment that the first process began with.
    psutil.Process.environ = lambda process: _environments.get(process.pid) or read(process)
    subprocess_handler.Popen = ForkedInterpreter
    supervise.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedInterpreter})


class ForkedInterpreter(subprocess.Popen[Any]):
    """A Popen whose child, where it would be a Python interpreter, is a fork of this process that runs its command.

    The false ssh of the tests reaches this machine, and so its command runs in a fork as well.
    """

    def _execute_child(self, args: Sequence[str], *how: Any) -> None:
        command = _command_of_interpreter(args)
        if command is None:
            super()._execute_child(args, *how)
            return
        folder, environ, pipes, new_session = how[4], how[5], how[9:15], how[20]
        inherited = [fd if fd != -1 else number for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _forget_parent()
                if new_session:
                    os.setsid()
                if command[0] == "cd":
                    folder, command = command[1], command[5:]
                    os.execv = lambda _, words: _run(list(words[1:]))
                environ = os.environ if environ is None else environ
                _become(command, inherited, environ, folder, os.sysconf("SC_OPEN_MAX"))
            finally:
                os._exit(1)
        self._child_created = True
        _environments[self.pid] = dict(os.environ if environ is None else environ)
        self._close_pipe_fds(*pipes)


def _command_of_interpreter(args: Sequence[str]) -> list[str] | None:
    """The arguments of the interpreter that `args` start, behind `cd FOLDER && exec PYTHON` where ssh starts it."""
    if args[0] == sys.executable:
        return list(args[1:])
    if os.path.basename(args[0]) == "ssh" and os.path.isfile(args[0]) and SSH in Path(args[0]).read_text():
        return shlex.split(args[-1])
    return None


def _forget_parent() -> None:
    """Reset in a fork what a new interpreter does not have of the process that starts it."""
    gc.freeze()  # objects of the parent that are garbage must not close file descriptors of the child
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # The buffers of the parent's streams hold what the parent is about to write.
    _parents_streams.extend([sys.stdin, sys.stdout, sys.stderr])
    raw = [io.FileIO(fd, mode, closefd=False) for fd, mode in enumerate(("rb", "wb", "wb"))]
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(raw[0]), "utf-8")
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(raw[1]), "utf-8")
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(raw[2], "utf-8", "backslashreplace", write_through=True)


_parents_streams: list[Any] = []
_environments: dict[int, dict[str, str]] = {}
