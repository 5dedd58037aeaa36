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

from .cases import needs_library

LIBRARY = Path(loading.__file__).with_name("libwherry.so")


@needs_library
@pytest.mark.skipif(
    shutil.which("readelf") is None or shutil.which("nm") is None, reason="binutils (readelf, nm) are not installed"
)
def test_the_library_needs_the_system_alone_and_exports_its_own_names_alone(launched):
    def lines(*command):
        return subprocess.run([*command, str(LIBRARY)], capture_output=True, text=True, check=True).stdout

    dynamic = lines("readelf", "-d")
    needed = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.+?)\]", dynamic)}
    assert needed
    assert needed <= {"libc", "libm", "libpthread", "libstdc++", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}
    names = {line.split()[-1] for line in lines("nm", "-D", "--defined-only").splitlines()}
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
    if isa == "torch":
        assert native.why_not() == "WHERRY_ISA=torch asks for the torch fallback"


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


@needs_library
def test_an_absent_broken_or_other_library_is_refused_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    shutil.copy(LIBRARY, tmp_path / "other.so")
    monkeypatch.setattr(loading, "ABI_VERSION", loading.ABI_VERSION + 1)
    for name, reason in (
        ("absent", "no C++ compiler when Wherry was installed"),
        ("broken", "does not load"),
        ("other", f"version {loading.ABI_VERSION - 1}, expected {loading.ABI_VERSION}"),
    ):
        found = loading._load(tmp_path / f"{name}.so")
        assert found.library is None and reason in found.reason


@needs_library
def test_layouts_and_checksums_of_both_sides_agree():
    assert len(native.SGD(1.0).pack()) == native.library().wherry_sizeof_rule()
    assert segment.LAYOUT.size == native.library().wherry_sizeof_segment()
    # The published value of CRC-32C.
    assert native.library().wherry_crc32c(b"123456789", 9) == 0xE3069283
