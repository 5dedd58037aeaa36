"""The `wherry` command. Each subcommand is imported when it is asked for, so that `wherry --help` is instant."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence

INTERRUPTED = 130
USER_ERROR = 2

COMMANDS = {
    "run": ("wherry.cli.run", "start a script on several processes, GPUs or machines"),
    "train": ("wherry.cli.train", "pre-train a GPT-2 here: the quickest way to see Wherry work"),
    "finetune": ("wherry.cli.finetune", "train a published model further on your own data, wherever it fits"),
    "generate": ("wherry.cli.generate", "go on from a prompt, with a run's model or any that transformers loads"),
    "plan": ("wherry.cli.plan", "say what training keeps in memory and moves, before you run it"),
    "bench": ("wherry.cli.bench", "measure the host optimizers or the disk"),
    "export": ("wherry.cli.checkpoint:export", "write a checkpoint's weights as safetensors that transformers loads"),
    "inspect": ("wherry.cli.checkpoint:inspect", "say what is inside a checkpoint, and whether it is whole"),
    "import-deepspeed": ("wherry.cli.checkpoint:import_deepspeed", "turn a checkpoint of DeepSpeed's into one of ours"),
    "config": ("wherry.cli.config", "explain, check and describe the keys of a config"),
    "doctor": ("wherry.cli.doctor", "check this machine, and say what to do about what is amiss"),
    "version": ("wherry.cli:version", "print the versions of Wherry, Python and torch"),
}
"""Where each command is, and what it is for."""


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


def check_word(arguments: Sequence[str], commands: Iterable[str], of: str = "") -> None:
    """Raise, with the one that is meant, if the first word names none of the commands of `of`."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        from wherry.config.problems import did_you_mean
        from wherry.errors import WherryError, one_line

        word = one_line(arguments[0])
        raise WherryError(
            f'{of}there is no command "{word}"{did_you_mean(word, commands) or "; there are " + ", ".join(commands)}'
        )


def _dispatch(arguments: list[str]) -> int:
    """Each command parses its own arguments: the flags of some are torchrun's or a script's."""
    if arguments and arguments[0] in COMMANDS:
        module, _, function = COMMANDS[arguments[0]][0].partition(":")
        command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function or "main")
        return command(arguments[1:])
    check_word(arguments, COMMANDS)
    import wherry

    parser = argparse.ArgumentParser(
        prog="wherry",
        description="Train models larger than the memory of the GPU, or of the machine.",
        epilog="`wherry COMMAND --help` tells more of one command.",
    )
    parser.add_argument("--version", action="version", version=f"wherry {wherry.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning)
    parser.parse_args(arguments)
    parser.error("expected the command first")


def version(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="wherry version", description="Print the versions that are in use.")
    parser.parse_args(argv)
    import platform
    from importlib import metadata

    import wherry

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    print(f"wherry {wherry.__version__}, Python {platform.python_version()}, torch {torch}")
    return 0
