"""`wherry plan`: what training keeps in memory, moves and takes, before anything runs."""

from __future__ import annotations

import argparse

from wherry.config.problems import Parser
from wherry.errors import WherryError
from wherry.plan.model_states import STATE_WORDS, WORKING_BYTES
from wherry.sources import SHAPES

# What goes with each kind of plan, besides --json.
_FLAGS = {
    "no MODEL": "params infinity",
    "MODEL": "online config set recompute dry_run auto html tensor_parallel pipeline_parallel ranks nodes sequence "
    "machine again gpu_memory host_memory disk gpus pcie stream disk_bandwidth",
    "--auto": "output disk_path",
    "--dry-run": "rank stage",
    "--params": "params ranks device_memory precision optimizer",
    "--infinity": "infinity layers hidden heads batch sequence interval gpus_per_node nodes peak efficiency",
}


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.machine == "list":
        from wherry.cli.plan_tables import machines

        return machines(arguments)
    if arguments.model is not None:
        chosen = {"MODEL": True, "--auto": arguments.auto, "--dry-run": arguments.dry_run}
        _check_flags(arguments, *(kind for kind, wanted in chosen.items() if wanted))
        from wherry.cli import plan_model

        return plan_model.main(arguments)
    from wherry.cli import plan_tables

    if arguments.infinity:
        _check_flags(arguments, "--infinity")
        return plan_tables.by_shape(arguments)
    if arguments.params is None:
        raise WherryError("plan: give a MODEL, like gpt2-1.5b, or --params COUNT, like --params 7.5e9, or --infinity")
    _check_flags(arguments, "--params")
    return plan_tables.by_params(arguments)


def _check_flags(arguments: argparse.Namespace, *kinds: str) -> None:
    fitting = " ".join(_FLAGS[kind] for kind in kinds).split()
    for needed, flags in _FLAGS.items():
        for name in flags.split():
            if name not in fitting and getattr(arguments, name) is not None:
                raise WherryError(f"{flag(name)}: goes with {needed}; give {needed}, or leave it out")


def flag(name: str) -> str:
    return "-o" if name == "output" else f"--{name.replace('_', '-')}"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="wherry plan",
        # Of forty flags the usual way to print them fills a screen, before any mistake too.
        usage="wherry plan MODEL [flags]\n       wherry plan --params COUNT [flags]\n"
        "       wherry plan --infinity [flags]\n       wherry plan --machine list",
        description="Say what training keeps in memory, moves and takes, before you run it.",
        epilog="examples: wherry plan gpt2-1.5b --config ds.json --machine 4090; wherry plan gpt2-1.5b --auto -o "
        "config.json; wherry plan --params 7.5e9 --ranks 1,4,16,64 --device-memory 32GB. The exit status is 1 where "
        "what was asked for does not fit, with --auto or --params where nothing does, and 2 after a mistake.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help=f"a preset ({', '.join(SHAPES)}), a Hugging Face config.json or its folder, a name on the hub "
        "(owner/name) whose config is here or, with --online, fetched, or module:callable, which returns a model, or a "
        "model and the inputs of a micro-batch",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--params", metavar="COUNT", help="parameters, like 7.5e9 or 7.5B; several with commas")
    what.add_argument(
        "--infinity", action="store_true", default=None, help="GPT-like models of 0.1T to 100T parameters, by shape"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.add_argument("--ranks", metavar="N", help="ranks; with --params several, with commas")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes (with --infinity 32)")
    _add_model_flags(parser)
    by_params = parser.add_argument_group("with --params: parameters, gradients and optimizer state of a rank")
    by_params.add_argument("--device-memory", metavar="SIZE", help="mark what fits in this, like 32GB")
    by_params.add_argument("--precision", choices=tuple(WORKING_BYTES), help="of the working weights (default bf16)")
    by_params.add_argument("--optimizer", choices=tuple(STATE_WORDS), help="whose state to count (default adamw)")
    by_shape = parser.add_argument_group("with --infinity: states, activations and bandwidth by the model's shape")
    by_shape.add_argument("--layers", type=int, metavar="N", help="one model of this shape instead of the five")
    by_shape.add_argument("--hidden", metavar="N", help="its hidden size, like 10240 or 10K (K = 1024)")
    by_shape.add_argument("--heads", type=int, metavar="N", help="its attention heads")
    by_shape.add_argument("--batch", type=int, metavar="N", help="samples of a node at a time (default 32)")
    by_shape.add_argument("--interval", type=int, metavar="N", help="layers for each checkpoint (default 1)")
    by_shape.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node (default 16)")
    by_shape.add_argument("--peak", metavar="FLOPS", help="operations a second of a GPU (default 70e12)")
    by_shape.add_argument("--efficiency", metavar="X,...", help="parts of the peak to reach (default 0.5,0.9)")
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("with MODEL: will it fit, what limits it, how long does a step take")
    model.add_argument("--config", metavar="FILE", help="the config to judge; without one, its defaults")
    model.add_argument("--set", metavar="KEY=VALUE", action="append", help="change a key of the config; repeatable")
    model.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="ranks that cut each matrix of the model among them"
    )
    model.add_argument("--pipeline-parallel", type=int, metavar="N", help="stages that the model's layers are cut into")
    model.add_argument(
        "--online", action="store_true", default=None, help="fetch a config from the hub, or what a config names"
    )
    model.add_argument("--recompute", action="store_true", default=None, help="units recompute their activations")
    model.add_argument("--auto", action="store_true", default=None, help="choose stage, tiers and batch sizes")
    model.add_argument("-o", "--output", metavar="FILE", help="with --auto: write the config here, with reasons")
    model.add_argument("--disk-path", metavar="DIR", help="with --auto: a folder for what may rest on disk")
    model.add_argument("--html", metavar="FILE", help="write the answer as a page")
    model.add_argument(
        "--dry-run", action="store_true", default=None, help="run the engine itself for one rank, on fake tensors"
    )
    model.add_argument("--rank", type=int, metavar="N", help="with --dry-run: which data-parallel rank (default 0)")
    model.add_argument("--stage", type=int, metavar="N", help="with --dry-run: which stage of a pipeline (default 0)")
    machine = parser.add_argument_group("with MODEL: the machine; without these, this one, which is measured once")
    machine.add_argument(
        "--machine", metavar="NAME", help="a kind of machine, like 4090, l4 or h100; `list` shows them"
    )
    machine.add_argument(
        "--again", action="store_true", default=None, help="measure this machine anew, as after it was busy"
    )
    machine.add_argument("--gpu-memory", metavar="SIZE", help="of each GPU, like 24GB")
    machine.add_argument("--host-memory", metavar="SIZE", help="of each node")
    machine.add_argument("--disk", metavar="SIZE", help="free, of each node")
    machine.add_argument("--gpus", type=int, metavar="N", help="GPUs of each node; 0 to train on the host")
    machine.add_argument("--pcie", metavar="RATE", help="bytes a second between host and a GPU, like 24GB")
    machine.add_argument("--stream", metavar="RATE", help="bytes a second of a node's memory, like 200GB")
    machine.add_argument("--disk-bandwidth", metavar="RATE", help="bytes a second of a node's disks, like 10GB")
