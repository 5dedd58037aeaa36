"""Choose the device of a rank, and the tests that may see a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.conftest import wants_gpu

from wherry.parallel import topology
from wherry.plan import probe, rates
from wherry.plan.machines import known


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Three GPUs, of which the second is current; records the devices that are made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize(("rank", "index"), [(None, 1), ("0", 0), ("2", 2), ("4", 1)])
def test_the_gpu_of_a_launched_rank_and_of_a_program_alone(
    rank: str | None, index: int, three_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert topology.default_device() == torch.device("cuda", index)
    assert three_gpus == [torch.device("cuda", index)]


def test_bandwidth_between_gpus_is_measured_by_a_process_that_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launched: object
) -> None:
    monkeypatch.setattr(rates, "_LINK", "print(25e9)")
    assert rates._link(1e9) == 25e9
    monkeypatch.setattr(rates, "_LINK", "raise SystemExit('they do not reach each other')")
    assert rates._link(1e9) == 1e9
    monkeypatch.setattr(rates, "_LINK", "import time; time.sleep(60)")
    monkeypatch.setattr(rates, "LINK_SECONDS", 0.2)
    assert rates._link(1e9) == 1e9
    assert "they do not reach each other" in caplog.text and "did not end" in caplog.text


@pytest.mark.usefixtures("three_gpus")
def test_free_memory_of_another_ranks_gpu_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reading the free memory of a GPU creates a context of this process there."""
    asked: list[int] = []

    def free(gpu: torch.device | int) -> tuple[int, int]:
        asked.append(gpu if isinstance(gpu, int) else gpu.index)
        return 10 + asked[-1], 100

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(probe, "gpu_names", lambda: ["GPU"] * 3)
    monkeypatch.setattr(probe, "_others_worked", lambda: 0.0)
    monkeypatch.setattr(rates, "measure", lambda folder: known("4090"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):  # measured, and known
        assert probe.this_machine(tmp_path).gpu_memory == 11
    assert asked == [1, 1]
    assert probe.this_machine(tmp_path, every_gpu=True).gpu_memory == 10 and asked[2:] == [0, 1, 2]


HERE = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("paths", "marks", "seen"),
    [
        ([HERE], "not slow", False),
        ([HERE / "gpu"], "not slow", True),
        ([f"{HERE}/gpu/test_steps.py::test_equals_plain_pytorch_on_the_cpu"], "", True),
        ([HERE / "gpu", HERE / "tiers"], "", False),
        ([HERE], "gpu", True),
        ([HERE], "not gpu", False),
    ],
)
def test_only_tests_for_a_gpu_see_one(paths: list[object], marks: str, seen: bool) -> None:
    assert wants_gpu(map(str, paths), marks) is seen
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "this test is not for a GPU"
