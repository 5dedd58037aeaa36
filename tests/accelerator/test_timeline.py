"""Memory over a step where the device has its own, and its own autograd thread: its total is the allocator's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings, token_batch
from tests.tiers.rows import offload

import wherry

ROWS = {"device": 0, "offload-3-parameters": 3, "infinity": 3}


@pytest.mark.parametrize("row", ROWS)
def test_the_device_s_total_is_its_allocator_s(row: str, tmp_path: Path) -> None:
    config = {} if row == "device" else offload(row, tmp_path / "disk", "at_step")
    config["wherry"] = {"update_policy": "at_step", "profile": {"memory_step": 3, "folder": str(tmp_path)}}
    model = make_model()
    engine: Any
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(ROWS[row], more=config)
    )
    for step in range(4):
        ids, targets = (tensor.to(engine.device) for tensor in token_batch(step, 0, 0))
        loss = engine(ids, targets)
        if step == 2:
            after_forward = torch.accelerator.memory_allocated()
        engine.backward(loss)
        engine.step()
    engine.close()
    told = json.loads((tmp_path / "memory-rank0.json").read_text())
    device = [i for i, (_, tier) in enumerate(told["series"]) if tier == "device"]
    forward = [sizes for _, phase, _, sizes in told["samples"] if phase == "forward"]
    # A kernel that is late may hold a block or two for a moment longer.
    assert sum(forward[-1][i] for i in device) - after_forward in (0, 512, 1024)
    # Backward runs in a thread of autograd's, and makes tensors that nobody else has named.
    place = told["series"].index(["activations", "device"])
    backward = [(unit, sizes[place]) for _, phase, unit, sizes in told["samples"] if phase == "backward"]
    assert max(nbytes for _, nbytes in backward) > forward[-1][place] > 0
    assert {"blocks.0", "blocks.1", "blocks.2"} <= {unit for unit, _ in backward}
    rests = {tuple(place) for place in told["series"]}
    assert (row == "device") == (("optimizer", "device") in rests)
    assert (row == "infinity") == (("parameters", "disk") in rests)
