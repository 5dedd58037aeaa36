"""Updates on a GPU, in torch and by the Triton kernel, give the bits of the host's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.gpu.warm import DEVICE
from tests.native.cases import FEW, assert_updates_as_the_host

from wherry import native
from wherry.native import fallback
from wherry.native.on_device import update_on_device

# tests/accelerator/test_streamed.py has that of the emulated device.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None or DEVICE.type != "cuda", reason="needs a CUDA device"),
]


def test_in_torch() -> None:
    def update(segments: Sequence[native.Segment], formulas: Sequence[native.Formula], multiplier: float) -> None:
        for segment, formula in zip(segments, formulas, strict=True):
            fallback.update([segment], formula, multiplier, None)

    assert_updates_as_the_host(update, "cuda")


def test_digest_of_the_triton_kernel_is_that_of_torch() -> None:
    pytest.importorskip("triton", reason="triton comes with a torch for GPUs, or with `pip install triton`")
    for numel in (128, 3 * 4096 * 4 + 128, 9 << 20):
        weights = torch.randn(numel).bfloat16()
        assert int(native.digest(weights.cuda())) == int(native.digest(weights))


def test_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton comes with a torch for GPUs, or with `pip install triton`")
    in_torch = fallback.update

    def on_the_host(segments: Sequence[native.Segment], *how: Any) -> None:
        assert segments[0].grad.device.type == "cpu", "Triton was to update it"
        in_torch(segments, *how)

    monkeypatch.setattr(fallback, "update", on_the_host)
    assert_updates_as_the_host(update_on_device, "cuda", **FEW)
