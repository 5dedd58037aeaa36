"""Placements off the device: dry runs, the memory model and real engines agree on what is where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.measured import make, measure, updates_begin_late
from tests.plan.test_dryrun import ALONE, config
from tests.plan.test_peaks import profiled
from tests.tiers.rows import ROWS
from torch import nn

from wherry import config as configs
from wherry.dryrun import Line, dry_run
from wherry.placement import Tier
from wherry.plan import setting as setting_room
from wherry.plan.peaks import buffers, peak
from wherry.plan.profile import Profile
from wherry.plan.setting import Setting
from wherry.plan.units import unit_sizes
from wherry.sources import find
from wherry.update import optimizer_states

# One of each kind: the others differ from these in how many ranks hold what, and not in where it rests.
CHOSEN = (
    "offload-1",
    "offload-2",
    "offload-3",
    "offload-3-parameters",
    "parameters-only",
    "disk-3-parameters",
    "infinity",
)

PLACED = ROWS | {"disk-1": (1, "nvme", "none")}


def placed(
    row: str,
    folder: Path,
    accumulation: int = 1,
    clip: float = 1.0,
    buckets: dict[str, int] = ALONE,
    ratio: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    stage, optimizer, param = PLACED[row]
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0} | buckets
    for name, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        zero[name] = {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})
    if optimizer != "none":
        zero["offload_optimizer"]["ratio"] = ratio
    if param == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0
    return config(stage, accumulation, gradient_clipping=clip, zero_optimization=zero, **more)


def by_place(lines: Any) -> dict[tuple[str, str], Line]:
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        found[line.category, line.tier] = line
    return found


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("row", CHOSEN)
def test_a_dry_run_holds_what_an_engine_holds(row: str, gpu: bool, tmp_path: Path) -> None:
    given = placed(row, tmp_path)
    real_lines, calls, nbytes = measure(given, 2, gpu=gpu)[0]
    told = dry_run(find(make), given, ranks=2, sequence=24, gpu=gpu)
    assert (told.calls, told.bytes) == (calls, nbytes)
    real, dry = by_place(real_lines), by_place(told.memory)
    assert set(dry) == set(real)
    for place, line in real.items():
        if place == ("buffers", "host"):
            continue  # updates run beside the step in an engine, several at a time, and one by one in a dry run
        assert dry[place].at_peak == pytest.approx(line.at_peak, rel=0.001, abs=2048), place


def modelled(given: dict[str, Any], ranks: int, rank: int, gpu: bool) -> tuple[dict[tuple[str, str], int], int]:
    """By the memory model: bytes of each category by place, each at its highest, and the device's highest sum."""
    setting, found = Setting.of(configs.load(given), ranks, gpu=gpu), profiled()
    told: defaultdict[tuple[str, str], int] = defaultdict(int)
    for category, tier, held in setting.rows(found, rank):
        told[category, str(tier)] += held
    highest, through = peak(found, setting), buffers(found, setting) + found.buffers + found.inputs
    device = sum(held for (_, tier), held in told.items() if tier == "device")
    device += highest.gathered + highest.activations + highest.merged + through
    told["gathered", "device"], told["activations", "device"] = highest.highest_gathered, highest.highest_working
    told["buffers", "device"] = through
    return told, device


# Of flats as small as these, half is what buffers are rounded up to: it is compared with `Even` ones.
STAGING = ("buffers", "host")


def assert_follows(
    given: dict[str, Any],
    ranks: int,
    rank: int,
    gpu: bool,
    lines: Iterable[Line],
) -> None:
    lines = list(lines)
    told, device = modelled(given, ranks, rank, gpu)
    for line in lines:
        place = line.category, line.tier
        if place != STAGING:
            assert told[place] == pytest.approx(line.highest, rel=0.03, abs=2048), place
    assert device == pytest.approx(sum(line.at_peak for line in lines if line.tier == "device"), rel=0.03)


