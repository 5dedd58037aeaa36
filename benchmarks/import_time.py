"""What having an engine costs before any training: python benchmarks/import_time.py [--quick].

Seconds to import it above torch, seconds until its command has shown its help, and bytes on disk as pip installs it.
Every measure of time is a Python of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness

# The module that must be there, and what is run after `import torch`.
IMPORTS = {
    "wherry": ("wherry", "import wherry"),
    "wherry, engine": ("wherry", "import wherry; wherry.initialize"),
    "fsdp2": ("torch", "import torch.distributed.fsdp"),
    "deepspeed": ("deepspeed", "import deepspeed"),
}
# The same, and the module of its command that is asked for help.
COMMANDS = {
    "wherry": ("wherry", "wherry"),
    "torchrun": ("torch", "torch.distributed.run"),
    "deepspeed": ("deepspeed", "deepspeed.launcher.runner"),
}
_TIMED = """
import sys, time
import torch
begun = time.perf_counter()
{statement}
print("\\n", time.perf_counter() - begun)
"""


def _python(*arguments: str) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def import_once(statement: str) -> float:
    return float(json.loads(_python("-c", _TIMED.format(statement=statement)).splitlines()[-1]))


def command_once(module: str) -> float:
    begun = time.perf_counter()
    _python("-m", module, "--help")
    return time.perf_counter() - begun


def rows_of(
    what: str, subjects: dict[str, tuple[str, str]], once: Callable[[str], float], rounds: int
) -> list[harness.Row]:
    here: dict[str, Callable[[], float]] = {}
    rows = []
    for name, (module, argument) in subjects.items():
        if importlib.util.find_spec(module) is None:
            rows.append(harness.row({"measure": what}, name, "s", reason=f"{module} is not installed"))
            continue
        if rounds > 1:
            once(argument)  # compiles the sources, and brings them into the page cache
        here[name] = partial(once, argument)
    return [harness.row({"measure": what}, n, "s", v) for n, v in harness.interleave(here, rounds).items()] + rows


def size_row(package: str) -> harness.Row:
    """Bytes of a package's own files, without what Python compiles from them."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return harness.row({"measure": "size"}, package, "B", reason=f"{package} is not installed")
    folder = Path(spec.origin).parent
    files = [file for file in folder.rglob("*") if folder / "native" / "src" not in file.parents]
    own = sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc")
    needs = [text for text in metadata.requires(package) or [] if "extra ==" not in text]
    return harness.row({"measure": "size"}, package, "B", [float(own)], requirements=len(needs))


def main(argv: Sequence[str] | None = None) -> int:
    options = harness.parse(harness.parser(__doc__ or ""), argv)
    rounds = options.rounds or (1 if options.quick else 5)
    results = harness.Results("imports", options, {"rounds": rounds})
    results.add(*rows_of("import", IMPORTS, import_once, rounds))
    results.add(*rows_of("command", COMMANDS, command_once, rounds))
    results.add(*(size_row(package) for package in ("wherry", "deepspeed")))
    harness.show(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    harness.alone(main)
