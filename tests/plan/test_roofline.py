"""Times of a step: each term by what was counted, and the choice among configs by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.plan.measured import WIDTH, config, make, one_block

import wherry
from wherry import config as configs
from wherry.plan import forecaster as forecasters
from wherry.plan.choose import MICRO, ORDER, STAGE, choose, free_keys, nearest_change
from wherry.plan.counts import Counts
from wherry.plan.estimate import Estimate
from wherry.plan.forecaster import HOSTS_PRODUCTS, Forecaster
from wherry.plan.machines import Machine, known
from wherry.plan.model_source import ModelSource
from wherry.plan.parts import Outline
from wherry.sources import find

pytestmark = pytest.mark.usefixtures("dry_runs_once")
H100 = known("h100")


def answer(given: dict[str, Any], machine: Machine = H100, ranks: int = 2) -> Estimate:
    return wherry.estimate(make, given, machine, ranks=ranks, sequence=24)


def terms(given: dict[str, Any], machine: Machine = H100, ranks: int = 2) -> dict[str, float]:
    found = answer(given, machine, ranks).time
    assert found is not None and found.total > 0
    return found.terms


def placed(stage: int, optimizer: str, param: str, folder: Path | None = None, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    for name, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        zero[name] = {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})
    if param == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0
    return config(stage, zero_optimization=zero, **more)


@pytest.mark.long
def test_collectives_are_those_of_the_papers() -> None:
    """A ring sends (N-1)/N of a tensor for a gather or a scatter, and twice that for both."""
    parameters = answer(config(0)).parameters
    link = replace(H100, link=1e9)
    for stage, times, ranks in ((0, 2, 2), (1, 2, 8), (3, 3, 8)):
        told = terms(config(stage), link, ranks)["collectives"] * 1e9
        expected = times * 2 * parameters * (ranks - 1) / ranks
        assert told == pytest.approx(expected, rel=0.15), stage


@pytest.mark.long
def test_copies_take_the_time_of_the_bus() -> None:
    slow, shard = replace(H100, pcie=1e6), 2 * answer(config(0)).parameters / 2
    offload = terms(placed(2, "cpu", "none"), slow)
    assert offload["up"] == pytest.approx(offload["down"], rel=0.05) == pytest.approx(shard / 1e6, rel=0.05)
    assert terms(placed(3, "cpu", "cpu"), slow)["up"] > 1.4 * offload["up"]
    assert terms(config(2), slow)["up"] == terms(config(2), slow)["down"] == 0


def test_states_on_disk_take_the_time_of_the_disk(tmp_path: Path) -> None:
    disk, shard = replace(H100, disk_read=1e6, disk_write=1e6), 2 * answer(config(0)).parameters / 2
    # Masters split: 10 bytes of state an element, or with a copy of the weights 12; there and back at the same time.
    assert terms(placed(2, "nvme", "none", tmp_path), disk)["disk"] == pytest.approx(2 * 6 * shard / 1e6, rel=0.15)


@pytest.mark.long
def test_what_the_device_updates_is_the_bus_s_and_not_the_host_s() -> None:
    slow = replace(H100, stream=1e6)
    host, some, device = (terms(placed(2, "cpu", "none", wherry={"update_on": share}), slow) for share in (0, 0.6, 1))
    assert device["update"] < 1e-3 * host["update"]
    assert 0.3 * host["update"] < some["update"] < 0.9 * host["update"]
    # Up go gradients too, if they have come down, and of the state 10 bytes, masters being split; down go weights.
    assert 4 * host["up"] < device["up"] and 4 * host["down"] < device["down"]


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.long), "fp32"])
def test_the_products_of_muon_are_the_updates(precision: str) -> None:
    slow = replace(H100, matrix=1e6)
    at_step = {"update_policy": "at_step"}
    given = [config(2, 1, precision, optimizer={"type": kind}, wherry=at_step) for kind in ("Muon", "AdamW")]
    found = (wherry.estimate(one_block, each, slow, ranks=1, sequence=24).time for each in given)
    muon, adamw = (time.terms["update"] for time in found if time is not None)
    square, wide = 6 * WIDTH**3, 4 * (4 * WIDTH) * WIDTH**2 + 2 * WIDTH**3
    assert muon - adamw == pytest.approx(5 * (square + 2 * wide) / 1e6, rel=0.01)


@pytest.mark.nightly
def test_products_of_muon_on_the_host_are_told_of() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    notes = [
        answer(
            {"zero_optimization": zero, "optimizer": {"type": "Muon"}, "wherry": {"update_on": where}}, ranks=1
        ).notes
        for where in ("host", "device")
    ]
    assert HOSTS_PRODUCTS in notes[0] and HOSTS_PRODUCTS not in notes[1]


def test_accumulation_repeats_all_but_the_update() -> None:
    one, three = terms(config(3)), terms(config(3, accumulation=3))
    assert three["compute"] == pytest.approx(3 * one["compute"], rel=0.05)
    assert three["collectives"] == pytest.approx(3 * one["collectives"], rel=0.05)
    assert three["update"] == pytest.approx(one["update"], rel=0.01)


def test_micro_batches_that_go_together_send_once_and_keep_more() -> None:
    alone = answer(config(3, accumulation=3))
    together = answer(config(3, accumulation=3, wherry={"accumulation": "layer_major"}))
    assert alone.time is not None and together.time is not None
    assert 3 * together.time.terms["collectives"] == pytest.approx(alone.time.terms["collectives"], rel=0.05)

    def kept(found: Estimate) -> int:
        return sum(row.bytes for row in found.rows if row.category == "activations")

    assert kept(together) > 2 * kept(alone)
    assert any("is counted as engine.train_batch runs it" in note for note in together.notes)


@pytest.mark.nightly
def test_auto_runs_micro_batches_together_where_that_is_faster() -> None:
    """Where the link between ranks is slow; not where nothing travels."""
    source, given = find(make), configs.load({**config(3, accumulation=4), "train_micro_batch_size_per_gpu": 2})
    for ranks, expected in ((2, {ORDER: "layer_major"}), (1, {})):
        forecaster = Forecaster(source, replace(H100, gpus=ranks, link=1e8), ranks, 24)
        choice = choose(given, forecaster.quick, ranks, free=frozenset({ORDER}), confirm=forecaster.exact)
        assert choice.values == expected
    assert all(ORDER in reasons for reasons in [choice.reasons] if choice.values)


@pytest.mark.parametrize(
    "more", [{}, {"activation_checkpointing": {"policy": "recompute"}}], ids=["kept", "recomputed"]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_search_goes_by_less_and_comes_near(stage: int, more: dict[str, Any]) -> None:
    """Within some percent of a run of the very config; what is chosen is run itself."""
    given = configs.load(config(stage, **more) | {MICRO: 16})
    forecaster = Forecaster(find(make), H100, 2, 24)
    quick, exact = forecaster.quick(given), forecaster.exact(given)
    assert quick.time is not None and exact.time is not None
    assert quick.time.total == pytest.approx(exact.time.total, rel=0.1)
    assert quick.uses[0].needed == pytest.approx(exact.uses[0].needed, rel=0.15)
    assert quick.uses[0].needed >= 0.98 * exact.uses[0].needed


@pytest.mark.long
def test_a_search_runs_the_engine_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model alone by micro-batch and recomputation, and an engine for what is asked and what is named."""
    placements: list[str] = []
    count = forecasters.count_by_blocks

    def counted(source: ModelSource, config: configs.Config, outline: Outline, **how: Any) -> Counts:
        placements.append(config.placement().name if how.get("updates", True) else "the model")
        return count(source, config, outline, **how)

    monkeypatch.setattr(forecasters, "count_by_blocks", counted)
    forecaster, given = Forecaster(find(make), H100, 8, 24), configs.load(config(2))
    change = nearest_change(given, forecaster.exact(given), forecaster.quick, confirm=forecaster.exact)
    assert placements.count("the model") == 4 and len(placements) <= 4 + 1 + (2 if change else 1)
    placements.clear()
    forecaster = Forecaster(find(make), H100, 8, 24)
    found = choose(configs.load({}), forecaster.quick, 8, free=free_keys(configs.load({})), confirm=forecaster.exact)
    assert found.tried > 50 and placements.count("the model") == 4 and len(placements) <= 7


def test_what_fits_is_chosen_by_its_rate() -> None:
    whole = answer(config(0), ranks=4).uses[0].needed
    forecaster = Forecaster(find(make), replace(H100, gpus=4, gpu_memory=int(0.8 * whole / 0.92)), 4, 24)
    choice = choose(configs.load(config(0)), forecaster.quick, 4, free=frozenset({STAGE}), confirm=forecaster.exact)
    assert choice.estimate.fits and choice.values[STAGE] > 0 and choice.fitting < choice.tried == 4
