"""Times of a step: each term by what was counted, and the choice among configs by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.plan.measured import WIDTH, config, make, one_block, placed

import wherry
from wherry import config as configs
from wherry.plan.choose import CHECKPOINTS, MICRO, ORDER, RECOMPUTE, STAGE, TILES, choose
from wherry.plan.counts import STATES
from wherry.plan.estimate import Estimate, Use, answer_of_count
from wherry.plan.forecaster import Forecaster
from wherry.plan.machines import Machine, known
from wherry.plan.roofline import StepTime
from wherry.sources import find

pytestmark = pytest.mark.usefixtures("dry_runs_once")
H100 = known("h100")


def answer(given: dict[str, Any], machine: Machine = H100, ranks: int = 2, build: Any = make) -> Estimate:
    return wherry.estimate(build, given, machine, ranks=ranks, sequence=24)


def terms(given: dict[str, Any], machine: Machine = H100, ranks: int = 2) -> dict[str, float]:
    return answer(given, machine, ranks).time.terms


def test_a_limit_of_host_memory_is_for_states_alone() -> None:
    server = replace(H100, gpus=0)
    (host,) = answer(config(0), server).uses
    states = sum(nbytes for category, nbytes in host.parts.items() if category in STATES)
    assert states < host.needed
    assert [answer(config(0) | {"wherry": {"host_memory": limit}}, server).fits for limit in (states, states - 1)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("stage", "times", "ranks"), [(0, 2, 2), (1, 2, 8), (3, 3, 8)])
def test_collectives_are_those_of_the_papers(stage: int, times: int, ranks: int) -> None:
    """A ring sends (N-1)/N of a tensor for a gather or a scatter, and twice that for both."""
    told = answer(config(stage), replace(H100, link=1e9), ranks)
    expected = times * 2 * told.parameters * (ranks - 1) / ranks
    assert told.time.terms["collectives"] * 1e9 == pytest.approx(expected, rel=0.15)


def test_copies_take_the_time_of_the_bus(tmp_path: Path) -> None:
    slow = replace(H100, pcie=1e6)
    told = answer(placed(2, "cpu", "none", tmp_path), slow)
    shard, offload = 2 * told.parameters / 2, told.time.terms
    assert offload["up"] == pytest.approx(offload["down"], rel=0.05) == pytest.approx(shard / 1e6, rel=0.05)
    assert terms(placed(3, "cpu", "cpu", tmp_path), slow)["up"] > 1.4 * offload["up"]


def test_states_on_disk_take_the_time_of_the_disk(tmp_path: Path) -> None:
    told = answer(placed(2, "nvme", "none", tmp_path), replace(H100, disk_read=1e6, disk_write=1e6))
    shard = 2 * told.parameters / 2
    # Masters split: 10 bytes of state an element, or with a copy of the weights 12; there and back at the same time.
    assert told.time.terms["disk"] == pytest.approx(2 * 6 * shard / 1e6, rel=0.15)


@pytest.mark.long
def test_what_the_device_updates_is_the_bus_s_and_not_the_host_s(tmp_path: Path) -> None:
    slow = replace(H100, stream=1e6)
    host, some, device = (
        terms(placed(2, "cpu", "none", tmp_path, wherry={"update_on": share}), slow) for share in (0, 0.6, 1)
    )
    assert device["update"] < 1e-3 * host["update"]
    assert 0.3 * host["update"] < some["update"] < 0.9 * host["update"]
    # Up go gradients too, if they have come down, and of the state 10 bytes, masters being split; down go weights.
    assert 4 * host["up"] < device["up"] and 4 * host["down"] < device["down"]


def test_the_products_of_muon_are_the_updates() -> None:
    slow, at_step = replace(H100, matrix=1e6), {"update_policy": "at_step"}
    muon, adamw = (
        answer(config(2, 1, "fp32", optimizer={"type": kind}, wherry=at_step), slow, 1, one_block).time.terms["update"]
        for kind in ("Muon", "AdamW")
    )
    square, wide = 6 * WIDTH**3, 4 * (2 * WIDTH) * WIDTH**2 + 2 * WIDTH**3
    assert muon - adamw == pytest.approx(5 * (square + 2 * wide) / 1e6, rel=0.01)


@pytest.mark.long
def test_a_note_says_that_products_of_muon_on_the_host_are_slow(tmp_path: Path) -> None:
    for where in ("host", "device"):
        given = placed(2, "cpu", "none", tmp_path, wherry={"update_on": where}) | {"optimizer": {"type": "Muon"}}
        notes = answer(given, ranks=1, build=one_block).notes
        assert any("a host takes some hundred times longer" in note for note in notes) == (where == "host")


def test_accumulation_repeats_all_but_the_update() -> None:
    one, three = terms(config(3)), terms(config(3, accumulation=3))
    assert three["compute"] == pytest.approx(3 * one["compute"], rel=0.05)
    assert three["collectives"] == pytest.approx(3 * one["collectives"], rel=0.05)
    assert three["update"] == pytest.approx(one["update"], rel=0.01)
    assert one["up"] == one["down"] == one["disk"] == 0


def test_micro_batches_that_go_together_send_once_and_keep_more() -> None:
    alone = answer(config(3, accumulation=3))
    together = answer(config(3, accumulation=3, wherry={"accumulation": "layer_major"}))
    assert 3 * together.time.terms["collectives"] == pytest.approx(alone.time.terms["collectives"], rel=0.05)

    def kept(found: Estimate) -> int:
        return sum(row.bytes for row in found.rows if row.category == "activations")

    assert kept(together) > 2 * kept(alone)
    assert any("is counted as engine.train_batch runs it" in note for note in together.notes)


@pytest.mark.parametrize(("stage", "policy"), [(0, "none"), (3, "recompute")])
def test_a_search_goes_by_less_and_comes_near(stage: int, policy: str) -> None:
    """Within some percent of a run of the very config; what is chosen is run itself."""
    given = configs.load(config(stage, activation_checkpointing={"policy": policy}) | {MICRO: 16})
    forecaster = Forecaster(find(make), H100, 2, 24)
    quick, exact = forecaster.quick(given), forecaster.exact(given)
    assert quick.time.total == pytest.approx(exact.time.total, rel=0.1)
    assert quick.uses[0].needed == pytest.approx(exact.uses[0].needed, rel=0.15)
    assert quick.uses[0].needed >= 0.98 * exact.uses[0].needed


def test_what_fits_is_chosen_by_its_rate() -> None:
    whole = answer(config(0), ranks=4).uses[0].needed
    forecaster = Forecaster(find(make), replace(H100, gpus=4, gpu_memory=int(0.8 * whole / 0.92)), 4, 24)
    choice = choose(configs.load(config(0)), forecaster.quick, 4, free=frozenset({STAGE}), confirm=forecaster.exact)
    assert choice.estimate.fits and choice.values[STAGE] > 0 and choice.fitting < choice.tried == 4


@pytest.mark.parametrize(
    ("usable", "chosen"),
    [
        (400, {RECOMPUTE: "none"}),
        (250, {RECOMPUTE: "recompute"}),
        (150, {RECOMPUTE: "recompute", TILES: "auto"}),
        (80, {RECOMPUTE: "recompute", TILES: "auto", CHECKPOINTS: True}),
    ],
)
def test_activations_are_recomputed_and_in_tiles_only_where_they_do_not_fit(usable: int, chosen: dict) -> None:
    def needing(candidate: configs.Config) -> Estimate:
        block = candidate.activation_checkpointing
        needed = 300 if block.policy == "none" else 100 if candidate.wherry.sequence_tiles else 200
        use = Use("GPU", usable, {"activations": needed // (2 if block.cpu_checkpointing else 1)})
        return replace(answer_of_count(10**6, candidate, H100, 1), uses=(use,))

    given, free = configs.load({RECOMPUTE: "auto"}), frozenset({RECOMPUTE, TILES, CHECKPOINTS})
    assert choose(given, needing, 1, free=free, confirm=needing).values == chosen


@pytest.mark.parametrize(("seconds", "chosen"), [(1.0, {ORDER: "layer_major"}), (2.0, {})])
def test_micro_batches_go_together_where_that_is_faster(seconds: float, chosen: dict) -> None:
    def taking(candidate: configs.Config) -> Estimate:
        took = seconds if candidate.wherry.accumulation == "layer_major" else 2.0
        return replace(answer_of_count(10**6, candidate, H100, 2), time=StepTime({"compute": took}, took))

    given = configs.load(config(3, 4, "fp32"))
    choice = choose(given, taking, 2, free=frozenset({ORDER}), confirm=taking)
    assert choice.values == chosen and choice.reasons.keys() == chosen.keys()
