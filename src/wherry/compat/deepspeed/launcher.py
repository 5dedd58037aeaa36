"""The `deepspeed` command on the alias path: its flags, handed to `wherry run`."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from wherry.errors import WherryError
from wherry.observe.log import logger
from wherry.parallel.hostfile import Host, filtered, read_hostfile, select

ENVIRONMENT_FILE = ".deepspeed_env"

# Flags with a value that `wherry run` has under the same name.
_SAME = ("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_port", "master_addr", "node_rank",
         "ssh_port")  # fmt: skip
_REFUSED = {
    "autotuning": "use `wherry plan` to choose a config",
    "elastic_training": "give --nnodes MIN:MAX to `wherry run`",
    "venv_script": "start `wherry run` from the environment itself",
}
_NO_EFFECT = ("launcher_args", "bind_core_list", "save_pid")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Start a script on Wherry, with the flags of DeepSpeed's launcher.",
        allow_abbrev=False,  # or what follows the script might be taken for a flag cut short
    )
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--master_port", type=int)
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--node_rank", type=int, default=-1)
    parser.add_argument("--launcher", default="pdsh")
    parser.add_argument("--launcher_args", default="")
    parser.add_argument("--ssh_port", type=int)
    parser.add_argument("--log_level", default="info")
    parser.add_argument("--bind_core_list")
    parser.add_argument("--venv_script")
    parser.add_argument("--autotuning", default="", choices=["", "tune", "run"])
    parser.add_argument("--min_elastic_nodes", type=int, default=-1)
    parser.add_argument("--max_elastic_nodes", type=int, default=-1)
    parser.add_argument("--enable_each_rank_log")
    for name in ("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
                 "elastic_training", "bind_cores_to_rank"):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


class BadArguments(WherryError, ValueError):
    """Arguments of the launcher, or lines of a hostfile, that contradict themselves or say nothing."""


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    return build_parser().parse_args(args)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Hosts and their numbers of slots; None, and a line, where there is no such file."""
    if not os.path.isfile(hostfile_path):
        logger.warning("there is no hostfile %s, so this machine is used", hostfile_path)
        return None
    with open(hostfile_path, encoding="utf-8") as file:
        return _parse_hostfile(file)


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    """Of a hostfile in memory; a command reads files by `wherry.parallel.hostfile`, which is stricter."""
    found: dict[str, int] = {}
    for line in map(str.strip, hostfile_lines):
        if not line or line.startswith("#"):
            continue
        words = re.match(r"(\S+)\s+slots=(\d+)", line)
        if words is None:
            raise BadArguments(f"hostfile: expected `name slots=N`, got {line!r}")
        if words[1] in found:
            raise BadArguments(f"hostfile: {words[1]} stands in it twice; keep one line of it")
        found[words[1]] = int(words[2])
    if not found:
        raise BadArguments("hostfile: it names no host; expected lines of `name slots=N`")
    return found


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The hosts and slots that are left after one of the two."""
    hosts = [Host(name, tuple(slots)) for name, slots in host_info.items()]
    try:
        left = filtered(hosts, include_str, exclude_str)
    except WherryError as error:
        raise BadArguments(str(error)) from None
    return {host.name: list(host.slots) for host in left}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    return parse_resource_filter({name: range(slots) for name, slots in resource_pool.items()}, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def to_run(arguments: argparse.Namespace) -> list[str]:
    """The arguments of `wherry run` that mean the same."""
    if max(arguments.num_nodes, arguments.num_gpus) >= 0 and (arguments.include or arguments.exclude):
        raise BadArguments("--num_nodes and --num_gpus cannot be given with --include or --exclude; leave one pair out")
    for name, instead in _REFUSED.items():
        if getattr(arguments, name):
            raise WherryError(f"--{name} is not part of Wherry; {instead}")
    if arguments.launcher not in ("pdsh", "ssh"):
        instead = "wherry run --emit slurm" if arguments.launcher == "slurm" else "wherry run --hostfile FILE"
        raise WherryError(f"--launcher {arguments.launcher} is not part of Wherry; use `{instead}`")
    for name in _NO_EFFECT:
        if getattr(arguments, name):
            print(f"deepspeed: --{name} has no effect here", file=sys.stderr)
    if arguments.no_ssh and arguments.hostfile:
        _become_one_of_the_hosts(arguments)
    flags = ["--as-deepspeed"]
    for name in _SAME:
        value = getattr(arguments, name)
        if value not in (None, "", -1):
            flags += [f"--{name}", str(value)]
    if arguments.module:
        flags.append("--module")
    if arguments.no_python:
        flags.append("--no-python")
    if not arguments.no_local_rank:
        flags.append("--local_rank_arg")
    if arguments.bind_cores_to_rank:
        flags += ["--numa-binding", "node"]
    if arguments.enable_each_rank_log:
        flags += ["--log-dir", arguments.enable_each_rank_log, "--redirects", "3"]
    return [*flags, arguments.user_script, *arguments.user_args]


def _become_one_of_the_hosts(arguments: argparse.Namespace) -> None:
    """With `--no_ssh` somebody has started this command on every host: this is the machine of that `--node_rank`."""
    hosts = select(read_hostfile(arguments.hostfile), arguments.include, arguments.exclude)
    if not 0 <= arguments.node_rank < len(hosts):
        raise WherryError(
            f"--no_ssh: the hostfile has {len(hosts)} machines; give --node_rank, from 0 to {len(hosts) - 1}, to say "
            "which of them this one is"
        )
    slots = hosts[arguments.node_rank].slots
    if arguments.include or arguments.exclude:
        arguments.include, arguments.exclude = f"localhost:{','.join(map(str, slots))}", ""
    elif arguments.num_gpus == -1:
        arguments.num_gpus = len(slots)
    arguments.num_nodes = len(hosts)
    arguments.master_addr = arguments.master_addr or hosts[0].name
    arguments.hostfile = None


def main(args: Sequence[str] | None = None) -> int:
    """Become the `wherry run` that means the same."""
    words = to_run(parse_args(args))
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "wherry", "run", *words])


def command() -> int:
    """The `deepspeed` command."""
    try:
        return main()
    except WherryError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(command())
