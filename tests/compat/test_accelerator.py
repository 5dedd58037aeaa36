"""`deepspeed.accelerator` where there are several devices."""

from __future__ import annotations

from types import SimpleNamespace

import torch

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
