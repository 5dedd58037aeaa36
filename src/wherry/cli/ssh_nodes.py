"""Several machines over ssh: a `wherry run` on each host of a hostfile."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence

from wherry.cli.run import DEFAULT_PORT, given_processes
from wherry.cli.supervise import ForwardedRun, follow, forwarded, passed_on
from wherry.errors import WherryError
from wherry.parallel.hostfile import Host, read_hostfile, select, whole_number

_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
# Reads the settings from its standard input, up to the end of the line, and becomes `wherry run`.
_BEGIN = """\
import json, os, sys
line = b""
while not line.endswith(b"\\n"):
    read = os.read(0, 1)
    if not read:
        sys.exit("wherry: the launcher has gone")
    line += read
os.environ.update(json.loads(line))
os.execv(sys.executable, [sys.executable, "-u", "-m", "wherry", "run", *sys.argv[1:]])
"""


def run_on_hosts(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """A `wherry run` on every host of the hostfile, over ssh."""
    hosts = select(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    settings = passed_on(arguments.forward)
    wanted = arguments.num_nodes or arguments.nnodes
    if wanted is not None:
        if whole_number(str(wanted), len(hosts)) is None:
            raise WherryError(f"--num_nodes {wanted}: the hostfile leaves {len(hosts)} hosts")
        hosts = hosts[: int(wanted)]
    count = given_processes(arguments)
    if count is not None:
        for host in hosts:
            if not count.isdigit() or int(count) > len(host.slots):
                raise WherryError(f"--num_gpus {count}: host {host.name} has {len(host.slots)} slots")
        hosts = [Host(host.name, host.slots[: int(count)]) for host in hosts]
    first = hosts[0].name.rpartition("@")[2]
    if first in _LOCAL_NAMES and len(hosts) > 1:
        first = socket.gethostname()
    meeting = ["--master_addr", arguments.master_addr or first]
    meeting += ["--master_port", str(arguments.master_port or DEFAULT_PORT)]
    reach = shlex.split(arguments.ssh or "ssh -o BatchMode=yes -o ConnectTimeout=15")
    reach += ["-p", str(arguments.ssh_port)] if arguments.ssh_port else []
    nodes: list[ForwardedRun] = []
    try:
        for index, host in enumerate(hosts):
            words = forwarded([*flags, *meeting], arguments, index, len(hosts), len(host.slots))
            here = arguments.ssh is None and (host.name in _LOCAL_NAMES or host.name == socket.gethostname())
            nodes.append(_start(host, ["sh", "-c"] if here else [*reach, host.name], words, settings))
    except BaseException:
        for node in nodes:
            node.kill()
        raise
    return follow(nodes, sum(len(host.slots) for host in hosts))


def _start(host: Host, reach: Sequence[str], words: Sequence[str], settings: dict[str, str]) -> ForwardedRun:
    """In the same folder there as here, by the same Python, under the same settings."""
    settings = settings | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
    command = shlex.join(["exec", sys.executable, "-I", "-S", "-c", _BEGIN, *words])
    command = f"cd {shlex.quote(os.getcwd())} && {command}"
    try:
        return ForwardedRun(host.name, f"[{host.name}] ", [*reach, command], first=json.dumps(settings) + "\n")
    except FileNotFoundError as error:
        raise WherryError(f"--ssh: the command {reach[0]!r} is not installed here") from error
