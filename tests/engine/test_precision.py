"""bf16 and fp16: masters, accumulation dtype, loss scale, skipped steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    assert_same,
    engine_of,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train_engine,
    train_masters,
)
from torch import nn

import wherry
from wherry.errors import WherryError


@pytest.mark.parametrize(("stage", "accumulate"), [(0, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")])
def test_bf16_equals_fp32_masters_in_plain_pytorch(stage: int, accumulate: str) -> None:
    model = make_model()
    dtype = torch.bfloat16 if accumulate == "bf16" else torch.float32
    oracle = train_masters(model, torch.bfloat16, steps=6, accumulation=3, accumulate=dtype)
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulate}}
    ours = train_engine(model, stage=stage, accumulation=3, steps=6, config=config)
    assert ours.losses == pytest.approx(oracle.losses, rel=2e-3)
    for name, weight in oracle.weights.items():
        assert ours.weights[name].dtype == torch.bfloat16
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-2, atol=1e-2)
    # The oracle rounds alike: nearly all working weights have the same bits.
    same = sum(int((ours.weights[n] == w).sum()) for n, w in oracle.weights.items())
    assert same > 0.98 * sum(w.numel() for w in oracle.weights.values())


def test_fp16_equals_its_oracle_at_a_fixed_scale() -> None:
    model = make_model()
    oracle = train_masters(model, torch.float16, steps=6, scale=256.0)
    config = {"fp16": {"enabled": True, "loss_scale": 256}}
    ours = train_engine(model, stage=2, steps=6, config=config)
    assert ours.losses == pytest.approx(oracle.losses, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_backward_carries_no_loss_scale(stage: int) -> None:
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "config": {"fp16": {"enabled": True, "loss_scale": 256}}}
    ours = train_engine(make_model(), stage=stage, **common)
    plain = train_engine(make_model(), stage=stage, plain_backward=True, **common)
    assert plain.losses == pytest.approx(ours.losses, rel=2e-3)
    assert plain.norms == pytest.approx(ours.norms, rel=2e-2)


def test_gradients_of_inputs_without_the_scale_are_outside_of_the_window() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = settings(3, 2, more={"fp16": {"enabled": True, "loss_scale": 128}})
    engine = engine_of(model, config)
    x = torch.ones(1, 4, dtype=torch.float16, requires_grad=True)
    engine.backward(engine(x).sum())
    assert torch.autograd.grad(engine(x).sum(), x)[0].isfinite().all()
    engine.backward(engine(x).sum())
    assert engine.has_gradients()
    engine.step()
    engine.backward(engine(x).sum())
    with pytest.raises(WherryError, match="carry the loss scale and some do not"):
        engine(x).sum().backward()
    engine.close()


def test_scale_is_for_a_plain_backward() -> None:
    model = make_model()
    more = {"fp16": {"enabled": True, "loss_scale": 256}}
    engine = engine_of(model, settings(2, 2, more=more))
    unused = engine.scale(engine(*token_batch(0, 0, 0)))
    assert float(unused.detach()) > 256
    norms = []
    for scaled in (True, False):
        for micro in range(2):
            loss = engine(*token_batch(0, micro, 0))
            (engine.scale(loss) if scaled else loss).backward()
        norms.append(math.hypot(*engine.gradient_norms().values()))
        engine.zero_grad()
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)
    engine.scale(engine(*token_batch(0, 0, 0))).backward()
    with pytest.raises(WherryError, match=r"engine\.scale\(loss\)\.backward"):
        engine(*token_batch(0, 1, 0)).backward()


@pytest.mark.parametrize(("asked", "dtype"), [(None, torch.float32), ("fp16", torch.float16)])
def test_buffers_keep_their_dtype_unless_the_config_has_one(asked: str | None, dtype: torch.dtype) -> None:
    model: Any = nn.Linear(8, 8)
    model.register_buffer("frequencies", torch.arange(8) / 7)
    model.register_buffer("count", torch.tensor(3))
    config = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": asked}}
    with wherry.initialize(model=model, config=config)[0]:
        assert (model.frequencies.dtype, model.count.dtype) == (dtype, torch.int64)
        assert model.weight.dtype == torch.bfloat16


def test_auto_cast_casts_the_inputs() -> None:
    model = nn.Linear(4, 4)
    engine, *_ = wherry.initialize(model=model, config={"fp16": {"enabled": True, "auto_cast": True}})
    assert engine(torch.ones(2, 4)).dtype == torch.float16
    model.forward = lambda given: (given["x"].dtype, given["n"][0].dtype)
    assert engine({"x": torch.ones(2), "n": [torch.arange(2)]}) == (torch.float16, torch.int64)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_round_initial_weights_alike(stage: int) -> None:
    """Start from weights in the middle of two bf16 values; at stage 3 some stay whole."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(((parameter.view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32))

    def use(engine: Any) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        for name, module in engine.module.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.register_forward_hook(lambda m, i, o, n=name: seen.update({n: m.weight.clone()}))
        with torch.no_grad():
            engine(*token_batch(0, 0, 0))
        return seen

    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage3_param_persistence_threshold": 1000}}
    first, *others = on_ranks(use, ranks=3, stage=stage, model=model, config=config)
    assert first
    for other in others:
        assert_same(other, first)
