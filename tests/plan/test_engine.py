"""The memory model against what a real engine holds, rank by rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, make_model, settings, token_batch
from tests.plan.padded import padded_states
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks
from wherry.placement import Placement
from wherry.plan.memory import Cost, plan_flats
from wherry.plan.units import unit_sizes
from wherry.update.optimizer import Lion


def measure(
    model: nn.Module,
    stage: int,
    ranks: int,
    more: dict[str, Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> list[dict[str, int]]:
    """Bytes by state on every rank after two steps, and the most elements that were gathered at a time."""

    def body(comm: Comm) -> dict[str, int]:
        mine = copy.deepcopy(model)
        trained = [p for p in mine.parameters() if p.requires_grad]
        engine, *_ = wherry.initialize(
            model=mine, optimizer=optimizer(trained), config=settings(stage, more=more), mesh=comm
        )
        for step in range(2):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()
        held = {row.state: row.bytes_actual for row in engine.memory()}
        held["peak"] = engine._gatherer.peak_live
        engine.close()
        return held

    return run_ranks(ranks, body)


def assert_predicted(
    model: nn.Module, stage: int, ranks: int, cost: Cost, seen: list[dict[str, int]], threshold: int = 0
) -> None:
    units, placement = unit_sizes(model), Placement.of_stage(stage)
    for rank, held in enumerate(seen):
        found = padded_states(units, placement, ranks, cost, rank=rank, persistence_threshold=threshold)
        told = (found.parameters, found.gradients, found.optimizer)
        assert told == (held["parameters"], held["gradients"], held["optimizer"]), (rank, held)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_precision_to_the_byte(stage: int, ranks: int, precision: str) -> None:
    model = make_model()
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    seen = measure(model, stage, ranks, more)
    assert_predicted(model, stage, ranks, Cost.of(precision, "adamw", split=precision == "bf16"), seen)


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "lion": lambda p: Lion(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_to_the_byte(rule: str) -> None:
    model = make_model()
    seen = measure(model, 2, 2, {"bf16": {"enabled": True}}, RULES[rule])
    assert_predicted(model, 2, 2, Cost.of("bf16", rule, split=True), seen)


def test_gradients_accumulated_in_fp32() -> None:
    model = make_model()
    seen = measure(model, 2, 2, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})
    assert_predicted(model, 2, 2, Cost.of("bf16", "adamw", gradients="fp32", split=True), seen)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters(stage: int) -> None:
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mix" in name or name.startswith("norm")
    seen = measure(model, stage, 2)
    assert_predicted(model, stage, 2, Cost.of("fp32", "adamw"), seen)


def test_flats_below_the_persistence_threshold() -> None:
    model = make_model()
    threshold = 1000  # the root unit is below it, the blocks above
    seen = measure(model, 3, 2, {"zero_optimization": {"stage3_param_persistence_threshold": threshold}})
    cost = Cost.of("fp32", "adamw")
    assert_predicted(model, 3, 2, cost, seen, threshold)
    units, placement = unit_sizes(model), Placement.of_stage(3)
    plain = padded_states(units, placement, 2, cost)
    assert seen[0]["parameters"] > plain.parameters


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_weights(ranks: int) -> None:
    """Without prefetch a unit at a time beside the root; without a limit, and this little model, all of them."""
    model = make_model()
    units = unit_sizes(model)
    planned = plan_flats(units, Placement.of_stage(3), ranks)
    of_unit = [sum(flat.layout.numel for flat in flats) for flats in planned]
    others = [numel for unit, numel in zip(units, of_unit, strict=True) if not unit.root]
    for live, told in ((0, sum(of_unit) - sum(others) + max(others)), (10**9, sum(of_unit))):
        seen = measure(model, 3, ranks, {"zero_optimization": {"stage3_max_live_parameters": live}})
        assert [held["peak"] for held in seen] == [told] * ranks


def test_a_model_on_the_meta_device_has_the_same_units() -> None:
    with torch.device("meta"):
        model = TinyLM()
    assert unit_sizes(model) == unit_sizes(make_model())
