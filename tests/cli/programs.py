"""Programs that the launcher's tests start, and how they start them."""

import atexit
import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

import wherry as wherry_itself

# Programs run the Wherry that is tested, be it a checkout's or an installed one.
WHERE = str(Path(wherry_itself.__file__).parents[1])


def environment(**extra):
    """This environment without what a launcher or a test runner may have left in it."""
    ours = {
        k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC")) and k != "OMP_NUM_THREADS"
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOGLEVEL", "HF_TOKEN"):
        ours.pop(name, None)
    return {**ours, "PYTHONPATH": WHERE, **extra}


def wherry(*arguments, cwd=None, timeout=90, **extra):
    """Run `wherry ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "wherry", *map(str, arguments)],
        cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@functools.cache
def _launchers():
    from tests.forks import ENGINE, Forks

    forks = Forks(*ENGINE, "torch.distributed.run", "torch.distributed.launcher.api", "wherry.cli.run")
    atexit.register(forks.close)
    return forks


def launched(*arguments, **how):
    """As `wherry`, by a launcher that is a fork: one of its own would first import torch, which takes longer than what
    most tests have it do. The ranks are processes of their own."""
    return forked("-c", "import sys; from wherry.cli import main; sys.exit(main())", *arguments, **how)


def forked(*command, cwd=None, timeout=90, **extra):
    """Run a script, or the code after -c, in a fork of a process that has imported torch's launcher."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        command = list(map(str, command))
        launcher = _launchers().start(
            command, stdout=out, stderr=errors, env=environment(**extra), folder=cwd or Path.cwd()
        )
        try:
            launcher.wait(timeout)
        finally:
            launcher.kill()
        return subprocess.CompletedProcess(command, launcher.wait(), *map(_text_of, (out, errors)))


def _text_of(file):
    file.seek(0)
    return file.read().decode()


def start(*arguments, cwd=None, **extra):
    """Start `wherry ARGUMENTS` and let it run."""
    return subprocess.Popen(
        [sys.executable, "-m", "wherry", *map(str, arguments)],
        cwd=cwd, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def unread():
    """A pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


def script(folder, body, name="script.py"):
    path = folder / name
    path.write_text("import os, sys, time\nfrom pathlib import Path\nHERE = Path(__file__).parent\n" + body)
    return path


def wait_for(condition, seconds=60.0):
    """Poll until `condition()` is true; the bound only ends a test that would hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def gone(pids):
    return all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids)


def pids_in(folder):
    return [int(path.suffix[1:]) for path in folder.glob("pid.*")]


class Ports:
    """A row of ports of this process's own, each given once: those above the system gives to whoever asks for any.

    The first of the row is held as long as the process lives: another one, of another run as well, takes another row.
    """

    ROW = 100

    def __init__(self):
        for first in range(20_000, 32_000, self.ROW):
            self._guard = socket.socket()
            try:
                self._guard.bind(("127.0.0.1", first))
            except OSError:
                self._guard.close()
                continue
            self._rest = itertools.cycle(range(first + 1, first + self.ROW))
            return
        raise AssertionError("all rows of ports from 20000 to 32000 are taken")

    def next(self):
        while True:
            port = next(self._rest)
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


@functools.cache
def _ports():
    return Ports()


def free_port():
    """A port for ranks to meet at."""
    return _ports().next()


def fleet(folder):
    """Flags for two hosts of one slot each, both of them this machine behind a false ssh."""
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$1" >> {folder}/reached\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o700)
    hostfile = folder / "hosts"
    hostfile.write_text("# two machines\nalpha slots=1\n\nbeta slots=2  # one is left out below\n")
    port = free_port()
    return ("--hostfile", hostfile, "--ssh", ssh, "--num_gpus", 1, "--master_addr", "127.0.0.1", "--master_port", port)


WRITE_PID = "(HERE / f'pid.{os.getpid()}').touch()\n"
