"""What a step moves, by the roofline, against what the engine moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.plan.measured import make
from tests.plan.test_dryrun import config
from tests.plan.test_peaks import profiled

import wherry
from wherry import config as configs
from wherry.activations import build
from wherry.dryrun import dry_run
from wherry.plan import estimate as estimates
from wherry.plan.estimate import Estimate
from wherry.plan.machine import known
from wherry.plan.quantities import seconds
from wherry.plan.roofline import collective_bytes, step_time
from wherry.plan.setting import Setting
from wherry.sources import find


def test_backward_gathers_of_a_node_stay_in_it() -> None:
    ranks, size = 4, 2
    given = config(3, accumulation=2)
    given["zero_optimization"]["zero_hpz_partition_size"] = size
    told = dry_run(find(make), given, ranks=ranks, sequence=24)
    found, setting = profiled(), Setting.of(configs.load(given), ranks)
    sizes = [sum(each.layout.numel for each in unit) for unit in setting.flats(found)]
    root = sum(numel for numel, unit in zip(sizes, found.units, strict=True) if unit.root)
    sent = collective_bytes(setting, sum(sizes), sum(sizes), sum(sizes))
    # The formula gathers the root unit for the backward as well.
    assert told.bytes[f"all_gather within nodes of {size}"] / size == sent.near - 2 * 2 * root / size
    whole = told.bytes["all_gather"] + told.bytes["reduce_scatter"]
    assert (ranks - 1) / ranks * whole == pytest.approx(sent.within, rel=0.001)


def test_gathers_in_the_node_go_at_its_own_rate() -> None:
    machine, found = replace(known("h100"), nodes=2), profiled()

    def collectives(size: int) -> float:
        given = config(3)
        given["zero_optimization"]["zero_hpz_partition_size"] = size
        return step_time(found, Setting.of(configs.load(given), 16, gpu=True), machine).terms["collectives"]

    # Of two gathers and a reduction one gather is left to the link, of 7/8 and not 15/16 of the weights.
    expected = 2 / 3 + (7 / 8) / (3 * 15 / 16) * machine.network / machine.link
    assert collectives(8) / collectives(1) == pytest.approx(expected, rel=0.01)


def test_micro_batches_that_go_together_send_what_one_does() -> None:
    found, one = profiled(), Setting.of(configs.load(config(3)), 4)
    elements = sum(each.layout.numel for unit in one.flats(found) for each in unit)
    for order, times in (("layer_major", 1), ("step_major", 3), ("auto", 3)):
        for stage in (2, 3):
            settings = [
                Setting.of(configs.load(config(stage, accumulation=k, wherry={"accumulation": order})), 4)
                for k in (1, 3)
            ]
            travelling = elements if stage == 3 else 0
            alone, window = (collective_bytes(each, elements, elements, travelling).within for each in settings)
            refreshed = 3 / 4 * 2 * (elements - travelling)
            assert window - refreshed == times * (alone - refreshed), (order, stage)
    # As the real engine's second window does on imagined ranks.
    given = config(3, accumulation=3, wherry={"accumulation": "layer_major"})
    together = dry_run(find(make), given, ranks=4, sequence=24)
    alone = dry_run(find(make), config(3), ranks=4, sequence=24)
    assert (together.calls, together.bytes) == (alone.calls, alone.bytes)


def test_a_plan_says_in_which_order_it_counts_a_window() -> None:
    def told(order: str, ranks: int = 8, **more: Any) -> Estimate:
        given = config(3, accumulation=8, wherry={"accumulation": order}, **more)
        return wherry.estimate(lambda: make(), given, "h100", ranks=ranks, sequence=24)

    def kept(found: Estimate) -> int:
        return sum(row.bytes for row in found.rows if row.category == "activations")

    auto, alone, together = (told(order) for order in ("auto", "step_major", "layer_major"))
    assert together.time is not None
    assert auto.time == alone.time and auto.rows == alone.rows and not alone.notes
    (note,) = auto.notes
    assert "engine.train_batch runs 8 together" in note and seconds(together.time.total) in note
    (note,) = together.notes
    assert "is counted as engine.train_batch runs it" in note
    terms = [each.time.terms["collectives"] for each in (together, alone) if each.time]
    assert 8 * terms[0] == pytest.approx(terms[1])
    assert kept(together) > kept(alone) + 6 * profiled().kept
    assert not told("auto", ranks=1).notes  # nothing travels
    assert estimates.SHARE_OF_FREE == build.SHARE_OF_FREE
