"""Keys of the config that the engine reads itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.engine.harness import make_model, settings, train_engine

import wherry
from wherry.errors import WherryError


def optimizer_bytes(engine: Any) -> int:
    return next(row.bytes_actual for row in engine.memory() if row.state == "optimizer")


@pytest.mark.parametrize(
    ("stage", "dtype", "per_element", "tolerance"), [(0, "bf16", 4, 0.02), (3, "int8", 2 + 8 / 256, 0.05)]
)
def test_lossy_moments(stage: int, dtype: str, per_element: float, tolerance: float) -> None:
    """Compare their bytes with the formula, and their losses with those of exact moments."""
    common: dict[str, Any] = {"stage": stage, "ranks": 2, "steps": 8, "finish": optimizer_bytes}
    lossy = train_engine(make_model(), config={"wherry": {"state_dtype": dtype}}, **common)
    exact = train_engine(make_model(), **common)
    assert lossy.losses != exact.losses
    assert lossy.losses == pytest.approx(exact.losses, rel=tolerance)
    assert lossy.extra == pytest.approx(exact.extra * per_element / 8, rel=0.02)


def test_keys_without_effect_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Warn, so that scripts without logging print it too; omit keys whose value is the default."""
    zero = {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e6}
    config = {"zero_optimization": zero, "memory_breakdown": True, "train_micro_batch_size_per_gpu": 1}
    with caplog.at_level(logging.INFO, logger="wherry"):
        wherry.initialize(model=make_model(), config=config)[0].close()
        wherry.initialize(model=make_model(), config={**config, "zero_optimization": {}, "memory_breakdown": False})
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "without effect here: zero_optimization.sub_group_size, memory_breakdown;" in line


def test_unit_classes_choose_the_units() -> None:
    own = {"wherry": {"unit_classes": ["Linear", "Embedding"]}}
    engine, *_ = wherry.initialize(model=make_model(), config=settings(3, more=own))
    names = [unit.name for unit in engine.units]
    assert "blocks.0.mix" in names and "blocks.0" not in names


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"wherry": {"unit_classes": ["Blok"]}}, r"unit_classes: the model has no module of class Blok; .*Block"),
        (
            {"wherry": {"state_dtype": "bf16"}, "optimizer": {"type": "RMSprop"}},
            r"state_dtype: bf16 needs Adam.*RMSprop",
        ),
    ],
)
def test_keys_that_do_not_fit_the_model_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WherryError, match=message):
        wherry.initialize(model=make_model(), config=config)
