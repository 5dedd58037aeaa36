"""Start commands and programs: in an interpreter of their own, or in a fork of one that has torch."""

import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil

import wherry as wherry_itself

# Programs run the Wherry that is tested, be it a checkout's or an installed one.
WHERE = str(Path(wherry_itself.__file__).parents[1])


def environment(**extra):
    """This environment without variables of a launcher, and without those that make commands behave otherwise."""
    ours = {
        k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC")) and k != "OMP_NUM_THREADS"
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOGLEVEL", "HF_TOKEN", "PYTHONUNBUFFERED"):
        ours.pop(name, None)
    return {**ours, "PYTHONPATH": WHERE, **extra}


def interpret(code, **extra):
    """Run code in an interpreter of its own and return its output."""
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, env=environment(**extra), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wherry(*arguments, cwd=None, timeout=90, **extra):
    """Run `wherry ARGUMENTS` to its end in an interpreter of its own, as are those of its ranks."""
    return subprocess.run(
        [sys.executable, "-m", "wherry", *map(str, arguments)],
        cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


LAUNCHER = ("torch.distributed.run", "torch.distributed.launcher.api", "wherry.cli.run", "wherry.train.job")
WHERRY = ("-c", "import sys; from wherry.cli import main; sys.exit(main())")


def launched(*arguments, **how):
    """Run `wherry ARGUMENTS` to its end in a fork, as are its ranks: importing torch takes longer than most tests."""
    return forked(*WHERRY, *arguments, **how)


def forked(*command, cwd=None, timeout=90, **extra):
    """Run a script, or the code after -c, in a fork of a process that has imported torch's launcher."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        launcher = start_fork(*command, cwd=cwd, stdout=out, stderr=errors, **extra)
        try:
            launcher.wait(timeout)
        finally:
            launcher.kill()
        return subprocess.CompletedProcess(command, launcher.wait(), *map(_text_of, (out, errors)))


def start_fork(*command, cwd=None, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **extra):
    """Start a script, or the code after -c, in such a fork, and let it run."""
    from tests.forks import kept

    launchers, words = kept(*LAUNCHER, forked_ranks=True), list(map(str, command))
    return launchers.start(words, stdout=stdout, stderr=stderr, env=environment(**extra), folder=cwd or Path.cwd())


def _text_of(file):
    file.seek(0)
    return file.read().decode()


def start(*arguments, cwd=None, **extra):
    """Start `wherry ARGUMENTS` in an interpreter of its own and let it run."""
    return subprocess.Popen(
        [sys.executable, "-m", "wherry", *map(str, arguments)],
        cwd=cwd, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


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


@functools.cache
def _ports():
    """Reserve a range of ports for this process, below the system's ephemeral ports.

    The first of the row is held as long as the process lives: another one, of another run as well, takes another row.
    """
    for first in range(20_000, 32_000, 100):
        guard = socket.socket()
        with contextlib.suppress(OSError):
            guard.bind(("127.0.0.1", first))
            return guard, itertools.cycle(range(first + 1, first + 100))
        guard.close()
    raise AssertionError("all rows of ports from 20000 to 32000 are taken")


def free_port():
    """Return a rendezvous port that no earlier call returned."""
    for port in _ports()[1]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# Runs the command on this machine. Forked launchers run it in a fork.
SSH = """#!/bin/sh
echo "$1" >> "$(dirname "$0")/reached"
shift
exec sh -c "$*"
"""


def fleet(folder):
    """Flags for two hosts of one slot each, both of them this machine behind a false ssh."""
    ssh = folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o700)
    hostfile = folder / "hosts"
    hostfile.write_text("# two machines\nalpha slots=1\n\nbeta slots=2  # one is left out below\n")
    port = free_port()
    return ("--hostfile", hostfile, "--ssh", ssh, "--num_gpus", 1, "--master_addr", "127.0.0.1", "--master_port", port)


WRITE_PID = "(HERE / f'pid.{os.getpid()}').touch()\n"
