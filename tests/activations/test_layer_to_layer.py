"""Layer to layer: states on the host and a budget of one unit leave only the running layer on the device."""

from __future__ import annotations

from typing import Any

from tests.engine.harness import settings
from tests.engine.test_counts import padded
from tests.plan import measured

from wherry.plan.counts import Line

HALF = 2


def layer_to_layer(**more: Any) -> dict[str, Any]:
    zero = {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        # A unit at a time, and none ahead of it.
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    blocks = {"activation_checkpointing": {"policy": "recompute", "cpu_checkpointing": True, "offload_min_bytes": 1}}
    return settings(3, 1, 1.0, {"bf16": {"enabled": True}, "zero_optimization": zero, **blocks, **more})


def on_device(lines: Any) -> dict[str, Line]:
    return {line.category: line for line in lines if line.tier == "device"}


def test_an_engine_has_one_layer_and_the_root_on_the_device() -> None:
    config = layer_to_layer(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    found = on_device(measured.measure(config, 1, gpu=True)[0].lines(gpu=True))
    assert not {"parameters", "gradients", "optimizer"} & {c for c, line in found.items() if line.highest}
    units = padded(measured.make()[0], 1)
    block = max(numel for name, numel in units.items() if name != "root")
    assert found["gathered"].highest == HALF * (units["root"] + block)
    # Gradients of a layer that are filled, of one that is reduced, and of two on their way down.
    assert found["buffers"].highest <= 4 * HALF * max(block, units["root"]) + 8192
