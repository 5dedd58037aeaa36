"""Several machines from one: a `wherry run` on each of them, whose words are passed on here, and its end with ours.

The machines are the hosts of a hostfile, over ssh, or those of a Ray cluster (`ray_nodes`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from wherry.cli.rank import FAILURE_LINE, INTERRUPTED, Failure, root_cause
from wherry.cli.run import DEFAULT_PORT, given_processes
from wherry.errors import WherryError

_LINE = re.compile(r"^(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d+)\s*$")
_PASSED_ON = ("NCCL_", "GLOO_", "PYTHON", "WHERRY_", "UCX_", "HF_", "TORCH_", "LD_LIBRARY_PATH", "OMP_", "CUDA_HOME")
_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
# How long the ranks of other machines may take to end, which may be finishing a step, or cleaning up.
_SECONDS_TO_END = 40.0
_SECONDS_FOR_THE_PEER = 3.0


class Node(Protocol):
    """A `wherry run` on a machine."""

    name: str
    prefix: str

    @property
    def output(self) -> Iterable[str]:
        """What it says, line by line, until it ends."""

    def wait(self) -> int:
        """Its exit status, when it has said all."""

    def close(self, *, interrupted: bool) -> None:
        """End it, as a Ctrl-C there would or at once."""

    def kill(self) -> None: ...


def forwarded(flags: Sequence[str], arguments: argparse.Namespace, index: int, nodes: int, processes: int) -> list[str]:
    """The words behind `wherry run` on machine `index`: what was given here, and behind that its own part of it."""
    own = ["--follow-stdin", "--num_nodes", nodes, "--node_rank", index, "--nproc", processes]
    script = [arguments.training_script, *arguments.training_script_args]
    return [*flags, *map(str, own), *script]


def passed_on() -> dict[str, str]:
    """The settings of this environment that are to hold on every machine."""
    return {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}


def follow(nodes: Sequence[Node], ranks: int) -> int:
    """Pass on what all nodes say, until all or one that fails have ended. Why it failed comes last."""
    failures: list[tuple[Node, Failure]] = []
    ended: SimpleQueue[tuple[Node, int | Exception]] = SimpleQueue()

    def pass_on(node: Node) -> None:
        try:
            for line in node.output:
                if line.startswith(FAILURE_LINE):
                    failures.append((node, Failure.from_line(line)))
                else:
                    sys.stdout.write(node.prefix + line)
                    sys.stdout.flush()
            ended.put((node, node.wait()))
        except Exception as error:  # as when nobody reads what is said
            ended.put((node, error))

    threads = [threading.Thread(target=pass_on, args=(node,), daemon=True, name=node.name) for node in nodes]
    for thread in threads:
        thread.start()
    interrupted = False
    try:
        for _ in nodes:
            node, status = ended.get()
            if isinstance(status, Exception):
                raise status
            if status:
                if all(failure.of_a_peer for _, failure in failures):
                    # It only lost a peer: the one that was lost may still be telling why.
                    with contextlib.suppress(Empty):
                        ended.get(timeout=_SECONDS_FOR_THE_PEER)
                break
        else:
            return 0
    except KeyboardInterrupt:
        interrupted = True
        return INTERRUPTED
    finally:
        try:
            for each in nodes:
                each.close(interrupted=interrupted)
            deadline = time.monotonic() + _SECONDS_TO_END
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            for each in nodes:
                each.kill()
    sys.stdout.flush()
    if not failures:
        print(f"wherry: the launcher on {node.name} ended with status {status}", file=sys.stderr, flush=True)
        return status
    told = [failure for _, failure in failures]
    cause = root_cause(told)
    where = next(node.name for node, failure in failures if failure is cause)
    print(f"wherry: on host {where}:\n{cause.describe(told, ranks)}", file=sys.stderr, flush=True)
    return cause.exit_status


@dataclass(frozen=True)
class Host:
    """A machine, and which of its devices (or, without any, how many processes) to use."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str) -> list[Host]:
    """Lines of `name slots=N`; empty lines and comments are skipped."""
    file = Path(path)
    if not file.is_file():
        raise WherryError(f"--hostfile {path}: there is no such file")
    hosts: list[Host] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        found = _LINE.match(text)
        if found is None:
            raise WherryError(f"{path}:{number}: expected `name slots=N`, got {text!r}")
        if any(host.name == found["name"] for host in hosts):
            raise WherryError(f"{path}:{number}: {found['name']} stands in the file twice; keep one line of it")
        hosts.append(Host(found["name"], tuple(range(int(found["slots"])))))
    if not hosts:
        raise WherryError(f"{path}: the file names no host; expected lines of `name slots=N`")
    return hosts


