"""The C++ programs, which the sanitizers run as well; and the kernels of 64-bit Arm, compiled and emulated."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from wherry import native
from wherry.native import loading

SOURCES = Path(loading.__file__).with_name("src")
TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "native" / "native_test.cpp"
LIBRARY = SOURCES.with_name("libwherry.so")
COMPILER = shutil.which("g++") or shutil.which("clang++")
CROSS = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
EXACTLY = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

# Each gives the one exact result that IEEE 754 prescribes, or moves bits: the order of operations stays the source's.
EXACT = {"vsqrtq_f32", "vcvt_f32_f16", "vcvt_f16_f32"}
MOVES = {"vreinterpret_f16_u16", "vreinterpret_u16_f16", "vld1_u16", "vst1_u16"}

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason=f"no native library: {native.why_not()}")


def output_of(folder: Path, *sources: Path) -> str:
    """Compile a program and run it."""
    program = folder / "program"
    subprocess.run([COMPILER, *STRICT, f"-I{SOURCES}", *sources, "-o", program, "-lpthread"], check=True)
    libraries = {"LD_LIBRARY_PATH": str(LIBRARY.parent)}
    done = subprocess.run([program, folder], capture_output=True, text=True, timeout=120, env=libraries)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == [program]
    return done.stdout


def digests(output: str) -> dict[str, str]:
    return dict(re.findall(r"instruction set (\d): kernels in order, digest (\w+)", output))


@needs_compiler
def test_the_pool_and_the_disk_without_the_library(tmp_path, launched):
    assert output_of(tmp_path, TESTS / "native" / "pool_test.cpp", SOURCES / "pool.cpp") == "ok\n"
    disk = [TESTS / "disk" / "disk_test.cpp", *sorted(SOURCES.glob("disk_*.cpp"))]
    assert output_of(tmp_path, *disk).startswith("ok")


@needs_compiler
@needs_library
def test_the_library_without_python(tmp_path, launched):
    output = output_of(tmp_path, PROGRAM, LIBRARY)
    assert output.endswith("pool in order\n")
    found = digests(output)
    assert set(found) == {str(loading.ISA_CODES[name]) for name in native.available_isas() if name != "torch"}
    assert len(set(found.values())) == 1


def test_arm_has_the_portable_source_with_exact_operations_of_its_own():
    portable, neon = ((SOURCES / f"kernels_{name}.cpp").read_text() for name in ("portable", "neon"))
    assert neon.replace("#define WHERRY_NEON 1\n", "").replace("neon", "portable") == portable
    vectors = (SOURCES / "vec_generic.h").read_text()
    assert set(re.findall(r"\bv\w+_[fsu]\d+\b(?=\()", vectors)) == EXACT | MOVES


@needs_compiler
@needs_library
@pytest.mark.nightly
@pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="there is no aarch64-linux-gnu-g++ or no qemu-aarch64")
def test_arm_gives_the_same_bits(tmp_path, launched):
    """The whole library for 64-bit Arm, emulated: its NEON and portable kernels, against those of this machine."""
    here = digests(output_of(tmp_path, PROGRAM, LIBRARY))
    program = tmp_path / "native_test_aarch64"
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if "avx" not in path.name]
    flags = [*STRICT, *EXACTLY, "-O1", "-static", f"-I{SOURCES}"]
    subprocess.run([CROSS, *flags, PROGRAM, *sources, "-o", program, "-lpthread"], check=True)
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    found = digests(done.stdout)
    assert set(found) == {"1", "4"}
    assert set(found.values()) == set(here.values())
