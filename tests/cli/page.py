"""The page docs/commands.md, from the commands' own parsers: `python -m tests.cli.page > docs/commands.md`."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from unittest import mock

from wherry.cli import COMMANDS, main

_INTRO = """# Commands

This page is written by `python -m tests.cli.page` from the parsers of the commands.

`wherry COMMAND --help` says the same on a terminal, and `python -m wherry` is `wherry`. The exit status is 0 where all
went well, 1 where the answer is no (a model that does not fit, a checkpoint that is damaged, a rank that failed), 2
after a mistake, which is told in a few words and without a traceback, and 130 after Ctrl-C.
"""
# Of `wherry run` only these: it accepts each flag of torchrun too.
_OURS = {"run": ("processes of this machine", "several machines", "--as-deepspeed")}


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser that a command makes, caught as it is about to read its arguments."""
    made: list[argparse.ArgumentParser] = []

    def catch(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        made.append(parser)
        raise SystemExit

    # `bench` shows its help where it is given nothing.
    ways = dict.fromkeys(("parse_args", "parse_intermixed_args", "print_help"), catch)
    with mock.patch.multiple(argparse.ArgumentParser, **ways), contextlib.suppress(SystemExit):
        main([command])
    return made[0]


def markdown() -> str:
    """The page docs/commands.md."""
    parts = [_INTRO]
    for command, (_, meaning) in COMMANDS.items():
        parts += _sections(command, parser_of(command), meaning, depth=2)
    return "\n".join(parts)


def _sections(command: str, parser: argparse.ArgumentParser, meaning: str, depth: int) -> Iterator[str]:
    name = command.split()[0]
    inner = next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
    words = [_value(action) for action in parser._get_positional_actions() if action is not inner]
    if command == "run":
        words = ["[FLAG ...]", "SCRIPT", "[ARGUMENT ...]"]
    about = re.sub(r"^`wherry [\w ]+`: ", "", parser.description or meaning)
    lines = [f"{'#' * depth} {command}", "", f"`{' '.join(['wherry', command, *words])}`", ""]
    lines += [f"{_text(about[:1].upper() + about[1:]).rstrip('.')}.", ""]
    if inner is not None:
        helps = {action.dest: action.help or "" for action in inner._choices_actions}
        yield "\n".join(lines)
        for sub, its in inner.choices.items():
            yield from _sections(f"{command} {sub}", its, helps.get(sub, ""), depth + 1)
        return
    rows = []
    for group in parser._action_groups:
        for action in group._group_actions:
            ours = _OURS.get(name)
            chosen = ours is None or group.title in ours or set(action.option_strings) & set(ours)
            if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS or not chosen:
                continue
            # The same flag with underscores is understood, and not told of.
            spelled = {name.replace("_", "-"): name for name in reversed(action.option_strings)}
            names = ", ".join(f"`{name}`" for name in reversed(spelled.values())) or f"`{_value(action)}`"
            value = f" `{_value(action)}`" if action.option_strings and action.nargs != 0 else ""
            meaning = argparse.HelpFormatter(parser.prog)._expand_help(action) if action.help else ""
            rows.append(f"| {names}{value} | {_text(meaning)} |")
    if rows:
        lines += ["| flag | meaning |", "|---|---|", *rows, ""]
    yield "\n".join(lines)


def _value(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(str(choice) for choice in action.choices) + "}"
    word = action.metavar or action.dest.upper()
    word = (word if isinstance(word, str) else " ".join(word)).replace("|", " or ")
    return f"[{word}]" if action.nargs in ("?", "*") else word


def _text(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(markdown())