def select(hosts: list[Host], include: str, exclude: str) -> list[Host]:
    """The hosts and slots that are left after `--include` or `--exclude`.

    >>> select([Host("a", (0, 1)), Host("b", (0, 1))], "", "b:0")
    [Host(name='a', slots=(0, 1)), Host(name='b', slots=(1,))]
    """
    if include and exclude:
        raise WherryError("--include and --exclude cannot be given together; give one of them")
    if not include and not exclude:
        return hosts
    flag = "--include" if include else "--exclude"
    named = _parse_filter(flag, include or exclude, {host.name: host for host in hosts})
    if include:
        left = [Host(host.name, named[host.name]) for host in hosts if host.name in named]
    else:
        left = [
            Host(host.name, tuple(slot for slot in host.slots if slot not in named.get(host.name, ())))
            for host in hosts
        ]
    left = [host for host in left if host.slots]
    if not left:
        raise WherryError(f"{flag} {include or exclude}: no slot is left")
    return left


def _parse_filter(flag: str, text: str, hosts: dict[str, Host]) -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.partition(":")
        if name not in hosts:
            raise WherryError(f"{flag} {text}: unknown host {name!r}; the hosts are {', '.join(hosts)}")
        if colon and not all(slot.strip().isdigit() for slot in slots.split(",")):
            raise WherryError(f"{flag} {text}: expected host:0,1 with numbers of slots, got {part!r}")
        chosen = tuple(int(slot) for slot in slots.split(",")) if colon else hosts[name].slots
        missing = [slot for slot in chosen if slot not in hosts[name].slots]
        if missing:
            have = ", ".join(map(str, hosts[name].slots))
            raise WherryError(f"{flag} {text}: {name} has no slot {missing[0]}; it has {have}")
        named[name] = tuple(sorted({*named.get(name, ()), *chosen}))
    return named


def run_on_hosts(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """A `wherry run` on every host of the hostfile, over ssh."""
    hosts = select(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    wanted = arguments.num_nodes or arguments.nnodes
    if wanted is not None:
        if not str(wanted).isdigit() or not 0 < int(wanted) <= len(hosts):
            raise WherryError(f"--num_nodes {wanted}: the hostfile leaves {len(hosts)} hosts")
        hosts = hosts[: int(wanted)]
    count = given_processes(arguments)
    if count is not None:
        for host in hosts:
            if not count.isdigit() or int(count) > len(host.slots):
                raise WherryError(f"--num_gpus {count}: host {host.name} has {len(host.slots)} slots")
        hosts = [Host(host.name, host.slots[: int(count)]) for host in hosts]
    first = hosts[0].name if hosts[0].name not in _LOCAL_NAMES or len(hosts) == 1 else socket.gethostname()
    meeting = ["--master_addr", arguments.master_addr or first]
    meeting += ["--master_port", str(arguments.master_port or DEFAULT_PORT)]
    reach = shlex.split(arguments.ssh or "ssh -o BatchMode=yes -o ConnectTimeout=15")
    reach += ["-p", str(arguments.ssh_port)] if arguments.ssh_port else []
    nodes: list[_SshNode] = []
    try:
        for index, host in enumerate(hosts):
            words = forwarded([*flags, *meeting], arguments, index, len(hosts), len(host.slots))
            here = arguments.ssh is None and (host.name in _LOCAL_NAMES or host.name == socket.gethostname())
            nodes.append(_SshNode(host, ["sh", "-c"] if here else [*reach, host.name], words))
    except BaseException:
        for node in nodes:
            node.kill()
        raise
    return follow(nodes, sum(len(host.slots) for host in hosts))


class _SshNode:
    """A `wherry run` that ssh has started: in the same folder, by the same Python, under the same settings."""

    def __init__(self, host: Host, reach: Sequence[str], words: Sequence[str]) -> None:
        self.name, self.prefix = host.name, f"[{host.name}] "
        settings = passed_on() | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
        exports = [f"{key}={value}" for key, value in sorted(settings.items())]
        command = shlex.join(["exec", "env", *exports, sys.executable, "-u", "-m", "wherry", "run", *words])
        try:
            # A session of its own: Ctrl-C reaches this process alone, which then closes what the others read.
            self._process = subprocess.Popen(
                [*reach, f"cd {shlex.quote(os.getcwd())} && {command}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise WherryError(f"--ssh: the command {reach[0]!r} is not installed here") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout

    def wait(self) -> int:
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def close(self, *, interrupted: bool) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended
            if interrupted:
                self._input.write("stop\n")
            self._input.close()

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
