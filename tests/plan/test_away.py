"""Activations that are put away: plans against dry runs and real engines, on the tier where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.measured import LENGTH, MICRO, WIDTH, make, measure
from tests.plan.test_dryrun import config
from tests.plan.test_peaks import profiled
from tests.plan.test_tiers import by_place

import wherry
from wherry import config as configs
from wherry.dryrun import Line, dry_run
from wherry.plan.estimate import Estimate
from wherry.plan.imagined import FakeStore
from wherry.plan.machine import described, known
from wherry.plan.peaks import peak
from wherry.plan.profile import Profile, Recompute
from wherry.plan.setting import Setting
from wherry.sources import find

# Between the bytes of a stream of the little model, and those of what is four times as wide.
BETWEEN = 7000
HOST: dict[str, dict[str, Any]] = {
    "checkpoints": {"cpu_checkpointing": True, "offload_min_bytes": 1},
    "every second": {"cpu_checkpointing": True, "every": 2, "offload_min_bytes": 1},
    "everything": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": 1},
    "what is large": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": BETWEEN},
}


def planned(given: dict[str, Any], *, gpu: bool) -> tuple[Profile, int]:
    """The profile, and the most bytes of the device that are neither states nor gathered."""
    loaded = configs.load(given)
    found = profiled(recompute=Recompute.of(loaded, gpu=gpu))
    return found, peak(found, Setting.of(loaded, 2, gpu=gpu)).highest_working


def highest(lines: Any) -> dict[tuple[str, str], int]:
    return {place: line.highest for place, line in by_place(lines).items()}


@pytest.mark.parametrize("block", HOST.values(), ids=HOST)
def test_what_is_put_on_the_host_is_counted_there(block: dict[str, Any]) -> None:
    # Its update makes nothing on a device that is as large.
    given = config(1, activation_checkpointing=block, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    found, working = planned(given, gpu=True)
    runs: list[tuple[Line, ...] | list[Line]] = [dry_run(find(make), given, ranks=2, sequence=24, gpu=True).memory]
    runs += [lines for lines, _, _ in measure(given, 2, gpu=True, optimizer=torch.optim.SGD)]
    for lines in runs:
        seen = highest(lines)
        assert found.on_host == seen["buffers", "host"]
        assert working == pytest.approx(seen["activations", "device"], rel=0.03)
    kept, everything = planned(config(1), gpu=True)
    assert found.on_disk == 0 < found.sent <= found.on_host
    assert working < everything and found.kept < kept.kept


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_what_is_put_on_disk_is_counted_there(
    policy: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[FakeStore] = []

    class Told(FakeStore):
        def __init__(self, paths: Any, **more: Any) -> None:
            super().__init__(paths, **more)
            stores.append(self)

    monkeypatch.setattr("wherry.dryrun.FakeStore", Told)
    block = {"policy": policy, "nvme_path": str(tmp_path), "offload_min_bytes": 1}
    given = config(1, activation_checkpointing=block, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    found, working = planned(given, gpu=gpu)
    seen = highest(dry_run(find(make), given, ranks=2, sequence=24, gpu=gpu).memory)
    (store,) = stores
    assert found.on_disk == store.reserved >= found.sent > 0
    # Through buffers that are few.
    assert found.on_host == seen["buffers", "host"]
    assert working == pytest.approx(seen["activations", "device"], rel=0.03)


def test_a_host_that_is_the_device_keeps_what_would_be_put_there() -> None:
    given = config(1, activation_checkpointing=HOST["everything"])
    found, working = planned(given, gpu=False)
    assert found.same(planned(config(1), gpu=False)[0])
    for lines, _, _ in measure(given, 2):
        assert working == pytest.approx(highest(lines)["activations", "device"], rel=0.03)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("more", [{}, HOST["checkpoints"]], ids=["where they are", "on the host"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_checkpoints_that_ranks_share_out_each_has_a_part(ranks: int, more: dict[str, Any], gpu: bool) -> None:
    given = config(0, activation_checkpointing=more | {"partition_activations": True})
    given["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    loaded = configs.load(given)
    setting = Setting.of(loaded, 1, gpu=gpu)
    found, whole = (profiled(recompute=Recompute.of(loaded, gpu=gpu, tensor=each)) for each in (ranks, 1))
    working = peak(found, setting).highest_working
    for lines, _, _ in measure(given, ranks, gpu=gpu, optimizer=torch.optim.SGD, tensor=True):
        seen = highest(lines)
        assert working == pytest.approx(seen["activations", "device"], rel=0.03)
        assert found.on_host == seen.get(("buffers", "host"), 0)
    # Inputs of four blocks, of which a part stays.
    checkpoints = 4 * MICRO * LENGTH * WIDTH * 2
    if not (more and gpu):
        assert whole.kept - found.kept == checkpoints - checkpoints // ranks
    # Gathered once each, which is half of what a sum sends.
    assert found.joined - whole.joined == checkpoints // 2


def test_ranks_that_share_the_model_share_out_its_checkpoints() -> None:
    def told(more: dict[str, Any]) -> Estimate:
        given = config(0, activation_checkpointing={"policy": "recompute"} | more)
        return wherry.estimate("gpt2-10m", given, "h100", tensor_parallel=2)

    whole, parts = told({}), told({"partition_activations": True})
    assert on(parts, "device") < on(whole, "device") and not parts.notes
    assert whole.time is not None and parts.time is not None
    assert parts.time.terms["collectives"] > whole.time.terms["collectives"]


def answer(block: dict[str, Any], **sizes: Any) -> Estimate:
    machine = described(known("4090"), **sizes)
    given = config(0, activation_checkpointing=block) | {"train_micro_batch_size_per_gpu": 32}
    return wherry.estimate(make, given, machine, ranks=1, sequence=24)


def on(found: Estimate, tier: str) -> int:
    return sum(row.bytes for row in found.rows if row.category == "activations" and row.tier == tier)


def test_an_answer_has_them_where_they_are_and_the_time_of_their_way(tmp_path: Path) -> None:
    kept, again, away = answer({}), answer({"policy": "recompute"}), answer(HOST["everything"])
    assert on(kept, "host") == on(again, "host") == 0 < on(away, "host")
    assert on(away, "device") < on(kept, "device")
    assert (kept.recompute, again.recompute, away.recompute) == (False, True, False)
    assert kept.time is not None and away.time is not None
    assert away.time.terms["up"] == away.time.terms["down"] > 0 == kept.time.terms["up"]
    disk = answer({"policy": "offload", "nvme_path": str(tmp_path), "offload_min_bytes": 1})
    assert on(disk, "disk") > 0 and disk.uses[-1].place == "disk"
    assert disk.time is not None and disk.time.terms["disk"] > 0
    needed = away.uses[1].needed
    assert away.fits and not answer(HOST["everything"], host_memory=needed).fits
    here = answer(HOST["everything"], gpus=0)
    assert [(row.category, row.tier, row.bytes) for row in here.rows] == [
        (row.category, row.tier, row.bytes) for row in answer({}, gpus=0).rows
    ]
    assert any("activations stay where they are" in note for note in here.notes)
