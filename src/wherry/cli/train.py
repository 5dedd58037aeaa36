"""`wherry train`: checks what was asked, then starts its own ranks and waits for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wherry.train.options import Options

# Of ranks whose loss is lost: the summary has said so.
_TOLD = 1
_RANKS_ON_CPU = 2
_SECONDS_TO_FINISH_A_STEP = "120"


def main(argv: list[str]) -> int:
    from wherry.train.options import parse

    return begin(parse(argv), argv, _start, "wherry.train.job")


def begin(options: Options, argv: list[str], start: Callable[[Options, list[str]], int], job: str) -> int:
    """Start ranks, or be the one that the environment describes."""
    from wherry.observe.stdout import kept_terminal

    if "RANK" in os.environ:
        status: int = import_module(job).main(argv)
        return status
    with kept_terminal():
        return start(options, argv)


def _start(options: Options, argv: list[str]) -> int:
    from wherry.train import job
    from wherry.train.options import grid_of

    if not job.check(options):
        return 0
    from wherry.cli.run import device_count, quiet_profiler

    # One rank for each GPU; without any two, so that what is partitioned can be seen; and in whole copies of the model.
    share = grid_of(options).size
    ranks = options.nproc or max(share, (device_count() or _RANKS_ON_CPU) // share * share)
    if ranks == 1 and not options.max_restarts:
        return job.main(argv)
    if options.profile:
        quiet_profiler()
    return start_ranks("wherry.train", ranks, options.max_restarts, argv)


def start_ranks(module: str, ranks: int, restarts: int, argv: list[str]) -> int:
    """The same command on each of several ranks of this machine."""
    from wherry.cli.run import build_parser, resolve
    from wherry.cli.supervise import launch

    how = ["--nproc", str(ranks), "--max-restarts", str(restarts), "--module", module]
    arguments = build_parser().parse_args([*how, *argv])
    resolve(arguments, "1")
    # After Ctrl-C a rank finishes the step under way and rank 0 sums up; a step of a large model takes its time.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS_TO_FINISH_A_STEP)
    return launch(arguments, told=[_TOLD])