@pytest.mark.parametrize(("accumulation", "clip"), [(1, 1.0), (1, 0.0), (3, 1.0)])
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("row", CHOSEN)
def test_the_memory_model_follows(
    row: str, gpu: bool, accumulation: int, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates_begin_late(monkeypatch)
    given = placed(row, tmp_path, accumulation, clip)
    told = dry_run(find(make), given, ranks=4, rank=1, sequence=24, gpu=gpu)
    assert_follows(given, 4, 1, gpu, told.memory)


class Even(nn.Module):
    """Flats that come to whole pages in every type, shared out between two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("row", [row for row, (_, *tiers) in PLACED.items() if "nvme" in tiers])
def test_what_is_read_to_host_memory_follows_real_engines(
    row: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (setting_room, optimizer_states):
        monkeypatch.setattr(module, "BUCKET_NUMEL", 1)
    given, found = placed(row, tmp_path, wherry={"update_policy": "at_step"}), Profile.of_sizes(unit_sizes(Even()), 2)
    for block in ("offload_optimizer", "offload_param"):
        given["zero_optimization"][block]["buffer_count"] = 2
    setting = Setting.of(configs.load(given), 2, gpu=gpu)
    inputs = torch.zeros(1, 256, dtype=torch.bfloat16)
    for rank, (lines, _, _) in enumerate(measure(given, 2, gpu=gpu, build=lambda: (Even(), (inputs,)))):
        told = sum(nbytes for _, tier, nbytes in setting.rows(found, rank) if tier is Tier.HOST)
        assert told == pytest.approx(sum(line.highest for line in lines if line.tier == "host"), rel=0.03)
        staged = next(line.highest for line in lines if (line.category, line.tier) == STAGING)
        stated = sum(line.highest for line in lines if line.tier == "host" and line.category != "buffers")
        assert told - stated == pytest.approx(staged, rel=0.03)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("row", PLACED)
def test_the_memory_model_follows_real_engines(row: str, ranks: int, tmp_path: Path) -> None:
    """With the defaults, so that small flats travel together."""
    given = placed(row, tmp_path, buckets={})
    for rank, (lines, _, _) in enumerate(measure(given, ranks)):
        assert_follows(given, ranks, rank, False, lines)


def test_weights_that_are_shared_a_second_time_near_by() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2, **ALONE}
    given = config(3, zero_optimization=zero)
    for rank, (lines, _, _) in enumerate(measure(given, 4)):
        assert_follows(given, 4, rank, False, lines)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("row", ["disk-3-parameters", "infinity"])
def test_updates_in_the_backward_of_real_engines(
    row: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model counts as if no update had ended before the backward: a bound, which is met when none has."""
    updates_begin_late(monkeypatch)
    given = placed(row, tmp_path, clip=0.0)
    assert Setting.of(configs.load(given), ranks).resting.brief
    for rank, (lines, _, _) in enumerate(measure(given, ranks)):
        assert_follows(given, ranks, rank, False, lines)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("row", "ratio"),
    [("offload-0", 0.3), ("offload-2", 0.5), ("offload-3-parameters", 0.3), ("disk-3-parameters", 0.6)],
)
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["at the step", "in the backward"])
def test_a_share_of_the_optimizer_stays(
    row: str, ratio: float, gpu: bool, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates_begin_late(monkeypatch)
    given = placed(row, tmp_path, clip=clip, ratio=ratio)
    # On a GPU it is the kernel that updates a segment at once; torch's others make tensors as large as the state.
    fused = partial(torch.optim.AdamW, fused=True)
    for rank, (lines, _, _) in enumerate(measure(given, 2, gpu=gpu, optimizer=fused)):
        assert_follows(given, 2, rank, gpu, lines)
    away = "disk" if row.startswith("disk") else "host"
    if gpu or away == "disk":
        states, _ = modelled(given, 2, 0, gpu)
        assert 0.2 < states["optimizer", away] / states["optimizer", "device"] < 5


def test_updates_that_a_gpu_makes_in_the_backward_give_back_their_gradients(tmp_path: Path) -> None:
    given = placed("infinity", tmp_path, clip=0.0, ratio=0.0)
    for rank, (lines, _, _) in enumerate(measure(given, 2, gpu=True, optimizer=partial(torch.optim.AdamW, fused=True))):
        assert_follows(given, 2, rank, True, lines)


def test_an_update_on_a_gpu_has_its_gradients_in_fp32_beside_it(tmp_path: Path) -> None:
    """What is highest of an update comes after what is highest of the step, where activations are few."""
    setting = Setting.of(configs.load(placed("offload-0", tmp_path, ratio=0.0)), 2, gpu=True)
    found = profiled()
    few = replace(found, moments=tuple(moment._replace(activations=0) for moment in found.moments))
    # Small flats share a record, and what a record updates is there at once.
    assert peak(few, setting).highest_working == 4 * sum(map(setting.updated, chain(*setting.flats(found))))
