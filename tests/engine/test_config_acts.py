"""Keys of the config that the engine reads itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.engine.harness import engine_of, make_model, settings, train, train_engine

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


def test_lossy_moments_need_a_native_rule() -> None:
    with pytest.raises(WherryError, match=r"state_dtype: bf16 needs Adam.*RMSprop"):
        wherry.initialize(
            model=make_model(), config={"wherry": {"state_dtype": "bf16"}, "optimizer": {"type": "RMSprop"}}
        )


def test_steps_and_their_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "log_level": "info"}
    engine = engine_of(model, settings(2, more=more))
    with caplog.at_level(logging.INFO, logger="wherry"):
        train(engine, 5)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["step 2", "time of 2 steps", "step 4", "time of 2 steps"]
    assert "lr 0.003, gradient norm" in lines[0]
    assert all(phase in lines[1] for phase in ("forward", "backward", "step"))
    logging.getLogger("wherry").setLevel(logging.NOTSET)


def test_keys_without_effect_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Warn, so that scripts without logging print it too; omit keys whose value is the default."""
    zero = {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e6}
    config = {"zero_optimization": zero, "memory_breakdown": True, "train_micro_batch_size_per_gpu": 1}
    with caplog.at_level(logging.INFO, logger="wherry"):
        wherry.initialize(model=make_model(), config=config)[0].close()
        wherry.initialize(model=make_model(), config={**config, "zero_optimization": {}, "memory_breakdown": False})
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "config: without effect here: zero_optimization.sub_group_size, memory_breakdown; "
            "`wherry config explain KEY` says why",
        )
    ]


def test_unit_classes_choose_the_units() -> None:
    engine, *_ = wherry.initialize(
        model=make_model(), config=settings(3, more={"wherry": {"unit_classes": ["Linear", "Embedding"]}})
    )
    names = [unit.name for unit in engine.units]
    assert "blocks.0.mix" in names and "blocks.0" not in names
    with pytest.raises(WherryError, match=r"unit_classes: the model has no module of class Blok; .*Block"):
        wherry.initialize(model=make_model(), config={"wherry": {"unit_classes": ["Blok"]}})
