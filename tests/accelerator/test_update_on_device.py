"""Updates of segments on the device: the host's bits, in its stream, while the host goes on."""

from __future__ import annotations

import pytest
import torch
from tests.accelerator import emulated
from tests.native.cases import RULES, assert_updates_as_the_host, moved, segment

from wherry.native import fallback
from wherry.native.on_device import update_on_device


def test_the_bits_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "DEVICE_CHUNK", 512)
    assert_updates_as_the_host(update_on_device, "emulated")


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_the_host_does_not_wait(state: str) -> None:
    emulated.lateness(1)
    rule = RULES["adamw"](1)
    made = moved(segment(rule, torch.ones(3000), torch.ones(3000), mode="split", state=state), "emulated")
    torch.accelerator.synchronize()
    with emulated.trace() as trace:
        update_on_device([made], [rule], 1.0)
    assert trace.items and not any(item.begun for item in trace.items)
