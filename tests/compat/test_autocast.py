"""`deepspeed.runtime.torch_autocast`, and a torch.autocast around an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.compat.deepspeed import autocast
from wherry.compat.deepspeed.config import load
from wherry.compat.deepspeed.engine import DeepSpeedEngine


def engine_of(**more: Any) -> Any:
    config = load({"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {}}, **more})
    return wherry.initialize(model=nn.Linear(4, 4), config=config, engine_class=DeepSpeedEngine)[0]


@pytest.mark.parametrize(("asked", "inside"), [(False, torch.float32), (True, torch.bfloat16)])
def test_around_an_engine_the_config_decides(monkeypatch: pytest.MonkeyPatch, asked: bool, inside: torch.dtype):
    # As on a GPU, which is the device that it is asked of.
    on_cpu = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": on_cpu(device))
    said: list[str] = []
    monkeypatch.setattr(autocast, "warning_once", said.append)
    engine = engine_of(torch_autocast={"enabled": asked, "dtype": "bfloat16"})
    x = torch.randn(2, 4)
    assert engine(x).dtype is inside and not said
    with torch.autocast("cpu", torch.bfloat16):
        assert engine(x).dtype is inside and torch.mm(x, x.T).dtype is torch.bfloat16
    assert [text.startswith("torch.autocast is on around") for text in said] == [True] * (not asked)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_travels_in_the_type_of_autocast_is_marked(stage: int):
    half = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    for names, given, marked in (
        (None, half, True),
        (["torch.nn.Linear"], half, True),
        (["torch.nn.LayerNorm"], half, False),
        (None, {"communication_data_type": "bf16"}, True),
        (None, half | {"communication_data_type": "fp32"}, False),
    ):
        more = {} if names is None else {"lower_precision_safe_modules": names}
        engine = engine_of(torch_autocast={"enabled": True, "dtype": "bfloat16", **more}, **given)
        assert [autocast.has_comm_dtype(p) for p in engine.module.parameters()] == [marked] * 2, (names, given)
        if marked:
            assert autocast.get_comm_dtype(engine.module.weight) is torch.bfloat16
        engine.destroy()
    with pytest.raises(ValueError, match="lower_precision_safe_modules"):
        engine_of(torch_autocast={"enabled": True, "lower_precision_safe_modules": ["torch.nn.Nothing"]})


def test_nobody_marks_a_parameter_whose_gradient_travels_in_its_own_type():
    engine = engine_of(torch_autocast={"enabled": True}, zero_optimization={"stage": 2})
    weight = engine.module.weight
    assert not autocast.has_comm_dtype(weight) and autocast.get_comm_dtype(weight) is torch.float32
    setattr(weight, autocast.PARAM_COMM_DTYPE_ATTR_NAME, torch.bfloat16)
    assert autocast.has_comm_dtype(weight) and autocast.get_comm_dtype(weight) is torch.bfloat16
    assert autocast.get_allgather_dtype(weight, weight.detach()) is torch.float32
    engine.destroy()
