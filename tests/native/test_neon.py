"""The kernels of 64-bit Arm on another processor: their source beside the portable one, compiled and emulated."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from wherry import native
from wherry.native import loading

SOURCES = Path(loading.__file__).with_name("src")
PROGRAM = Path(__file__).with_name("native_test.cpp")
LIBRARY = SOURCES.with_name("libwherry.so")
CROSS = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

# Each gives the one exact result that IEEE 754 prescribes, or moves bits: the order of operations stays the source's.
EXACT = {"vsqrtq_f32", "vcvt_f32_f16", "vcvt_f16_f32"}
MOVES = {"vreinterpret_f16_u16", "vreinterpret_u16_f16", "vld1_u16", "vst1_u16"}

needs_cross = pytest.mark.skipif(CROSS is None, reason="there is no aarch64-linux-gnu-g++")


def test_it_is_the_portable_source_with_exact_operations_of_its_own():
    portable, neon = ((SOURCES / f"kernels_{name}.cpp").read_text() for name in ("portable", "neon"))
    assert neon.replace("#define WHERRY_NEON 1\n", "").replace("neon", "portable") == portable
    vectors = (SOURCES / "vec_generic.h").read_text()
    assert set(re.findall(r"\bv\w+_[fsu]\d+\b(?=\()", vectors)) == EXACT | MOVES


@needs_cross
def test_it_compiles(launched):
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if not re.search("avx|portable", path.name)]
    assert {"kernels_neon.cpp", "pool.cpp", "api.cpp", "disk_uring.cpp"} <= {path.name for path in sources}
    subprocess.run([CROSS, *FLAGS, "-fsyntax-only", *sources], check=True)
    # With the processor's own checksums, which a build for any 64-bit Arm leaves out.
    subprocess.run([CROSS, *FLAGS, "-march=armv8-a+crc", "-fsyntax-only", SOURCES / "disk_crc.cpp"], check=True)


def digests(output: str) -> dict[str, str]:
    return dict(re.findall(r"instruction set (\d): kernels in order, digest (\w+)", output))


def run_here(tmp_path: Path) -> dict[str, str]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not LIBRARY.exists():
        pytest.skip(f"there is no C++ compiler, or no native library: {native.why_not()}")
    program = tmp_path / "native_test"
    subprocess.run([compiler, *FLAGS[:4], f"-I{SOURCES}", PROGRAM, LIBRARY, "-o", program, "-lpthread"], check=True)
    done = subprocess.run(
        [program], capture_output=True, text=True, timeout=120, env={"LD_LIBRARY_PATH": str(LIBRARY.parent)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("pool in order\n")
    return digests(done.stdout)


def test_the_library_without_python(tmp_path, launched):
    found = run_here(tmp_path)
    codes = {str(loading.ISA_CODES[name]) for name in native.available_isas() if name != "torch"}
    assert set(found) == codes
    assert len(set(found.values())) == 1


@needs_cross
@pytest.mark.nightly
@pytest.mark.skipif(EMULATOR is None, reason="there is no qemu-aarch64 to run it in")
def test_it_gives_the_same_bits(tmp_path, launched):
    """The whole library for 64-bit Arm, emulated: its NEON and portable kernels, against those of this machine."""
    program = tmp_path / "native_test_aarch64"
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if not re.match(r"kernels_avx|disk", path.name)]
    command = [CROSS, *FLAGS, "-O1", "-static", f"-I{SOURCES}", PROGRAM, *sources, "-o", program, "-lpthread"]
    subprocess.run(command, check=True)
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    found = digests(done.stdout)
    assert set(found) == {"1", "4"}
    assert set(found.values()) == set(run_here(tmp_path).values())
