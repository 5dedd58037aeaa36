"""Several machines from one: the hostfile, the choice of hosts, and a launcher on each of them over ssh."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue

from wherry.cli.launch import FAILURE_LINE, Failure, root_cause
from wherry.cli.rank import INTERRUPTED
from wherry.cli.run import DEFAULT_PORT, forwarded_flags, given_processes
from wherry.errors import WherryError

_LINE = re.compile(r"^(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d+)\s*$")
_PASSED_ON = ("NCCL_", "GLOO_", "PYTHON", "WHERRY_", "UCX_", "HF_", "TORCH_", "LD_LIBRARY_PATH", "OMP_", "CUDA_HOME")
_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
_SECONDS_FOR_PEERS_TO_REPORT = 3.0
_SECONDS_TO_STOP = 40.0
_SECONDS_TO_END = 10.0


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


def run_on_hosts(arguments: argparse.Namespace) -> int:
    """Start a launcher on every host and wait for all; when one fails, end the others and show its failure last."""
    hosts = select(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    wanted = arguments.num_nodes or arguments.nnodes
    if wanted is not None:
        if not str(wanted).isdigit() or not 0 < int(wanted) <= len(hosts):
            raise WherryError(f"--num_nodes {wanted}: the hostfile leaves {len(hosts)} hosts")
        hosts = hosts[: int(wanted)]
    count = given_processes(arguments)
    if count is not None:
        hosts = [_first_slots(host, count) for host in hosts]
    return Fleet(hosts, arguments).run()


def _first_slots(host: Host, count: str) -> Host:
    if not count.isdigit() or int(count) > len(host.slots):
        raise WherryError(f"--num_gpus {count}: host {host.name} has {len(host.slots)} slots")
    return Host(host.name, host.slots[: int(count)])


@dataclass
class _Node:
    host: Host
    process: subprocess.Popen[str]
    failures: list[Failure] = field(default_factory=list)
    # Why what it says could not be passed on.
    unheard: OSError | None = None


class Fleet:
    """The launchers of all hosts, as children of this process."""

    def __init__(self, hosts: list[Host], arguments: argparse.Namespace) -> None:
        self.hosts = hosts
        self.arguments = arguments
        self.nodes: list[_Node] = []
        self._forwarded = forwarded_flags(arguments)
        self._ended: Queue[_Node] = Queue()

    def run(self) -> int:
        try:
            for index, host in enumerate(self.hosts):
                self._start(index, host)
            return self._wait()
        except KeyboardInterrupt:
            self._tell("stop\n")
            self._wait_until(time.monotonic() + _SECONDS_TO_STOP)
            return INTERRUPTED
        finally:
            self._end_all()

    def _start(self, index: int, host: Host) -> None:
        remote = self._remote_command(index, host)
        command = ["sh", "-c", remote] if self._is_here(host.name) else [*self._ssh(), host.name, remote]
        try:
            # A session of its own: Ctrl-C reaches this process alone, which then asks each host to stop.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise WherryError(f"--ssh: the command {command[0]!r} is not installed here") from error
        node = _Node(host, process)
        self.nodes.append(node)
        threading.Thread(target=self._follow, args=(node,), daemon=True, name=f"host-{host.name}").start()

    def _is_here(self, name: str) -> bool:
        return self.arguments.ssh is None and (name in _LOCAL_NAMES or name == socket.gethostname())

    def _ssh(self) -> list[str]:
        command = shlex.split(self.arguments.ssh or "ssh -o BatchMode=yes -o ConnectTimeout=15")
        return [*command, "-p", str(self.arguments.ssh_port)] if self.arguments.ssh_port else command

    def _remote_command(self, index: int, host: Host) -> str:
        """What the host's shell runs: the same folder, the same Python, the same settings."""
        arguments = self.arguments
        settings = {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.slots))
        flags = [
            *("--follow-stdin", "--num_nodes", str(len(self.hosts)), "--node_rank", str(index)),
            *("--master_addr", arguments.master_addr or self._address_of_first()),
            *("--master_port", str(arguments.master_port or DEFAULT_PORT)),
            *("--nproc", str(len(host.slots))),
            *self._forwarded,
        ]
        command = [sys.executable, "-u", "-m", "wherry", "run", *flags]
        command += [arguments.training_script, *arguments.training_script_args]
        exports = [f"{key}={value}" for key, value in sorted(settings.items())]
        return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join(exports)} {shlex.join(command)}"

    def _address_of_first(self) -> str:
        name = self.hosts[0].name
        return socket.gethostname() if name in _LOCAL_NAMES and len(self.hosts) > 1 else name

    def _follow(self, node: _Node) -> None:
        try:
            self._pass_on(node)
        except OSError as error:
            node.unheard = error
        self._ended.put(node)

    def _pass_on(self, node: _Node) -> None:
        assert node.process.stdout is not None
        for line in node.process.stdout:
            if line.startswith(FAILURE_LINE):
                node.failures.append(Failure.from_line(line))
            else:
                sys.stdout.write(f"[{node.host.name}] {line}")
                sys.stdout.flush()
        node.process.wait()

    def _wait(self) -> int:
        for _ in self.nodes:
            # A wait without end would not let Ctrl-C through on every platform.
            node = self._next_to_end(float("inf"))
            assert node is not None
            if node.unheard is not None:
                raise node.unheard
            if node.process.returncode != 0:
                return self._fail(node)
        return 0

    def _next_to_end(self, deadline: float) -> _Node | None:
        while time.monotonic() < deadline:
            try:
                return self._ended.get(timeout=min(0.2, max(0.0, deadline - time.monotonic())))
            except Empty:
                continue
        return None

    def _wait_until(self, deadline: float) -> None:
        while any(node.process.poll() is None for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _fail(self, first: _Node) -> int:
        if all(failure.of_a_peer for failure in first.failures):
            # It only lost a peer: the one that was lost may still be telling why.
            self._wait_until(time.monotonic() + _SECONDS_FOR_PEERS_TO_REPORT)
        self._end_all()
        failures = [failure for node in self.nodes for failure in node.failures]
        sys.stdout.flush()
        if not failures:
            status = first.process.returncode
            print(f"wherry: the launcher on {first.host.name} ended with status {status}", file=sys.stderr, flush=True)
            return 128 - status if status < 0 else status
        cause = root_cause(failures)
        host = next(node.host.name for node in self.nodes if cause in node.failures)
        told = cause.describe(failures, sum(len(node.host.slots) for node in self.nodes))
        print(f"wherry: on host {host}:\n{told}", file=sys.stderr, flush=True)
        return cause.exit_status

    def _tell(self, word: str) -> None:
        for node in self.nodes:
            if node.process.poll() is None and node.process.stdin is not None:
                try:
                    node.process.stdin.write(word)
                    node.process.stdin.flush()
                except BrokenPipeError:
                    continue

    def _end_all(self) -> None:
        """Close every host's standard input, which ends its launcher; then end what is left here."""
        for node in self.nodes:
            if node.process.stdin is not None and not node.process.stdin.closed:
                try:
                    node.process.stdin.close()
                except BrokenPipeError:
                    continue
        self._wait_until(time.monotonic() + _SECONDS_TO_END)
        for node in self.nodes:
            if node.process.poll() is None:
                os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()
