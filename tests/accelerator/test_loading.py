"""The first of eight ranks loads a model of 8 GB within its shards and one unit of device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated

pytest.importorskip("peft", reason="the extra `transformers` is not installed")
pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.engine.test_loading_peak import RANKS, SIZES, engine_of, outline, sparse_folder


@pytest.mark.parametrize("tier", ["device", "host"])
def test_8_gb_are_read_within_the_shards_and_one_unit(tmp_path: Path, tier: str) -> None:
    emulated.lateness(0.0)
    model = outline(SIZES)
    total = sparse_folder(model, tmp_path / "model", 5)
    unit = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    offload: dict[str, Any] = {"offload_param": {"device": "cpu"}} if tier == "host" else {}
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    engine = engine_of(SIZES, tmp_path / "model", offload)
    took = torch.accelerator.max_memory_allocated() - before
    held = {row.tier: row.bytes_actual for row in engine.memory() if row.state == "parameters"}
    engine.close()
    assert sum(held.values()) == pytest.approx(total / RANKS, rel=0.01)
    assert held[tier] > 0.98 * total / RANKS
    assert took < 1.05 * (unit + held.get("device", 0)), (took, unit, held)
