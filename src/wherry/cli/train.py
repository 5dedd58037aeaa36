"""`wherry train`: checks what was asked, then starts its own ranks and waits for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wherry.train.options import Options

_RANKS_ON_CPU = 2
_SECONDS_TO_FINISH_A_STEP = "120"


def main(argv: list[str]) -> int:
    from wherry.train.options import parse

    options = parse(argv)
    if "RANK" in os.environ:
        from wherry.train import job

        return job.main(argv)
    return _start(argv, options)


def _start(argv: list[str], options: Options) -> int:
    from wherry.cli.run import build_parser, resolve
    from wherry.train import job

    job.check(options)
    share = options.tensor_parallel * options.pipeline_parallel
    # As many as there are, in whole copies of the model.
    ranks = options.nproc or max(share, _default_ranks() // share * share)
    if ranks == 1:
        return job.main(argv)
    from wherry.cli.launch import launch

    arguments = build_parser().parse_args(
        ["--nproc", str(ranks), "--max-restarts", str(options.max_restarts), "--module", "wherry.train", *argv]
    )
    resolve(arguments, "1")
    # After Ctrl-C a rank finishes the step under way and rank 0 sums up; a step of a large model takes its time.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS_TO_FINISH_A_STEP)
    return launch(arguments)


def _default_ranks() -> int:
    """One rank for each GPU; without any, two, so that what is partitioned can be seen."""
    import torch

    return torch.cuda.device_count() or _RANKS_ON_CPU
