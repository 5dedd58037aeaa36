"""The `deepspeed` command on the alias path: translate its flags, and run `wherry run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from wherry.errors import WherryError
from wherry.parallel.hostfile import read_hostfile, select

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
        allow_abbrev=False,  # Flags of the script would else be read as this command's own, cut short.
    )
    parser.add_argument("-H", "--hostfile", default="")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--launcher", default="pdsh")
    parser.add_argument("--log_level", default="info")
    parser.add_argument("--autotuning", default="", choices=["", "tune", "run"])
    parser.add_argument("-q", "--quiet", action="store_true")
    for name in ("num_nodes", "master_port", "node_rank", "ssh_port", "min_elastic_nodes", "max_elastic_nodes"):
        parser.add_argument(f"--{name}", type=int, default=-1)
    for name in ("master_addr", "launcher_args", "bind_core_list", "venv_script", "enable_each_rank_log"):
        parser.add_argument(f"--{name}", default="")
    for name in ("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
                 "elastic_training", "bind_cores_to_rank"):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def to_run(arguments: argparse.Namespace) -> list[str]:
    """Translate the flags to the arguments of `wherry run`."""
    if max(arguments.num_nodes, arguments.num_gpus) >= 0 and (arguments.include or arguments.exclude):
        raise WherryError("--num_nodes and --num_gpus cannot be given with --include or --exclude; leave one pair out")
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
        if value not in ("", -1):
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


def main(args: Sequence[str] | None = None) -> int:
    """Replace this process by its `wherry run`."""
    words = to_run(build_parser().parse_args(args))
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "wherry", "run", *words])


def command() -> int:
    """Run the `deepspeed` command."""
    try:
        return main()
    except WherryError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(command())
