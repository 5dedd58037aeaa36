"""Updates on a device, in torch and by the Triton kernel, give the bits of the host's kernels."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from wherry.native import on_device
from wherry.native.on_device import update_on_device

from .cases import FEW, RULES, assert_updates_as_the_host

KERNEL = """
import numpy
from tests.native.cases import assert_updates_as_the_host
from wherry.native.triton_kernel import update

numpy.seterr(all="ignore")
def each(segments, formulas, multiplier):
    for segment, formula in zip(segments, formulas):
        update(segment, formula, multiplier)
assert_updates_as_the_host(each, states=("fp32", "bf16"))
"""
DIGEST = """
import torch
from wherry.native import digest, triton_kernel

for numel in (128, 3 * 4 * triton_kernel.DIGEST_TILE + 128):
    weights = torch.randn(numel).bfloat16()
    assert int(triton_kernel.digest(weights.view(torch.int64))) == int(digest(weights))
"""
WITHOUT_TRITON = "triton is not installed: it comes with a torch for GPUs, or with `pip install triton`"


def test_in_torch_the_bits_are_those_of_the_host():
    assert_updates_as_the_host(update_on_device)


def test_a_gpu_compiles_at_most_40_variants():
    variants = set()

    def count(segments, formulas, multiplier):
        update_on_device(segments, formulas, multiplier)
        for s, formula in zip(segments, formulas, strict=True):
            if s.numel:
                tensors = [None if t is None else t.dtype for t in (s.grad, s.working, s.master, s.low, *s.state)]
                variants.add((*tensors, s.numel == 1, s.numel % 16, type(formula), formula.rounded()[1]))

    assert_updates_as_the_host(count, **FEW)
    assert 30 < len(variants) <= 40
    assert {variant[-2] for variant in variants} == {type(rule(1)) for rule in RULES.values()}


def test_the_triton_kernel_has_the_same_bits(launched):
    """Run the kernel by Triton's interpreter, which needs no GPU, and a process of its own."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    launched.interpret(KERNEL, TRITON_INTERPRET="1")


@pytest.mark.parametrize("rule", ["Adam", "Adagrad"])
def test_the_compiled_triton_kernel_rounds_each_operation_once(rule, tmp_path, monkeypatch, launched):
    """Its PTX fuses, approximates and flushes nothing, so that a GPU gives the interpreter's bits."""
    triton = pytest.importorskip("triton", reason=WITHOUT_TRITON)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from wherry.native.triton_kernel import OPTIONS, TILE, _update

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    adam = rule == "Adam"
    constants = {"weight": None, "rule": rule, "l2": True, "lerp_high": adam, "starts": False, "nesterov": False}
    constants |= {"tile": TILE} if adam else {"tile": TILE, "second": None}
    types = {"grad": "*fp16", "working": "*i16", "low": "*i16", "first": "*fp32", "second": "*fp32"}
    types |= {"numel": "i32", "number": "i32", "seed": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "fp32") for name in _update.arg_names}
    source = ASTSource(_update, signature, constants)
    text = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=OPTIONS).asm["ptx"]
    assert re.search(r"\b(add|mul)\.rn\.f32\b", text) and re.search(r"\bsqrt\.rn\.f64\b", text)
    assert not re.search(r"\.ftz|\.approx|\.full|\b(fma|mad)\.rn", text)


@pytest.mark.parametrize("numel", [128, 3 << 17])
def test_a_digest_changes_with_bits_and_places(numel, monkeypatch):
    monkeypatch.setattr(on_device, "DIGESTED", 1 << 14)
    weights = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = on_device.digest(weights)
    edits = {"one bit": weights.clone(), "two signs": weights.clone(), "all signs": -weights, "rows": weights.roll(64)}
    edits["one bit"].view(torch.int16)[-1] ^= 1
    edits["two signs"][3:8:4] *= -1
    assert on_device.digest(weights.clone()) == before
    assert [name for name, edited in edits.items() if on_device.digest(edited) == before] == []


def test_the_triton_kernel_has_the_digest_of_torch(launched):
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    launched.interpret(DIGEST, TRITON_INTERPRET="1")


def test_a_broken_triton_is_logged_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "wherry.native.triton_kernel", raising=False)
    device = torch.device("cpu")
    on_device._triton.cache_clear()
    try:
        assert on_device._triton(device) is None and on_device._triton(device) is None
    finally:
        on_device._triton.cache_clear()
    (record,) = caplog.records
    assert "updates on cpu run in torch" in record.getMessage() and "triton" in record.getMessage()
