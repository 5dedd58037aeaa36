"""The native library: its dependencies, exports, choice, and the reasons for its absence."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from wherry import native
from wherry.errors import WherryError
from wherry.native import loading, segment

LIBRARY = Path(loading.__file__).with_name("libwherry.so")
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason=f"no native library: {native.why_not()}")
needs_binutils = pytest.mark.skipif(
    shutil.which("readelf") is None or shutil.which("nm") is None, reason="binutils (readelf, nm) are not installed"
)


@needs_library
@needs_binutils
def test_the_library_needs_the_system_libraries_alone(launched):
    out = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", out))
    assert needed
    stems = {name.split(".so")[0] for name in needed}
    assert stems <= {"libc", "libm", "libpthread", "libstdc++", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}


@needs_library
@needs_binutils
def test_the_library_exports_its_own_names_alone(launched):
    command = ["nm", "-D", "--defined-only", str(LIBRARY)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in out.splitlines()}
    # Instances of the standard library's templates (mangled, in std) stay visible.
    own = {name for name in names if not re.match(r"_Z\w*St", name)}
    assert {"wherry_abi_version", "wherry_plan_submit"} <= own
    assert all(name.startswith("wherry_") for name in own), own


@pytest.mark.parametrize("isa", native.available_isas())
def test_the_environment_forces_an_instruction_set(isa, monkeypatch):
    monkeypatch.setenv("WHERRY_ISA", isa.upper())
    assert native.isa() == isa
    weight = torch.zeros(3)
    native.PackedSegments([native.Segment(torch.ones(3), weight)]).run(native.SGD(1.0))
    assert weight.tolist() == [-1.0] * 3
    assert (native.library() is None) == (isa == "torch")


def test_the_fallback_says_why(monkeypatch):
    monkeypatch.setenv("WHERRY_ISA", "torch")
    assert native.why_not() == "WHERRY_ISA=torch asks for the torch fallback"
    monkeypatch.delenv("WHERRY_ISA")
    assert native.why_not() == "" or native.library() is None


def test_an_unknown_or_missing_instruction_set_is_an_error(monkeypatch):
    monkeypatch.setenv("WHERRY_ISA", "sse9")
    with pytest.raises(WherryError, match=r"WHERRY_ISA='sse9': expected one of avx512, avx2, neon, portable, torch"):
        native.isa()
    missing = next(name for name in loading.ISAS if name not in native.available_isas())
    monkeypatch.setenv("WHERRY_ISA", missing)
    with pytest.raises(WherryError, match=rf"WHERRY_ISA='{missing}' is not available"):
        native.isa()
    monkeypatch.delenv("WHERRY_ISA")
    with pytest.raises(WherryError, match=rf"isa='{missing}' is not available"):
        native.PackedSegments([], isa=missing)


def test_a_library_that_is_absent_broken_or_of_another_version_is_told(tmp_path):
    absent = loading._load(tmp_path / "absent.so")
    assert absent.library is None
    assert "no C++ compiler when Wherry was installed" in absent.reason
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert "does not load" in loading._load(broken).reason


@needs_library
def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "libwherry.so"
    shutil.copy(LIBRARY, copy)
    monkeypatch.setattr(loading, "ABI_VERSION", loading.ABI_VERSION + 1)
    found = loading._load(copy)
    assert found.library is None
    assert f"version {loading.ABI_VERSION - 1}, expected {loading.ABI_VERSION}" in found.reason


@pytest.mark.skipif(native.library() is None, reason=f"the native library is not active: {native.why_not()}")
def test_the_layouts_of_both_sides_agree():
    assert len(native.SGD(1.0).pack()) == native.library().wherry_sizeof_rule()
    assert segment.LAYOUT.size == native.library().wherry_sizeof_segment()
