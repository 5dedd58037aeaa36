"""`wherry run`: torchrun with the flags of DeepSpeed's launcher beside its own, and hosts reached over ssh or Ray.

Ranks of this machine are started by torch's elastic agent. When one dies all end, and its traceback comes last.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Sequence

from wherry.cli.supervise import launch
from wherry.config.problems import Parser
from wherry.errors import WherryError
from wherry.parallel.hostfile import MOST_SLOTS, whole_number

DEFAULT_PORT = 29500
_MOST_MACHINES = 65_536
_OURS_TO_DEFAULT = ("nproc_per_node", "nnodes", "rdzv_backend", "node_rank", "master_addr")
_EPILOG = """
on this machine:         wherry run --num_gpus 2 train.py --my-flag 1      (without a GPU: two processes)
on several, over ssh:    wherry run --hostfile hosts train.py              (lines of `name slots=8`)
on a Ray cluster:        wherry run --on ray --num_nodes 2 --num_gpus 8 train.py   (after `pip install wherry[ray]`)
on several, by hand:     wherry run --num_nodes 2 --node_rank 0 --master_addr head train.py   (and 1 on the other)
a DeepSpeed script:      wherry run --as-deepspeed --num_gpus 2 train.py --deepspeed_config config.json
under a scheduler:       wherry run --num_nodes 2 --num_gpus 8 --emit slurm train.py > job.sh
"""


def build_parser() -> argparse.ArgumentParser:
    """torchrun's own parser, with our flags added. A flag that was not given is None, whatever torchrun's default."""
    from torch.distributed.run import get_args_parser

    parser = Parser(
        prog="wherry run",
        usage="%(prog)s [FLAG ...] SCRIPT [ARGUMENT ...]",
        description="Start a script on several processes, GPUs or machines. Every flag of torchrun is accepted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[get_args_parser()],
        add_help=False,  # torchrun's is among its flags
    )
    for action in parser._actions:
        if action.dest in _OURS_TO_DEFAULT and f"PET_{action.dest.upper()}" not in os.environ:
            action.default = None
    add_launch_flags(parser)
    group = parser.add_argument_group("several machines")
    group.add_argument("--num_nodes", "--num-nodes", type=int, help="number of machines")
    group.add_argument("-H", "--hostfile", help="file with a line `name slots=N` for each machine")
    group.add_argument("-i", "--include", default="", help="use these only: host1@host2:0,1")
    group.add_argument("-e", "--exclude", default="", help="use all but these: host3@host2:3")
    group.add_argument("--ssh", help="the command that reaches a host (default: ssh -o BatchMode=yes)")
    group.add_argument("--ssh_port", "--ssh-port", type=int, help="ssh's port")
    group.add_argument(
        "--forward",
        action="append",
        default=[],
        metavar="NAME",
        help="hand this environment variable to the other machines too; may be repeated. Settings such as NCCL_* and "
        "HF_* are handed on without it, but nothing that is named like a secret, such as HF_TOKEN",
    )
    group.add_argument("--on", choices=("ray",), help="start it on the Ray cluster of this machine, or of RAY_ADDRESS")
    group.add_argument("--emit", choices=("slurm", "k8s", "sky"), help="print the scheduler's job file, start nothing")
    group.add_argument("--install", metavar="PATH_OR_URL", help="with --emit: where pip finds Wherry on those machines")
    parser.add_argument(
        "--as-deepspeed", action="store_true", help="let the script's `import deepspeed` give Wherry, on every rank"
    )
    parser.add_argument(
        "--profile", type=steps, metavar="STEPS", help="write where time and memory go in these steps, like 5 or 5-7"
    )
    parser.add_argument("--follow-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def steps(text: str) -> str:
    """For argparse: `5`, or `5-7`."""
    from wherry.config.fields import to_steps

    try:
        return to_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes of this machine")
    group.add_argument("--num_gpus", "--num-gpus", "--num_accelerators", type=int, help="GPUs; without any, processes")
    group.add_argument("--nproc", type=int, help="processes, the same as --nproc-per-node")
    group.add_argument("--local_rank_arg", "--local-rank-arg", action="store_true", help="pass --local_rank=N too")
    group.add_argument("--no_local_rank", "--no-local-rank", action="store_true", help="do not pass it (the default)")


def parse_up_to_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags with the script's name, and what follows it, unread: argparse would look for our flags in there too."""
    flags = parser._option_string_actions
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        # A flag may be cut short, as argparse allows; one with = or letters behind it brings its value along.
        found = flags.get(argv[at]) or next((flags[name] for name in flags if name.startswith(argv[at])), None)
        at += 1 if found is None or found.nargs == 0 else 2
    at += at < len(argv) and argv[at] == "--"
    return parser.parse_args(argv[: at + 1]), list(argv[at + 1 :])


