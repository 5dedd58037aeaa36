"""The `wherry` command. Each subcommand is imported when it is asked for, so that `wherry --help` is instant."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

INTERRUPTED = 130
USER_ERROR = 2

# Their flags are not all ours to declare (torchrun's, a script's own), so they parse their arguments themselves.
_OWN_PARSERS = {
    "run": ("wherry.cli.run", "start a script on several processes, GPUs or machines"),
    "train": ("wherry.cli.train", "pre-train a GPT-2 here: the quickest way to see Wherry work"),
    "plan": ("wherry.cli.plan", "say what training keeps in memory and moves, before you run it"),
    "bench": ("wherry.cli.bench", "measure the host optimizers or the disk"),
    "export": ("wherry.cli.checkpoint:export", "write a checkpoint's weights as safetensors that transformers loads"),
    "inspect": ("wherry.cli.checkpoint:inspect", "say what is inside a checkpoint, and whether it is whole"),
    "import-deepspeed": ("wherry.cli.checkpoint:import_deepspeed", "turn a checkpoint of DeepSpeed's into one of ours"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A user's mistake prints its message alone and returns 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    from wherry.observe import stdout

    try:
        try:
            return _answer(arguments)
        finally:
            stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        stdout.give_up()
        return stdout.CUT_OFF
    except OSError as error:
        if not stdout.is_lost():
            raise
        stdout.give_up()
        print(f"wherry: standard output cannot be written ({error.strerror})", file=sys.stderr)
        return USER_ERROR


def _answer(arguments: list[str]) -> int:
    from wherry.errors import WherryError

    try:
        return _dispatch(arguments)
    except WherryError as error:
        print(f"wherry: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in _OWN_PARSERS:
        module, _, function = _OWN_PARSERS[arguments[0]][0].partition(":")
        command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function or "main")
        return command(arguments[1:])
    parsed = build_parser(arguments[0] if arguments else "").parse_args(arguments)
    return int(parsed.function(parsed) or 0)


def build_parser(chosen: str = "") -> argparse.ArgumentParser:
    """The parser of all commands. Only the chosen command's own flags are filled in."""
    import wherry

    parser = argparse.ArgumentParser(
        prog="wherry",
        description="Train models larger than the memory of the GPU, or of the machine.",
        epilog="`wherry COMMAND --help` tells more of one command.",
    )
    parser.add_argument("--version", action="version", version=f"wherry {wherry.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, meaning) in _OWN_PARSERS.items():
        commands.add_parser(name, help=meaning, add_help=False)
    if chosen == "config":
        importlib.import_module("wherry.cli.config").add_parser(commands)
    else:
        commands.add_parser("config", help="explain, check and describe the keys of a config")
    meaning = "check this machine, and say what to do about what is amiss"
    doctor = commands.add_parser("doctor", help=meaning, description=f"{meaning.capitalize()}.")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(function=_doctor)
    version = commands.add_parser("version", help="print the versions of Wherry, Python and torch")
    version.set_defaults(function=_version)
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    doctor: Callable[..., int] = importlib.import_module("wherry.cli.doctor").main
    return doctor(as_json=arguments.json)


def _version(arguments: argparse.Namespace) -> int:
    import platform
    from importlib import metadata

    import wherry

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    print(f"wherry {wherry.__version__}, Python {platform.python_version()}, torch {torch}")
    return 0
