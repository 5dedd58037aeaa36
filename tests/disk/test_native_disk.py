"""The C++ disk engines by themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from wherry import native

SOURCES = Path(__file__).parents[2] / "src" / "wherry" / "native" / "src"


@pytest.fixture
def library():
    found = native.library()
    if found is None:
        pytest.skip(native.why_not())
    return found


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)],
)
def test_crc32c_gives_the_published_values(library, data, expected):
    assert library.wherry_crc32c(data, len(data)) == expected


def test_without_python(tmp_path, launched):
    """The C++ test, compiled here; the sanitizers run the same source."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "disk_test"
    sources = [Path(__file__).with_name("disk_test.cpp"), *sorted(SOURCES.glob("disk_*.cpp"))]
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O0",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{SOURCES}",
            *sources,
            "-o",
            program,
            "-lpthread",
        ],
        check=True,
    )
    done = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk_test"]
