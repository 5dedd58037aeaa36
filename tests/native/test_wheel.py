"""A wheel is built from the sources, installed and run; and so is one where there is no compiler."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from wherry import native
from wherry.native import loading

TOP = Path(__file__).parents[2]
NEEDED = {"libc", "libm", "libpthread", "libstdc++", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("scikit_build_core") is None, reason="there is no scikit-build-core to build with"
    ),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]

BUILD = """
import sys
from scikit_build_core.build import build_wheel
print(build_wheel(sys.argv[1], {"cmake.define.WHERRY_OPTIMIZE": "-O0"}))
"""

# An update in the installed package, apart from any other Wherry of this machine.
RUN = """
import json, sys
sys.path[:0] = [sys.argv[1]]
sys.path += json.loads(sys.argv[2])
import torch, wherry
from wherry import native
from wherry.cli.doctor import examine
exec(sys.argv[3])
core = next(finding for finding in examine() if finding.name == "native core")
print(json.dumps({"file": wherry.__file__, "isa": native.isa(), "digest": digest(native, torch),
                  "doctor": [core.found, core.verdict, core.advice]}))
"""

# Three steps of a split master, and what they leave.
STEPS = """
def digest(native, torch):
    import hashlib
    generator = torch.Generator().manual_seed(3)
    numel = 1061
    weights = torch.randn(numel, generator=generator)
    hi, low = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    native.split(weights, hi, low)
    m, v = torch.zeros(numel), torch.zeros(numel)
    plan = native.Plan([native.Segment(None, hi, low=low, state=(m, v))])
    for step in (1, 2, 3):
        grad = torch.randn(numel, generator=generator).bfloat16()
        plan.run(native.Adam(1e-2, weight_decay=0.1, step=step), 0.7, grads=[grad])
    return hashlib.sha256(b"".join(t.view(torch.uint8).numpy().tobytes() for t in (hi, low, m, v))).hexdigest()
"""


def build(folder: Path, **environment: str) -> Path:
    """The wheel that the build backend makes of a clean copy of the sources."""
    sources, out = folder / "sources", folder / "out"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(TOP / "src", sources / "src", ignore=ignored)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md"):
        shutil.copy(TOP / name, sources / name)
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=sources,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out / done.stdout.split()[-1]


def install(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(site: Path) -> dict[str, Any]:
    # -S leaves out what an editable install has put into site-packages; these come in again as plain folders.
    packages = [path for path in sys.path if path.endswith("-packages")]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WHERRY_ISA")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUN, str(site), json.dumps(packages), STEPS],
        cwd=site,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(site)
    return found


def digest_here() -> str:
    names: dict[str, Any] = {"hashlib": hashlib}
    exec(STEPS, names)
    return names["digest"](native, torch)


@pytest.mark.skipif(native.library() is None, reason=f"no native library here to begin with: {native.why_not()}")
def test_one_wheel_serves_every_python(tmp_path):
    wheel = build(tmp_path)
    # Neither Python's ABI nor its version: any Python 3 on this system and processor.
    assert re.fullmatch(r"wherry-[\w.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(record).decode()
    assert "wherry/native/libwherry.so" in names
    assert {"wherry/__init__.py", "wherry/cli/__init__.py", "wherry/native/loading.py"} <= set(names)
    assert "wherry/plan/profiles.zip" in names
    assert not [name for name in names if name.startswith("wherry/native/src") or name.endswith((".cpp", ".h", ".o"))]
    site = install(wheel, tmp_path / "site")
    library = site / "wherry" / "native" / "libwherry.so"
    if shutil.which("readelf") is not None:
        out = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", out))
        assert "libc" in needed and needed <= NEEDED
        assert not re.search(r"R(UN)?PATH", out)
    # Without torch, and without Python's help: what the package's loader asks of it first.
    found = ctypes.CDLL(str(library))
    assert found.wherry_abi_version() == loading.ABI_VERSION
    assert all(found.wherry_has_isa(loading.ISA_CODES[name]) for name in native.available_isas() if name != "torch")


def broken_compiler(folder: Path) -> str:
    """One that compiles, but none of the library's own sources."""
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("there is no C++ compiler to break")
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *native/src*) exit 1 ;; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("compiler", ["absent", "failing"])
def test_without_a_compiler_the_fallback_is_installed(tmp_path, compiler):
    path = "/nowhere/c++" if compiler == "absent" else broken_compiler(tmp_path)
    wheel = build(tmp_path, CXX=path)
    site = install(wheel, tmp_path / "site")
    assert not list(site.rglob("*.so"))
    if compiler == "failing":
        return  # the same wheel
    found = run(site)
    assert found["isa"] == "torch"
    what, verdict, advice = found["doctor"]
    assert (what, verdict) == ("not in use: torch fallback", "note")
    assert "there was no C++ compiler when Wherry was installed" in advice and "install one (g++ or clang++)" in advice
    assert found["digest"] == digest_here()
