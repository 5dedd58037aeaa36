"""`wherry bench`: what this machine gives, and what Wherry takes of it beside what people would use instead."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import wherry
from wherry.errors import WherryError

_BENCHES = {
    "adam": ("wherry.native.adam_bench", "the host optimizers, against the limit of the memory's bandwidth"),
    "disk": ("wherry.tiers.disk_bench", "reads and writes of the disk tier, and the settings that suit it"),
}
# These compare with other packages, and live beside the package in its source tree.
_SCRIPTS = {
    "overhead": "what an engine adds to a step, beside DDP, FSDP2 and DeepSpeed",
    "steps": "training steps of GPT-2, beside DDP, FSDP2 and DeepSpeed",
    "offload_step": "steps with states on host and disk, beside the bound and others",
    "forecast": "what `wherry plan` says a step takes, and what it takes",
    "memory": "peak memory by placement, against the formulas and others",
    "construction": "time and memory of building and loading a model",
    "tiling": "a linear layer that is larger than what may be live",
    "scaling": "what a step costs from 10M to 1B, and on 1 to 1,024 ranks",
    "accumulation": "accumulation layer by layer, against step by step",
    "checkpoint": "saving and loading, against the disk and others",
    "activations": "activation memory: recomputing, partitioning, offloading",
    "imports": "time to import, time to the command's help, size on disk",
    "gpu": "everything that wants a GPU, within nine minutes",
    "gpu_offload": "GPT-2 10B with the device limited to 32 GB",
    "peers": "compile what the peers compile at their first use",
    "report": "docs/benchmarks.md and its plots, from benchmarks/results",
}


def main(argv: list[str]) -> int:
    meanings = {name: meaning for name, (_, meaning) in _BENCHES.items()} | _SCRIPTS
    parser = argparse.ArgumentParser(
        prog="wherry bench",
        usage="wherry bench WHAT [flags]",
        description="Measure this machine, and Wherry on it.",
        epilog=f"what to measure:\n{_listed(meanings)}\n\n`wherry bench WHAT --help` lists its flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="WHAT", nargs="?", help="one of the measures below; without it they are listed")
    what: str | None = parser.parse_args(argv[:1]).what
    if what is None:
        parser.print_help()
        return 0
    if what not in meanings:
        from wherry.config.problems import did_you_mean

        hint = did_you_mean(what, meanings)
        parser.error(f"there is no measure {what!r}{hint}; expected one of {', '.join(meanings)}")
    if what in _SCRIPTS:
        return _run_script(what, argv[1:])
    module = _BENCHES[what][0]
    if importlib.util.find_spec(module) is None:
        raise WherryError(f"bench {what}: this install has no {module}; install Wherry again")
    return int(importlib.import_module(module).main(argv[1:]) or 0)


def _listed(meanings: Mapping[str, str]) -> str:
    """A measure in each line, which is broken where a terminal of 80 columns would."""
    wide = max(map(len, meanings)) + 4
    return "\n".join(
        textwrap.fill(meaning, 80, initial_indent=f"  {name}".ljust(wide), subsequent_indent=" " * wide)
        for name, meaning in meanings.items()
    )


def _run_script(name: str, arguments: list[str]) -> int:
    root = Path(wherry.__file__).parents[2]
    path = root / "benchmarks" / f"{name}.py"
    if path.parent.is_dir() and not path.is_file():
        raise WherryError(f"bench {name}: these sources have no benchmarks/{name}.py")
    if not path.is_file():
        raise WherryError(
            f"bench {name}: it comes with the sources, and this Wherry is an installed one (there is no {path}); "
            "run it from a clone of the repository"
        )
    sys.path.insert(0, str(root))
    return int(importlib.import_module(f"benchmarks.{name}").main(arguments))
