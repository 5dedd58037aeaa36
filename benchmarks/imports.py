"""What having an engine costs before any training: python benchmarks/imports.py [--quick].

Seconds to import it above torch, seconds until its command has shown its help, and bytes on disk, as pip installs it
and with what a package compiles at its first use. Every measure of time is a Python of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone
from benchmarks.peers import built
from wherry.errors import WherryError
from wherry.observe import bench

# The system, the module that must be there, and what is run after `import torch`.
IMPORTS = {
    "wherry": ("wherry", "import wherry"),
    "wherry, engine": ("wherry", "import wherry; wherry.initialize"),
    "fsdp2": ("torch", "import torch.distributed.fsdp"),
    "deepspeed": ("deepspeed", "import deepspeed"),
}
# And what is asked for help: a module of its command.
COMMANDS = {
    "python": ("sys", ["-c", "pass"]),
    "wherry": ("wherry", ["-m", "wherry", "--help"]),
    "torchrun": ("torch", ["-m", "torch.distributed.run", "--help"]),
    "deepspeed": ("deepspeed", ["-m", "deepspeed.launcher.runner", "--help"]),
}
PACKAGES = ("wherry", "deepspeed")
# What Wherry's library does, which pip installs, DeepSpeed compiles at its first use: the host optimizer and the disk's
# reads and writes.
COMPILED = {"deepspeed": ("cpu_adam", "async_io")}
# Seconds that any of them is waited for.
TIMEOUT = 300.0
_TIMED = """
import sys, time
begun = time.perf_counter()
import torch
torch_at, modules = time.perf_counter(), len(sys.modules)
{statement}
print("\\n", [torch_at - begun, time.perf_counter() - torch_at, len(sys.modules) - modules])
"""


class Failed(WherryError):
    """What was to be timed has ended with an error. The message is the reason, in a line."""


def _environment() -> dict[str, str]:
    # As in a room: a peer must not look for a GPU, nor print about having none.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    # What pip installs is compiled, and what lies in a checkout after its first import, unless this forbids it.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _python(arguments: Sequence[str]) -> str:
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Failed(f"it is installed, and had not ended after {TIMEOUT:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise Failed(f"it is installed, and ended with status {done.returncode}: {lines[-1]}")
    return done.stdout


def import_once(statement: str) -> tuple[float, float, int]:
    """Seconds for torch, seconds for the statement after it, and the modules that it brought."""
    torch_s, own_s, modules = json.loads(_python(["-c", _TIMED.format(statement=statement)]).splitlines()[-1])
    return torch_s, own_s, modules


def command_once(arguments: Sequence[str]) -> float:
    begun = time.perf_counter()
    _python(arguments)
    return time.perf_counter() - begun


def missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def _rows(
    what: str, subjects: Mapping[str, tuple[str, Any]], once: Callable[[Any], Any], rounds: int
) -> list[bench.Row]:
    here: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    for name, (module, argument) in subjects.items():
        reason = missing(module)
        if reason is None:
            try:
                once(argument)  # compiles the sources, and brings them into the page cache
                here[name] = partial(once, argument)
            except Failed as failure:
                reason = str(failure)
        if reason is not None:
            reasons[name] = reason
    taken = bench.interleave(here, rounds, f"{what}s")
    rows = []
    for name in subjects:
        if name in reasons:
            rows.append(bench.row({"measure": what}, name, "s", reason=reasons[name]))
        elif what == "import":
            torch_s = bench.Summary.of(value[0] for value in taken[name]).median
            facts = {"torch_s": torch_s, "modules": taken[name][0][2]}
            rows.append(bench.row({"measure": what}, name, "s", [value[1] for value in taken[name]], **facts))
        else:
            rows.append(bench.row({"measure": what}, name, "s", taken[name]))
    return rows


# Bytes on disk.


def size_rows(package: str) -> list[bench.Row]:
    """As it is installed, and with what it compiles."""
    installed = size_row(package)
    case = {"measure": "size, compiled"}
    if installed["reason"] is not None:
        return [installed, bench.row(case, package, "B", reason=installed["reason"])]
    own = [built(operator) for operator in COMPILED.get(package, ())]
    if not all(file.is_file() for file in own):
        reason = "its host optimizer and aio are not compiled here (python benchmarks/peers.py compiles them)"
        return [installed, bench.row(case, package, "B", reason=reason)]
    compiled = sum(file.stat().st_size for file in own)
    return [installed, bench.row(case, package, "B", [installed["value"] + compiled], compiled=compiled)]


def size_row(package: str) -> bench.Row:
    case, reason = {"measure": "size"}, missing(package)
    if reason is None and package != "wherry" and not _installed(package):
        reason = f"{package} was not installed by pip: nothing says which files are its own"
    if reason is not None:
        return bench.row(case, package, "B", reason=reason)
    others = sorted(closure(requirements(package)) - closure(["torch"]) - {package})
    own = installed_bytes(package)
    beside = {name: installed_bytes(name) for name in others}
    total = float(own + sum(beside.values()))
    return bench.row(case, package, "B", [total], own=own, packages=len(others), beside_torch=beside)


def requirements(package: str) -> list[str]:
    """What a package always needs. For Wherry in its own source tree, what its project file says."""
    try:
        found = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        if package != "wherry":
            raise
        found = tomllib.loads((bench.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.match(r"[\w.-]+", text) for text in found if "extra ==" not in text]
    return [_canonical(match.group()) for match in names if match]


def closure(packages: Iterable[str]) -> set[str]:
    """Packages and all that they need, as far as it is installed: a marker may leave some out on this machine."""
    found: set[str] = set()
    waiting = [_canonical(name) for name in packages]
    while waiting:
        name = waiting.pop()
        if name not in found and _installed(name):
            found.add(name)
            waiting += requirements(name)
    return found


def installed_bytes(package: str) -> int:
    """Bytes of a package's files, without what Python compiles from them."""
    if package == "wherry":
        folder = Path(importlib.util.find_spec("wherry").origin or "").parent  # type: ignore[union-attr]
        # The sources of the native library are in the source tree, and in no wheel.
        files: Iterable[Path] = (file for file in folder.rglob("*") if folder / "native" / "src" not in file.parents)
    else:
        files = [Path(str(file.locate())) for file in metadata.files(package) or []]
    return sum(file.stat().st_size for file in files if file.suffix != ".pyc" and file.is_file())


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# The tables.


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows at 80 columns, a table for each thing measured."""
    heads = {
        "import": ("import, after torch", ("", "ms", "spread", "modules", "Wherry takes")),
        "command": ("a command's help", ("", "ms", "spread", "Wherry takes")),
        "size": ("on disk, beside torch and what torch needs", ("", "MB", "own MB", "packages", "Wherry takes")),
        "size, compiled": ("the same with what is compiled at first use", ("", "MB", "compiled MB", "Wherry takes")),
    }
    for what, (title, columns) in heads.items():
        lines, notes = [], []
        for row in (row for row in rows if row["case"]["measure"] == what):
            if row["reason"] is not None:
                lines.append([row["system"], *["-"] * (len(columns) - 1)])
                notes.append(f"{row['system']}: {row['reason']}")
            elif what == "size":
                figures = [f"{row['value'] / 1e6:.1f}", f"{row['own'] / 1e6:.1f}", f"{row['packages']}"]
                lines.append([row["system"], *figures, _wherry_takes(row, rows)])
            elif what == "size, compiled":
                figures = [f"{row['value'] / 1e6:.1f}", f"{row['compiled'] / 1e6:.1f}", _wherry_takes(row, rows)]
                lines.append([row["system"], *figures])
            else:
                figures = [f"{1000 * row['value']:.0f}", bench.spread_words(row)]
                figures += [f"{row['modules']}"] if what == "import" else []
                lines.append([row["system"], *figures, _wherry_takes(row, rows)])
        if what == "import":
            torch_s = [row["torch_s"] for row in rows if "torch_s" in row]
            notes += [f"torch itself: {1000 * bench.Summary.of(torch_s).median:.0f} ms"] if torch_s else []
        bench.show(title, columns, lines, [*notes, ""])


def _wherry_takes(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Wherry's figure as a part of a peer's. Wherry imports its engine at first use; peers import theirs at once."""
    if row["system"].startswith("wherry") or row["system"] == "python":
        return ""
    own = "wherry, engine" if row["case"]["measure"] == "import" else "wherry"
    ours = next((r for r in rows if r["case"] == row["case"] and r["system"] == own), None)
    ratio = ours["ratio"].get(row["system"]) if ours else None
    return f"{1 / ratio:.2f}" if ratio else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("imports", __doc__ or "")
    parser.add_argument("--rounds", type=bench.positive, help="times that everything is measured")
    options = bench.parse(parser, argv)
    rounds = options.rounds or (1 if options.quick else 5)
    results = bench.Results("imports", options, {"rounds": rounds})
    results.add(*_rows("import", IMPORTS, import_once, rounds))
    results.add(*_rows("command", COMMANDS, command_once, rounds))
    results.add(*(row for package in PACKAGES for row in size_rows(package)))
    bench.compare(results.rows)
    for row in results.rows:
        # A Python that does nothing is what no command can be sooner than.
        row["of_limit"] = row["ratio"].get("python") if row["case"]["measure"] == "command" else None
    table(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    alone(main)
