"""`deepspeed.accelerator` where there are several devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from wherry.compat.deepspeed import comm
from wherry.compat.deepspeed.accelerator import Accelerator


def test_a_device_that_is_named_is_asked_and_else_the_current_one() -> None:
    asked: list[int] = []
    accelerator = Accelerator("cuda")
    accelerator._module = SimpleNamespace(
        current_device=lambda: 1,
        get_rng_state=lambda at: asked.append(at) or torch.empty(0),
        set_rng_state=lambda state, at: asked.append(at),
        get_device_properties=lambda at: SimpleNamespace(total_memory=asked.append(at) or 7),
    )
    for index in (None, 0, 1):
        accelerator.set_rng_state(accelerator.get_rng_state(index), index)
        assert accelerator.total_memory(index) == 7
    assert asked == [1] * 3 + [0] * 3 + [1] * 3


@pytest.mark.parametrize(
    ("kind", "own", "backend"),
    [("cuda", "nccl", "cpu:gloo,cuda:nccl"), ("xpu", "xccl", "cpu:gloo,xpu:xccl"), ("privateuseone", "gloo", "gloo")],
)
def test_devices_of_a_kind_communicate_by_its_own_backend(
    kind: str, own: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
    accelerator = Accelerator(kind)
    assert accelerator.communication_backend_name() == own
    accelerator.range_push("a span")
    accelerator.range_pop()
    monkeypatch.setattr(comm, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(comm, "default_device", lambda: torch.device(kind, 0))
    assert {comm._backend(asked) for asked in (None, "nccl", own)} == {backend}
    assert comm._backend("mpi") == "mpi"


def test_tensors_of_a_device_are_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(is_available=lambda: False))
    device = Accelerator("meta")
    assert (device.HalfTensor([1]).dtype, device.HalfTensor([1]).device.type) == (torch.float16, "meta")
    assert not device.is_available() and device.supported_dtypes()[0] == torch.float32
