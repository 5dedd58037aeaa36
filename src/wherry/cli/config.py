"""`wherry config`: check a file, explain a key, print the JSON schema, write a file for DeepSpeed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from wherry.cli import USER_ERROR, check_word
from wherry.config.problems import Parser
from wherry.errors import printable


def main(argv: list[str]) -> int:
    parser = Parser(prog="wherry config")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check = commands.add_parser("check", help="check a config and show what it resolves to")
    explain = commands.add_parser("explain", help="say what a key means and does")
    theirs = commands.add_parser("deepspeed", help="print a config as DeepSpeed itself reads it, in its keys only")
    schema = commands.add_parser("schema", help="print the JSON schema, for editors")
    for reader in (check, theirs):
        reader.add_argument("file", help="the config: JSON or Hjson")
        reader.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="lay a value over the file")
    check.add_argument("--ranks", metavar="N", type=int, help="check the batch sizes for N data-parallel ranks")
    check.add_argument("--json", action="store_true", help="print the resolved config as JSON")
    explain.add_argument("key", help="like zero_optimization.stage, or the last part alone")
    for command, function in ((check, _check), (explain, _explain), (theirs, _deepspeed), (schema, _schema)):
        command.set_defaults(function=function)
    check_word(argv, commands.choices, "config: ")
    arguments = parser.parse_args(argv)
    return int(arguments.function(arguments))


def _load(arguments: argparse.Namespace) -> Any:
    """The config of a command line. The argument is always a file, never config text; `-` is standard input."""
    from pathlib import Path

    from wherry.config import load, parse_overrides
    from wherry.config.source import LONGEST

    source = sys.stdin.read(LONGEST + 1) + "\n" if arguments.file == "-" else Path(arguments.file)
    return load(source, overrides=parse_overrides(arguments.set))


def _deepspeed(arguments: argparse.Namespace) -> int:
    from wherry.compat.deepspeed.config import for_deepspeed
    from wherry.config import ConfigError

    try:
        config = _load(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    tree, notes = for_deepspeed(config)
    print(json.dumps(tree, indent=2))
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from wherry.config import ConfigError

    if arguments.ranks is not None and arguments.ranks < 1:
        print(f"--ranks: expected 1 or more, got {arguments.ranks}", file=sys.stderr)
        return USER_ERROR
    try:
        config = _load(arguments)
        batch = config.batch(arguments.ranks, "as --ranks says") if arguments.ranks is not None else None
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    if arguments.json:
        print(json.dumps(config.to_dict(), indent=2))
        return 0
    print(f"{printable(arguments.file)}: good")
    if config.planned:
        print("  placement   chosen for the model and the machine when training begins")
    else:
        for state, how, tier in config.placement().rows():
            print(f"  {state:<11} {how}, {tier}")
    if batch is not None:
        factors = f"micro-batch {batch.micro} x accumulation {batch.accumulation} x {arguments.ranks} ranks"
        print(f"  batch       {batch.train} = {factors}")
    for note in config.notes:
        print(f"note: {printable(note)}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from wherry.config.reference import explain, suggestion

    text = explain(arguments.key)
    if text is None:
        print(f'there is no key "{printable(arguments.key)}"{suggestion(arguments.key)}', file=sys.stderr)
        return USER_ERROR
    print(text)
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from wherry.config.reference import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
