"""A model that is larger than the device writes what one that fits does."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tests.accelerator import emulated
from tests.train.exported import saved

from wherry.cli import main
from wherry.train.presets import Shape

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")


def test_weights_that_do_not_fit_rest_in_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = Shape(layers=6, hidden=256, heads=4, sequence=24)
    assert main(["export", str(saved(tmp_path / "in", shape=shape, heads=4)), str(tmp_path / "out")]) == 0
    told = []
    for free in (None, 16 << 20):
        gc.collect()
        torch.emulated.empty_cache()
        emulated.limit(free)
        capsys.readouterr()
        assert main(["generate", str(tmp_path / "out"), "ab", "--temperature", "0", "--max-new-tokens", "30"]) == 0
        told.append(capsys.readouterr())
    assert "18.4 MiB of weights in float32, on one device: " in told[0].err
    assert "resting in host memory, a block at a time on the device: " in told[1].err
    assert told[0].out == told[1].out and len(told[0].out) == 33
