"""The estimators under their known names: what they return and print is the memory model's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wherry.compat.deepspeed import profiling
from wherry.errors import WherryError

ZERO2, ZERO3 = profiling.estimate_zero2_model_states_mem_needs, profiling.estimate_zero3_model_states_mem_needs
BILLION = 10**9


def test_bytes_of_a_node_and_of_a_gpu() -> None:
    # Weights 2 bytes, gradients 2, optimizer 12 of each parameter; what rests on the host half as much again.
    assert ZERO2(BILLION, 8) == (21 * BILLION, 2 * BILLION)
    assert ZERO2(BILLION, 8, cpu_offload=False) == (0, 2 * BILLION + 14 * BILLION // 8)
    assert ZERO2(BILLION, 8, 2, cpu_offload=True, additional_buffer_factor=1) == (7 * BILLION, 2 * BILLION)
    layer = BILLION // 10
    assert ZERO3(BILLION, layer, 8) == (24 * BILLION, 2 * layer, 2 * layer)
    assert ZERO3(BILLION, layer, 8, cpu_offload_params=False) == (21 * BILLION, BILLION // 4 + 2 * layer, 2 * layer)
    assert ZERO3(BILLION, layer, 8, cpu_offload=False) == (0, 2 * BILLION + 2 * layer, 2 * layer)


def test_tables_of_a_model_and_of_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100_000, 1000), nn.Linear(1000, 2000, bias=False))
    model.append(model[0])  # shared, so it counts once
    profiling.estimate_zero3_model_states_mem_needs_all_live(model, 4, 2)
    live = capsys.readouterr().out
    profiling.estimate_zero3_model_states_mem_needs_all_cold(102_000_000, 100_000_000, 4, 2)
    assert live == capsys.readouterr().out
    assert "102M parameters, 100M in the largest layer" in live and "on 2 nodes with 4 GPUs each" in live
    assert len([line for line in live.splitlines() if "optimizer: " in line]) == 3
    profiling.estimate_zero2_model_states_mem_needs_all_live(model)
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if "optimizer: " in line]) == 2
    assert max(map(len, (live + out).splitlines())) <= 80


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(WherryError, match="ranks: expected 1 or more, got 0"):
        ZERO2(BILLION, 0)
    with pytest.raises(WherryError, match="parameters: expected 1 or more, got 0"):
        ZERO3(0, 0)
