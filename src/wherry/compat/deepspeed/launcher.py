"""The `deepspeed` command on the alias path: translate its flags, and run `wherry run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from wherry.errors import WherryError
from wherry.parallel.hostfile import read_hostfile, select

ENVIRONMENT_FILE = ".deepspeed_env"

# Flags with a value, by its type; `wherry run` has most under the same name.
_SAME = {"hostfile": str, "include": str, "exclude": str, "num_nodes": int, "num_gpus": int, "master_port": int,
         "master_addr": str, "node_rank": int, "ssh_port": int}  # fmt: skip
_ABSENT: dict[type, Any] = {str: "", int: -1}
_ALSO = {"hostfile": ["-H"], "include": ["-i"], "exclude": ["-e"], "num_gpus": ["--num_accelerators"]}
_SWITCHES = {"module": ["--module"], "no_python": ["--no-python"], "bind_cores_to_rank": ["--numa-binding", "node"]}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Start a script on Wherry, with the flags of DeepSpeed's launcher.",
        allow_abbrev=False,  # Flags of the script would else be read as this command's own, cut short.
    )
    for name, kind in _SAME.items():
        parser.add_argument(f"--{name}", *_ALSO.get(name, ()), type=kind, default=_ABSENT[kind])
    parser.add_argument("--launcher", default="pdsh")
    parser.add_argument("--autotuning", choices=["tune", "run"])
    parser.add_argument("--bind_core_list")
    for name in (*_SWITCHES, "no_local_rank", "no_ssh", "force_multi"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def to_run(arguments: argparse.Namespace) -> list[str]:
    """Translate the flags to the arguments of `wherry run`."""
    if max(arguments.num_nodes, arguments.num_gpus) >= 0 and (arguments.include or arguments.exclude):
        raise WherryError("--num_nodes and --num_gpus cannot be given with --include or --exclude; leave one pair out")
    if arguments.autotuning:
        raise WherryError("--autotuning is not part of Wherry; use `wherry plan` to choose a config")
    if arguments.launcher not in ("pdsh", "ssh"):
        instead = "wherry run --emit slurm" if arguments.launcher == "slurm" else "wherry run --hostfile FILE"
        raise WherryError(f"--launcher {arguments.launcher} is not part of Wherry; use `{instead}`")
    if arguments.bind_core_list:
        print("deepspeed: --bind_core_list has no effect here", file=sys.stderr)
    if arguments.no_ssh and arguments.hostfile:
        _become_one_of_the_hosts(arguments)
    flags = ["--as-deepspeed"]
    for name, kind in _SAME.items():
        if (value := getattr(arguments, name)) != _ABSENT[kind]:
            flags += [f"--{name}", str(value)]
    for name, words in _SWITCHES.items():
        flags += words if getattr(arguments, name) else []
    flags += [] if arguments.no_local_rank else ["--local_rank_arg"]
    return [*flags, arguments.user_script, *arguments.user_args]


def _become_one_of_the_hosts(arguments: argparse.Namespace) -> None:
    """Name this machine by its `--node_rank`: with `--no_ssh` this command has been started on every host."""
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
    arguments.hostfile = ""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Replace this process by its `wherry run`."""
    try:
        words = to_run(build_parser().parse_args(args))
    except WherryError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "wherry", "run", *words])


if __name__ == "__main__":
    main()
