"""The wheel of the sdist: its files and types, and the fallback where there is no compiler.

`make wheel-test` runs what users install; here stands what it does not see.
"""

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
from tests.installed import ROOT, make_environment, make_sdist, make_wheel

from wherry import native
from wherry.native import loading

NEEDED = {"libc", "libm", "libpthread", "libstdc++", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}

pytestmark = [
    pytest.mark.usefixtures("launched"),
    pytest.mark.skipif(
        importlib.util.find_spec("scikit_build_core") is None, reason="there is no scikit-build-core to build with"
    ),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]

# An update in the installed package.
RUN = """
import json, sys
import torch, wherry
from wherry import native
exec(sys.argv[1])
print(json.dumps({"file": wherry.__file__, "isa": native.isa(), "digest": digest(native, torch)}))
"""

# Three steps of a split master, and a digest of the state.
STEPS = """
def digest(native, torch):
    import hashlib
    generator = torch.Generator().manual_seed(3)
    numel = 1061
    weights = torch.randn(numel, generator=generator)
    hi, low = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    native.split(weights, hi, low)
    m, v = torch.zeros(numel), torch.zeros(numel)
    plan = native.PackedSegments([native.Segment(None, hi, low=low, state=(m, v))])
    for step in (1, 2, 3):
        grad = torch.randn(numel, generator=generator).bfloat16()
        plan.run(native.Adam(1e-2, weight_decay=0.1, step=step), 0.7, grads=[grad])
    return hashlib.sha256(b"".join(t.view(torch.uint8).numpy().tobytes() for t in (hi, low, m, v))).hexdigest()
"""


FAST = "cmake.define.WHERRY_OPTIMIZE=-O0"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return make_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist):
    return make_wheel(sdist, sdist.parent / "wheel", FAST)


def libraries(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


@pytest.fixture(scope="module")
def programs(sdist, tmp_path_factory):
    """An environment with a wheel that was built without a compiler."""
    folder = tmp_path_factory.mktemp("fallback")
    wheel = make_wheel(sdist, folder, FAST, CXX="/nowhere/c++")
    assert not libraries(wheel)
    return make_environment(wheel, folder / "venv")


def program(*words: object, folder: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WHERRY_ISA")}
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(programs: Path, folder: Path) -> dict[str, Any]:
    found = json.loads(program(programs / "python", "-c", RUN, STEPS, folder=folder))
    assert Path(found.pop("file")).is_relative_to(programs.parent)
    findings = json.loads(program(programs / "wherry", "doctor", "--json", folder=folder))
    return found | {"doctor": next(finding for finding in findings if finding["name"] == "native core")}


def digest_here() -> str:
    names: dict[str, Any] = {"hashlib": hashlib}
    exec(STEPS, names)
    return names["digest"](native, torch)


built_here = pytest.mark.skipif(
    native.library() is None, reason=f"no native library here to begin with: {native.why_not()}"
)


@built_here
def test_one_wheel_serves_every_python(wheel, tmp_path):
    # Neither Python's ABI nor its version: any Python 3 on this system and processor.
    assert re.fullmatch(r"wherry-[\w.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(record).decode()
        about = archive.read(record.replace("WHEEL", "METADATA")).decode()
        assert archive.read(record.replace("WHEEL", "licenses/LICENSE")) == (ROOT / "LICENSE").read_bytes()
        archive.extract("wherry/native/libwherry.so", tmp_path)
    assert "\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n" in about
    assert "wherry/native/libwherry.so" in names
    assert {"wherry/__init__.py", "wherry/cli/__init__.py", "wherry/native/loading.py"} <= set(names)
    assert "wherry/py.typed" in names
    assert not [name for name in names if name.startswith("wherry/native/src") or name.endswith((".cpp", ".h", ".o"))]
    library = tmp_path / "wherry" / "native" / "libwherry.so"
    if shutil.which("readelf") is not None:
        out = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", out))
        assert "libc" in needed and needed <= NEEDED
        assert not re.search(r"R(UN)?PATH", out)
    # Without torch, and without Python's help: what the package's loader asks of it first.
    found = ctypes.CDLL(str(library))
    assert found.wherry_abi_version() == loading.ABI_VERSION
    assert all(found.wherry_has_isa(loading.ISA_CODES[name]) for name in native.available_isas() if name != "torch")


USER = """
import torch
import wherry

engine, *_ = wherry.initialize(model=torch.nn.Linear(2, 2), config={"zero_optimization": {"stage": 3}})
reveal_type(engine)
wherry.initialize(model=torch.nn.Linear(2, 2), confg={})
"""


def test_types_are_seen_by_a_user_s_checker(programs, tmp_path):
    pytest.importorskip("mypy", reason="mypy comes with `pip install '.[dev]'`")
    (tmp_path / "user.py").write_text(USER)
    # The packages that Wherry needs take mypy half a minute to read.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*,pydantic.*]\nfollow_imports = skip\n")
    words = ["-m", "mypy", "--no-incremental", "--python-executable", str(programs / "python"), "user.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        'user.py:6: note: Revealed type is "wherry.engine.Engine"',
        'user.py:7: error: Unexpected keyword argument "confg" for "initialize"; did you mean "config"?  [call-arg]',
        'user.py:7: note: "initialize" defined in "wherry.build"',
        "Found 1 error in 1 file (checked 1 source file)",
    ], done.stdout + done.stderr


def test_without_a_compiler_the_fallback_is_installed(programs, tmp_path):
    found = run(programs, tmp_path)
    assert (found["isa"], found["digest"]) == ("torch", digest_here())
    doctor = found["doctor"]
    assert (doctor["found"], doctor["verdict"]) == ("not in use: torch fallback", "note")
    assert "there was no C++ compiler when Wherry was installed" in doctor["advice"]
    assert "install one (g++ or clang++)" in doctor["advice"]


@pytest.mark.nightly
def test_a_failing_compiler_costs_the_library_alone(sdist, tmp_path):
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("there is no C++ compiler to break")
    broken = tmp_path / "c++"
    broken.write_text(f'#!/bin/sh\ncase "$*" in *native/src*) exit 1 ;; esac\nexec {real} "$@"\n')
    broken.chmod(0o755)
    assert not libraries(make_wheel(sdist, tmp_path, FAST, CXX=str(broken)))
