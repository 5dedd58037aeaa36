"""Collect what a machine with torch and no network lacks: python benchmarks/gpu_machine.py [--python 3.12].

Wheels of everything that Wherry, its tests for a GPU and its benchmarks import go to .whl, its native library to
.native; torch and numpy are the machine's own. The commands that measure there are printed.
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

if not __package__:  # a script's own folder is on the path, and not the one above it
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import gpu

ROOT = Path(__file__).parents[1]
WHEELS, NATIVE = ROOT / ".whl", ROOT / ".native"
PREINSTALLED = {"torch", "numpy"}
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
# Bytes that travel to such a machine at most: the sources and what is collected.
LARGEST = 64 << 20
# Seconds for the wheels to be installed, and for Python to start and end.
INSTALL_S, START_S = 40, 20
SETUP = """export PYTHONUNBUFFERED=1 OUT=${OUT:-results}; mkdir -p $OUT build/gpu
[ -d .site ] || python3 -m pip install -q --no-index --no-deps --no-compile --target .site .whl/*.whl
cp .native/libwherry.so src/wherry/native/; export PATH=$PWD/.site/bin:$PATH PYTHONPATH=$PWD/.site:$PWD/src:$PWD"""
# A call takes over what the one before has measured, where the machine is the same.
CALL = """cp build/gpu/*.json $OUT/ 2>/dev/null
timeout {limit} python3 benchmarks/gpu.py {parts} --json $OUT --path build
cp $OUT/*.json build/gpu/"""


def calls() -> list[tuple[str, int]]:
    """Return the commands for a GPU machine, and the seconds that each may take."""
    commands = []
    for parts in gpu.CALLS:
        limit = START_S + sum(gpu.SECONDS[part] + int(gpu.GRACE_S) for part in parts)
        commands.append((SETUP + "\n" + CALL.format(limit=limit, parts=" ".join(parts)), INSTALL_S + limit))
    return commands


def pip(command: str, *words: str) -> list[str]:
    """Build a pip command that resolves no dependencies, as torch would be among them."""
    fixed = f"-m pip --disable-pip-version-check {command} --quiet --no-deps --constraint".split()
    return [sys.executable, *fixed, str(ROOT / "constraints.txt"), *words]


def download(requirements: Iterable[str], python: str) -> None:
    machine = platform.machine()
    tags = [f"manylinux_2_{glibc}_{machine}" for glibc in range(5, 40)] + [f"manylinux2014_{machine}", "any"]
    where = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(WHEELS)]
    where += [word for tag in tags for word in ("--platform", tag)]
    subprocess.run(pip("download", *where, *requirements), check=True)


def needs(wheel: Path, python: str) -> list[Requirement]:
    """List a wheel's requirements on such a machine, without its extras."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(file.read(name).decode()).get_all("Requires-Dist") or []
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(environment)]


def collect(wanted: list[Requirement], python: str) -> None:
    """Download wheels of these requirements, and of those of the wheels."""
    seen = set(PREINSTALLED)
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
        print(f"the native library needs {' '.join(platform.libc_ver())} or a newer one")
    else:
        print("no native library was built here: without it updates on the host are slow; install a C++ compiler")
    collected = sorted([*WHEELS.iterdir(), *NATIVE.iterdir()])
    for path in collected:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.relative_to(ROOT)}")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sources = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]
    size = sum(path.stat().st_size for path in [*collected, *sources])
    print(f"{size / 2**20:6.1f} MiB  with the sources, of {LARGEST >> 20} MiB at most\n")
    print("Copy this folder to the machine, with .whl and .native, and run there, one soon after the other:")
    for number, (command, seconds) in enumerate(calls(), 1):
        print(f"\n# call {number}, {seconds} s at most; results in $OUT\n{command}")
    return int(size > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