def main(argv: list[str]) -> int:
    arguments, words = parse_up_to_script(build_parser(), argv)
    arguments.training_script_args = words
    flags = [word for word in argv[: len(argv) - len(words) - 1] if word != "--"]
    nodes = _number_of_nodes(arguments)
    given_processes(arguments)
    for flag, port, least in (("--ssh_port", arguments.ssh_port, 1), ("--master_port", arguments.master_port, 0)):
        if port is not None and not least <= port < 1 << 16:
            raise WherryError(f"{flag}: expected a port from {least} to {(1 << 16) - 1}, got {port}")
    if arguments.profile and arguments.emit:
        raise WherryError(
            f"--emit {arguments.emit}: --profile has no place in a job file, which starts torchrun; ask for it in the "
            f'config: "wherry": {{"profile": {{"steps": "{arguments.profile}"}}}}'
        )
    if arguments.emit:
        from wherry.cli.emit import Job, emit

        sys.stdout.write(emit(arguments.emit, Job.of(arguments, nodes)))
        return 0
    if arguments.install:
        raise WherryError(f"--install {arguments.install}: it goes with --emit; ranks run the Wherry that starts them")
    # A run that another machine has asked for has the flags of that one, and is told its own part behind them.
    if arguments.on and not arguments.follow_stdin:
        from wherry.cli.ray_nodes import run_on_ray

        return run_on_ray(arguments, flags)
    if arguments.hostfile and not arguments.follow_stdin:
        from wherry.cli.ssh_nodes import run_on_hosts

        return run_on_hosts(arguments, flags)
    if (arguments.include or arguments.exclude) and not arguments.follow_stdin:
        _restrict_this_machine(arguments)
    if arguments.as_deepspeed:
        from wherry.compat.deepspeed import environment

        os.environ.update(environment())
    if arguments.profile:
        os.environ["WHERRY_PROFILE"] = arguments.profile
        quiet_profiler()
    resolve(arguments, nodes)
    is_script = not (arguments.module or arguments.no_python or arguments.run_path)
    if is_script and os.path.isdir(arguments.training_script):
        raise WherryError(f"run: {arguments.training_script}: this is a folder; name the script in it")
    if is_script and not os.path.exists(arguments.training_script):
        raise WherryError(f"run: {arguments.training_script}: there is no such script; a module goes with --module")
    if arguments.follow_stdin:
        # Whoever has started this may have it ignored or blocked, as Ray has.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=_follow_stdin, daemon=True, name="follow-stdin").start()
    return launch(arguments, report=arguments.follow_stdin)


