"""On which device a rank computes, and which tests may see a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.conftest import wants_gpu

from wherry.parallel import topology
from wherry.plan import rates


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Of which the second is current; returns what is made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("rank", "index"), [(None, 1), ("0", 0), ("2", 2), ("4", 1)])
def test_a_launchers_rank_has_its_gpu_and_a_program_by_itself_the_one_it_has_chosen(
    rank: str | None, index: int, three_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert topology.default_device() == torch.device("cuda", index)
    assert three_gpus == [torch.device("cuda", index)]


@pytest.mark.usefixtures("three_gpus")
def test_what_measuring_has_taken_of_a_gpu_is_free_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[object] = []
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    monkeypatch.setattr(rates, "_measure", lambda folder, gpus: done.append(gpus))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    rates.measure(tmp_path)
    assert done == [3, "emptied"]


HERE = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("paths", "marks", "seen"),
    [
        ([HERE], "not slow", False),
        ([HERE / "gpu"], "not slow", True),
        ([f"{HERE}/gpu/test_cuda.py::test_every_byte_is_given_back", HERE / "gpu" / "test_plan.py"], "", True),
        ([HERE / "gpu", HERE / "tiers"], "", False),
        ([HERE], "gpu", True),
        ([HERE], "not gpu", False),
    ],
)
def test_only_tests_for_a_gpu_see_one(paths: list[object], marks: str, seen: bool) -> None:
    assert wants_gpu(map(str, paths), marks) is seen


def test_others_do_not_compute_on_a_gpu_that_is_there() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
