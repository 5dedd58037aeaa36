"""The wheel of the sdist: its files, a training with it, and the fallback where there is no compiler.

`make wheel-test` runs commands and tests against an installed wheel; these tests cover the rest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.installed import ROOT, make_environment, make_sdist, make_wheel

from wherry import native

pytestmark = [
    pytest.mark.usefixtures("launched"),
    pytest.mark.skipif(
        importlib.util.find_spec("scikit_build_core") is None, reason="there is no scikit-build-core to build with"
    ),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]

FAST = "cmake.define.WHERRY_OPTIMIZE=-O0"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return make_sdist(tmp_path_factory.mktemp("sdist"))


def run_installed(wheel: Path, folder: Path, *command: object) -> str:
    """Install a wheel in an environment of its own, run a program of that, and return its output."""
    programs = make_environment(wheel, folder / "venv")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WHERRY_ISA")}
    words = [programs / str(command[0]), *map(str, command[1:])]
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(native.library() is None, reason=f"no native library here to begin with: {native.why_not()}")
def test_one_wheel_serves_every_python(sdist, tmp_path):
    wheel = make_wheel(sdist, tmp_path, FAST)
    # Neither Python's ABI nor its version: any Python 3 on this system and processor.
    assert re.fullmatch(r"wherry-[\w.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(record).decode()
        about = archive.read(record.replace("WHEEL", "METADATA")).decode()
        assert archive.read(record.replace("WHEEL", "licenses/LICENSE")) == (ROOT / "LICENSE").read_bytes()
    assert "\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n" in about
    assert {"wherry/__init__.py", "wherry/cli/__init__.py", "wherry/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith("wherry/native/src") or name.endswith((".cpp", ".h", ".o"))]
    trained = run_installed(wheel, tmp_path, "python", ROOT / "tests" / "native" / "smoke.py")
    assert f", {' '.join(native.available_isas())} kernels, " in trained


def test_without_a_compiler_the_fallback_is_installed(sdist, tmp_path):
    wheel = make_wheel(sdist, tmp_path, FAST, CXX="/nowhere/c++")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    findings = json.loads(run_installed(wheel, tmp_path, "wherry", "doctor", "--json"))
    core = next(finding for finding in findings if finding["name"] == "native core")
    assert (core["found"], core["verdict"]) == ("not in use: torch fallback", "note")
    assert "there was no C++ compiler when Wherry was installed" in core["advice"]
    assert "install one (g++ or clang++)" in core["advice"]
