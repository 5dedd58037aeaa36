"""`wherry finetune`: checks what was asked, then starts its own ranks and waits for them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.train.options import Options

_NEEDED = ("transformers", "trl", "peft", "datasets", "yaml")


def main(argv: list[str]) -> int:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing and not {"-h", "--help"} & set(argv):
        raise WherryError(f"finetune: it needs {', '.join(missing)}: pip install 'wherry[transformers]'")
    from wherry.cli.train import begin
    from wherry.finetune.options import parse

    return begin(parse(argv), argv, _start, "wherry.finetune.job")


def _start(options: Options, argv: list[str]) -> int:
    from wherry.cli.run import device_count
    from wherry.cli.train import start_ranks
    from wherry.finetune import job

    if not job.check(options):
        return 0
    ranks = options.nproc or device_count() or 1
    if ranks == 1 and not options.max_restarts:
        return job.main(argv)
    job.where(options.model)  # what has to be fetched is, once
    return start_ranks("wherry.finetune", ranks, options.max_restarts, argv)
