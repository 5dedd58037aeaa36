"""Collects what a machine lacks that has torch and no network: python benchmarks/gpu_machine.py [--python 3.12].

Wheels of all that Wherry, its tests for a GPU and its benchmarks import go to .whl, its native library to .native.
torch and numpy are the machine's own.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
WHEELS, NATIVE = ROOT / ".whl", ROOT / ".native"
THERE = {"torch", "numpy"}
TESTS = ("pytest", "pytest-timeout", "hypothesis")
TOLD = """
Copy this folder there, with .whl and .native. There, in it:

  python3 -m pip install --no-index --no-deps --no-compile --target .site .whl/*.whl
  cp .native/libwherry.so src/wherry/native/
  export PYTHONPATH=$PWD/.site:$PWD/src:$PWD
  python3 -c 'from wherry import native; print(native.why_not() or f"updates use {native.isa()}")'
  python3 benchmarks/gpu.py facts --json FOLDER    # and then: policies, peers, large, largest
"""


def pip(command: str, *words: str) -> list[str]:
    """Of which no package brings others with it: torch is never resolved."""
    fixed = f"-m pip --disable-pip-version-check {command} --quiet --no-deps --constraint".split()
    return [sys.executable, *fixed, str(ROOT / "constraints.txt"), *words]


def download(requirements: Iterable[str], python: str) -> None:
    machine = platform.machine()
    tags = [f"manylinux_2_{glibc}_{machine}" for glibc in range(5, 40)] + [f"manylinux2014_{machine}", "any"]
    where = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(WHEELS)]
    where += [word for tag in tags for word in ("--platform", tag)]
    subprocess.run(pip("download", *where, *requirements), check=True)


def needs(wheel: Path, python: str) -> list[Requirement]:
    """What a wheel wants of others on such a machine, without its extras."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(file.read(name).decode()).get_all("Requires-Dist") or []
    there = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(there)]


def collect(wanted: list[Requirement], python: str) -> None:
    """Wheels of what is wanted, then of what these want, until nothing is new."""
    seen = set(THERE)
    while new := {name: one for one in wanted if (name := canonicalize_name(one.name)) not in seen}:
        seen |= set(new)
        before = set(WHEELS.glob("*.whl"))
        download([f"{one.name}{one.specifier}" for one in new.values()], python)
        wanted = [one for wheel in set(WHEELS.glob("*.whl")) - before for one in needs(wheel, python)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="the machine's (3.12)")
    python = parser.parse_args(argv).python
    for folder in (WHEELS, NATIVE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    # DeepSpeed comes as sources, of which a wheel is made here. Its own parts are compiled there, at their first use.
    made = pip("wheel", "--no-build-isolation", "--wheel-dir", str(WHEELS), "deepspeed")
    if subprocess.run(["env", "DS_BUILD_OPS=0", *made]).returncode:
        print("no wheel of DeepSpeed could be made: its rows will say so")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *TESTS)]
    collect(wanted + [one for wheel in WHEELS.iterdir() for one in needs(wheel, python)], python)
    library = ROOT / "src" / "wherry" / "native" / "libwherry.so"
    if library.exists():
        shutil.copy(library, NATIVE)
        print(f"the native library wants {' '.join(platform.libc_ver())} or a newer one")
    else:
        print("no native library was built here: without it updates on the host are slow; install a C++ compiler")
    for path in sorted([*WHEELS.iterdir(), *NATIVE.iterdir()]):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.relative_to(ROOT)}")
    print(TOLD, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
