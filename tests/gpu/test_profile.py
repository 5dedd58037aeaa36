"""The recorded memory of a step is that of torch's allocator, with its own snapshot and the kernels beside."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings, token_batch
from tests.gpu.warm import DEVICE
from tests.tiers.rows import offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="needs an accelerator: run `pytest tests/gpu` where there is one"),
]


def test_memory_of_a_step_and_the_trace_of_another(tmp_path: Path) -> None:
    config = offload("offload-3-parameters", tmp_path / "disk", "at_step")
    config["wherry"] |= {"profile": {"steps": 3, "folder": str(tmp_path)}}
    engine = engine_of(make_model(), settings(3, more=config))
    for step in range(5):
        loss = engine(*(tensor.to(engine.device) for tensor in token_batch(step, 0, 0)))
        if step == 3:
            after_forward = torch.accelerator.memory_allocated()
        engine.backward(loss)
        engine.step()
    engine.close()
    told = json.loads((tmp_path / "memory-rank0.json").read_text())
    device = [i for i, (_, tier) in enumerate(told["series"]) if tier == "device"]
    forward = [sizes for _, phase, _, sizes in told["samples"] if phase == "forward"][-1]
    assert told["step"] == 4 and abs(sum(forward[i] for i in device) - after_forward) <= 1024
    assert ["optimizer", "host"] in told["series"]
    # Backward runs in a thread of autograd's, and makes tensors that nobody else has named.
    activations = told["series"].index(["activations", "device"])
    backward = [(unit, sizes[activations]) for _, phase, unit, sizes in told["samples"] if phase == "backward"]
    assert max(nbytes for _, nbytes in backward) > forward[activations] > 0
    assert {"blocks.0", "blocks.1", "blocks.2"} <= {unit for unit, _ in backward}
    with gzip.open(tmp_path / "trace-rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "wherry::backward" for event in events)
    if torch.device(engine.device).type == "cuda":
        assert any(event.get("cat") == "kernel" for event in events)
        assert (tmp_path / "snapshot-rank0.pickle").stat().st_size > 0