def quiet_profiler() -> None:
    """Ranks that are started from here print no lines of torch's profiler about itself."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def _follow_stdin() -> None:
    """Live as long as the launcher on the other machine: a word of it is Ctrl-C, and its silence is the end."""
    said = sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGINT if said else signal.SIGTERM)


def _number_of_nodes(arguments: argparse.Namespace) -> str:
    """MIN:MAX as torchrun has it."""
    given = [str(value) for value in (arguments.num_nodes, arguments.nnodes) if value is not None]
    if len(set(given)) > 1:
        raise WherryError(f"--num_nodes {given[0]} and --nnodes {given[1]} differ; give one of them")
    found = given[0] if given else "1"
    parts = found.split(":")
    if len(parts) > 2 or not all(whole_number(part, _MOST_MACHINES) for part in parts):
        raise WherryError(
            f"--nnodes: expected a number of machines up to {_MOST_MACHINES:,}, or MIN:MAX, got {found!r}"
        )
    return found


def given_processes(arguments: argparse.Namespace) -> str | None:
    """How many ranks a machine is asked to have: a number, a word that torchrun knows, or None."""
    named = {"--num_gpus": arguments.num_gpus, "--nproc": arguments.nproc, "--nproc-per-node": arguments.nproc_per_node}
    given = {flag: str(value) for flag, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{flag} {value}" for flag, value in given.items())
        raise WherryError(f"{both} differ; give one of them")
    if not given:
        return None
    flag, value = next(iter(given.items()))
    # torchrun knows some words as well.
    if not re.fullmatch("[a-z]+", value) and whole_number(value, MOST_SLOTS) is None:
        raise WherryError(f"{flag}: expected a number from 1 to {MOST_SLOTS}, got {value!r}")
    return value


def number_of_processes(arguments: argparse.Namespace) -> str:
    """How many ranks this machine gets; by default one for each GPU, or one."""
    devices = device_count()
    if arguments.num_gpus is not None and 0 < devices < arguments.num_gpus:
        raise WherryError(f"--num_gpus {arguments.num_gpus}: this machine has {devices}; give at most that many")
    return given_processes(arguments) or str(max(1, devices))


def device_count() -> int:
    import torch

    from wherry.tiers.streams import accelerator

    return torch.accelerator.device_count() if accelerator() is not None else 0


def resolve(arguments: argparse.Namespace, nodes: str) -> None:
    """Turn our flags into torchrun's: how many ranks, and where they meet."""
    from wherry.cli.rendezvous import BACKEND

    arguments.nproc_per_node = number_of_processes(arguments)
    arguments.nnodes = nodes
    most = int(nodes.split(":")[-1])
    number = arguments.node_rank
    if number is not None and not 0 <= number < most:
        raise WherryError(f"--node_rank: expected 0 to {most - 1} of --num_nodes {nodes}, got {number}")
    if most == 1:
        _stay_on_loopback()
    if arguments.rdzv_backend is None:
        arguments.rdzv_backend = BACKEND
        if most == 1:
            # The machine's own name may not resolve; one machine needs none.
            arguments.rdzv_endpoint = arguments.rdzv_endpoint or "127.0.0.1:0"
            number = 0
        elif not arguments.rdzv_endpoint and not arguments.master_addr:
            raise WherryError(
                f"--num_nodes {nodes}: the machines need a place to meet; give --master_addr NAME on each of them, or "
                "--hostfile FILE to start them all from here"
            )
        elif not arguments.rdzv_endpoint:
            arguments.rdzv_endpoint = f"{arguments.master_addr}:{arguments.master_port or DEFAULT_PORT}"
        if arguments.rdzv_id == "none":
            arguments.rdzv_id = uuid.uuid4().hex if most == 1 else "wherry"
        if number is not None:
            # Where torch puts it for its own rendezvous of machines that know their numbers.
            arguments.rdzv_conf = ",".join(filter(None, (arguments.rdzv_conf, f"rank={number}")))
    arguments.master_addr = arguments.master_addr or "127.0.0.1"
    arguments.master_port = arguments.master_port or DEFAULT_PORT
    arguments.node_rank = arguments.node_rank or 0
    # Each rank has its part of the cores, unless the environment says otherwise.
    if arguments.nproc_per_node.isdigit():
        share = max(1, usable_cores() // int(arguments.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(share))


def _stay_on_loopback() -> None:
    """What ranks of one machine send each other stays inside it, and they listen nowhere else."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, places in interfaces if any(place.address == "127.0.0.1" for place in places)), None)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL takes what begins so, unless told so


def usable_cores() -> int:
    """Physical cores that this process may run on."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    logical = psutil.cpu_count() or allowed
    physical = psutil.cpu_count(logical=False) or logical
    return max(1, allowed * physical // logical)


def _restrict_this_machine(arguments: argparse.Namespace) -> None:
    """`--include localhost:0,2` without a hostfile: these devices of this machine."""
    from wherry.parallel.hostfile import Host, select

    local = Host("localhost", tuple(range(max(1, device_count(), arguments.num_gpus or 0, arguments.nproc or 0))))
    chosen = select([local], arguments.include, arguments.exclude)[0]
    arguments.num_gpus = arguments.nproc = None
    arguments.nproc_per_node = str(len(chosen.slots))
    if device_count():
        # Slots are counted among the devices in sight, which may be some of the machine's.
        names = dict(enumerate(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names.get(slot, str(slot)) for slot in chosen.slots)
