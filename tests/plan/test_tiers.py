"""Placements off the device: a dry run holds what a real engine holds, and on a disk and a link what it moves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.measured import config, make, measure, placed
from tests.tiers.rows import ROWS

from wherry import config as configs
from wherry.plan.counts import Line
from wherry.plan.dry_run import count
from wherry.sources import find

# One of each kind, on a device with memory of its own or without: the other rows differ in how many ranks hold what.
CHOSEN = {
    "offload-1": False,
    "offload-2": True,
    "offload-3": False,
    "offload-3-parameters": True,
    "parameters-only": True,
    "disk-3-parameters": False,
    "infinity": True,
}
# Weights that come up for the forward, and for the backward again.
UPS = {"offload-2": 1, "offload-3-parameters": 2, "infinity": 2}


def by_place(lines: Any) -> dict[tuple[str, str], Line]:
    return {(line.category, line.tier): line for line in lines}


@pytest.mark.parametrize("row", CHOSEN)
def test_a_dry_run_holds_and_moves_what_an_engine_does(row: str, tmp_path: Path) -> None:
    given, gpu = placed(*ROWS[row], tmp_path, gradient_clipping=1.0), CHOSEN[row]
    # On a GPU one kernel updates a segment.
    real = measure(given, 2, gpu=gpu, optimizer=partial(torch.optim.AdamW, fused=True) if gpu else torch.optim.AdamW)[0]
    told = count(find(make), configs.load(given), ranks=2, sequence=24, gpu=gpu)
    assert (told.calls, told.bytes) == (real.calls, real.bytes)
    lines, dry = by_place(real.lines(gpu=gpu)), by_place(told.lines(gpu=gpu))
    assert set(dry) == set(lines)
    for place, line in lines.items():
        if place == ("buffers", "host"):
            continue  # an engine runs several updates beside the step, a dry run one by one
        assert dry[place].at_peak == pytest.approx(line.at_peak, rel=0.001, abs=2048), place
    if row not in UPS:
        return
    # Gradients once down, weights up for forward and backward, and states from a disk and back.
    shard = 2 * told.parameters / 2
    state = told.states.get(("optimizer", "disk"), 0)
    weights_on_disk = told.states.get(("parameters", "disk"), 0)
    assert told.moved["down"] == pytest.approx(shard, rel=0.02)
    assert told.moved["up"] == pytest.approx(UPS[row] * shard, rel=0.3)
    assert told.moved["written"] == pytest.approx(state + weights_on_disk, rel=0.02)
    # Host memory keeps some of the weights from forward to backward.
    assert state <= told.moved["read"] <= state + 2 * weights_on_disk


HOST: dict[str, dict[str, Any]] = {
    "checkpoints": {"cpu_checkpointing": True, "offload_min_bytes": 1},
    "everything": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": 1},
}


@pytest.mark.parametrize("block", HOST.values(), ids=HOST)
def test_activations_that_are_put_on_the_host_are_counted_there(block: dict[str, Any]) -> None:
    given = config(1, activation_checkpointing=block, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    told = by_place(count(find(make), configs.load(given), ranks=2, sequence=24, gpu=True).lines(gpu=True))
    real = by_place(measure(given, 2, gpu=True, optimizer=torch.optim.SGD)[0].lines(gpu=True))
    for place in (("buffers", "host"), ("activations", "device")):
        assert told[place].highest == pytest.approx(real[place].highest, rel=0.03), place
    kept = by_place(count(find(make), configs.load(config(1)), ranks=2, sequence=24, gpu=True).lines(gpu=True))
    assert told["activations", "device"].highest < kept["activations", "device"].highest


def test_activations_on_disk_are_counted_there(tmp_path: Path) -> None:
    block = {"policy": "offload", "nvme_path": str(tmp_path), "offload_min_bytes": 1}
    given = config(1, activation_checkpointing=block)
    told = count(find(make), configs.load(given), ranks=2, sequence=24, gpu=True)
    assert by_place(told.lines(gpu=True))["activations", "disk"].highest == told.on_disk > 0
    assert told.moved["written"] == told.moved["read"] > 0
