"""Any checkpoint to any layout: every number of ranks, stage and tier loads what another saved, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.harness import Shape, assert_same, on, save_from, state_of
from tests.covering import Case, name_of, pairs
from tests.tiers.rows import zero_block

from wherry.parallel.comm import Comm

RANKS, STAGES, TIERS = (1, 2, 3, 4), (0, 1, 2, 3), ("none", "cpu", "nvme")
CASES = pairs(
    ranks=RANKS, to_ranks=RANKS, stage=STAGES, to_stage=STAGES, tier=TIERS, to_tier=TIERS, precision=("fp32", "bf16")
)


def shape(ranks: int, stage: int, tier: str, precision: str, folder: Path) -> Shape:
    """Lay out an engine with all states on a tier, and with whole masters, as split ones round otherwise."""
    zero = zero_block(stage, tier, tier if stage == 3 else "none", folder)
    more: dict[str, Any] = {"zero_optimization": zero, "wherry": {"master": "whole"}}
    return Shape(ranks, stage, more=more | ({"bf16": {"enabled": True}} if precision == "bf16" else {}))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_checkpoint_loads_into_another_shape(case: Case, tmp_path: Path) -> None:
    source = shape(case["ranks"], case["stage"], case["tier"], case["precision"], tmp_path)
    target = shape(case["to_ranks"], case["to_stage"], case["to_tier"], case["precision"], tmp_path)
    states = save_from(source, tmp_path / "saved")

    def body(engine: Any, comm: Comm) -> None:
        path, client_state = engine.load_checkpoint(tmp_path / "saved")
        assert path == str(tmp_path / "saved" / "global_step2") and client_state == {}
        found = state_of(engine, everywhere=False)
        if comm.rank == 0:
            assert_same(states, found)
        assert engine.global_steps == 2

    on(target, body)


@pytest.mark.parametrize("shape", [Shape(3, 2), Shape(2, 3)], ids=str)
def test_grouping_may_differ(tmp_path: Path, shape: Shape) -> None:
    """Units of other modules cut the flats elsewhere."""
    whole = {"wherry": {"unit_classes": ["TinyLM"]}}
    linear = {"wherry": {"unit_classes": ["Linear", "LayerNorm"]}}
    states = save_from(Shape(shape.ranks, shape.stage, more=whole), tmp_path)

    def body(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(tmp_path)
        assert_same(states, state_of(engine))

    on(Shape(2, 3, more=linear), body)
    on(Shape(shape.ranks, shape.stage), body)
