"""Keys of the config that the engine itself reads."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from tests.engine.harness import adamw, make_model, settings, token_batch, train_engine, train_plain

import wherry
from wherry.errors import WherryError
from wherry.testing import run_ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_tier_of_a_machine_without_a_gpu_is_the_device(stage: int) -> None:
    offload: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        offload["offload_param"] = {"device": "cpu"}
    run = train_engine(make_model(), stage=stage, ranks=2, steps=3, config={"zero_optimization": offload})
    assert run.losses == pytest.approx(train_plain(make_model(), ranks=2, steps=3).losses, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("dtype", "per_element", "tolerance"), [("bf16", 4, 0.02), ("int8", 2 + 8 / 256, 0.05)])
def test_lossy_moments(stage: int, dtype: str, per_element: float, tolerance: float) -> None:
    """Smaller by what they promise, and near the exact ones in their effect."""

    def optimizer_bytes(engine: Any) -> int:
        return next(row.bytes_actual for row in engine.memory() if row.state == "optimizer")

    more = {"wherry": {"state_dtype": dtype}}
    lossy = train_engine(make_model(), stage=stage, ranks=2, config=more, finish=optimizer_bytes)
    exact = train_engine(make_model(), stage=stage, ranks=2, finish=optimizer_bytes)
    assert lossy.losses != exact.losses
    assert lossy.losses == pytest.approx(exact.losses, rel=tolerance)
    assert lossy.extra == pytest.approx(exact.extra * per_element / 8, rel=0.02)


def test_lossy_moments_need_a_native_rule() -> None:
    with pytest.raises(WherryError, match=r"state_dtype: bf16 needs Adam.*RMSprop"):
        wherry.initialize(
            model=make_model(), config={"wherry": {"state_dtype": "bf16"}, "optimizer": {"type": "RMSprop"}}
        )


def test_the_persistence_limit_is_a_limit() -> None:
    model = make_model()

    def body(comm: Any) -> list[str]:
        mine = copy.deepcopy(model)
        config = settings(3)
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 10**6,
            "stage3_model_persistence_threshold": 2500,
        }
        engine, *_ = wherry.initialize(model=mine, config=config, mesh=comm)
        return [flat.name for unit in engine.units for flat in unit.flats if flat.resident]

    assert run_ranks(2, body)[0] == ["root", "blocks.0"]


def test_steps_and_their_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "log_level": "info"}
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(2, more=more))
    with caplog.at_level(logging.INFO, logger="wherry"):
        for step in range(5):
            engine.backward(engine(*token_batch(step, 0, 0)))
            engine.step()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["step 2", "time of 2 steps", "step 4", "time of 2 steps"]
    assert "lr 0.003, gradient norm" in lines[0]
    assert all(phase in lines[1] for phase in ("forward", "backward", "step"))
    logging.getLogger("wherry").setLevel(logging.NOTSET)


def test_keys_without_effect_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """As a warning, that a script which sets up no logging sees too; what asks for nothing else is not told."""
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
