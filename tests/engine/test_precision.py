"""bf16 and fp16: masters, accumulation dtype, loss scale, skipped steps."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from tests.engine.harness import Run, adamw, assert_equal, make_model, settings, token_batch, train_engine
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def plain_mixed(
    model: nn.Module, dtype: torch.dtype, *, steps: int, accumulation: int, accumulate: torch.dtype, scale: float = 1.0
) -> Run:
    """The oracle on one rank: working weights in `dtype`, fp32 masters, gradients summed in `accumulate`."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer = adamw(masters)
    run = Run()
    for step in range(steps):
        sums = [torch.zeros_like(p, dtype=accumulate) for p in model.parameters()]
        total = 0.0
        for micro in range(accumulation):
            loss = model(*token_batch(step, micro, 0))
            (loss * scale).backward()
            total += float(loss.detach()) / accumulation
            for parameter, into in zip(model.parameters(), sums, strict=True):
                into.add_(parameter.grad)
                parameter.grad = None
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad.float() * (1 / (scale * accumulation))
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master.data)
        run.losses.append(total)
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("accumulate", ["bf16", "fp32"])
def test_bf16_equals_fp32_masters_in_plain_pytorch(stage: int, accumulate: str) -> None:
    model = make_model()
    oracle = plain_mixed(
        model,
        torch.bfloat16,
        steps=10,
        accumulation=3,
        accumulate=torch.bfloat16 if accumulate == "bf16" else torch.float32,
    )
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulate}}
    ours = train_engine(model, stage=stage, accumulation=3, steps=10, config=config)
    assert ours.losses == pytest.approx(oracle.losses, rel=2e-3)
    for name, weight in oracle.weights.items():
        assert ours.weights[name].dtype == torch.bfloat16
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-2, atol=1e-2)
    # The oracle rounds as we do: nearly all working weights have the very same bits.
    same = sum(int((ours.weights[n] == w).sum()) for n, w in oracle.weights.items())
    assert same > 0.98 * sum(w.numel() for w in oracle.weights.values())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_stages_agree_in_half_precision(precision: str, clip: float) -> None:
    config = {precision: {"enabled": True}}
    common: dict[str, Any] = {"ranks": 2, "steps": 8, "clip": clip, "config": config}
    runs = [train_engine(make_model(), stage=stage, **common) for stage in range(4)]
    for run in runs:
        assert_equal(run, runs[0])


def test_fp16_equals_its_oracle_at_a_fixed_scale() -> None:
    model = make_model()
    oracle = plain_mixed(model, torch.float16, steps=10, accumulation=1, accumulate=torch.float16, scale=256.0)
    config = {"fp16": {"enabled": True, "loss_scale": 256}}
    ours = train_engine(model, stage=2, steps=10, config=config)
    assert ours.losses == pytest.approx(oracle.losses, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_backward_carries_no_loss_scale_and_is_right(stage: int) -> None:
    """Whatever the model returns, and however often it is called: nothing is scaled behind the user's back."""
    config = {"fp16": {"enabled": True, "loss_scale": 256}}
    ours = train_engine(make_model(), stage=stage, ranks=2, steps=5, config=config)
    plain = train_engine(make_model(), stage=stage, ranks=2, steps=5, config=config, plain_backward=True)
    assert plain.losses == pytest.approx(ours.losses, rel=2e-3)
    assert plain.norms == pytest.approx(ours.norms, rel=2e-2)


def test_gradients_of_inputs_without_the_scale_are_no_part_of_a_window() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = settings(3, 2, more={"fp16": {"enabled": True, "loss_scale": 128}})
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
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


def test_scale_is_for_a_backward_of_ones_own() -> None:
    model = make_model()
    more = {"fp16": {"enabled": True, "loss_scale": 256}}
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(2, 2, more=more))
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


def test_buffers_keep_their_dtype_unless_given_another() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.arange(8, dtype=torch.float32) / 7)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * self.frequencies.to(x.dtype)).sum()

    for asked, dtype in ((None, torch.float32), ("fp16", torch.float16)):
        model = Rotary()
        model.register_buffer("count", torch.tensor(3))
        config = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": asked}}
        engine, *_ = wherry.initialize(model=model, config=config)
        assert (model.frequencies.dtype, model.count.dtype) == (dtype, torch.int64)
        assert model.linear.weight.dtype == torch.bfloat16
        engine.close()


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_auto_cast_casts_the_inputs() -> None:
    model = nn.Linear(4, 4)
    engine, *_ = wherry.initialize(model=model, config={"fp16": {"enabled": True, "auto_cast": True}})
    assert engine(torch.ones(2, 4)).dtype == torch.float16
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model.forward = lambda pair: pair.x
    engine(Pair(torch.ones(2), torch.arange(2)))
    assert isinstance(seen[0], Pair) and (seen[0].x.dtype, seen[0].y.dtype) == (torch.float16, torch.int64)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_begin_with_the_same_weights_where_they_lie_between_two(stage: int) -> None:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():  # each lies in the middle of two bf16 values
            parameter.copy_(((parameter.view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32))

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        config = settings(stage, more={"bf16": {"enabled": True}})
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 1000  # some of stage 3's stay whole
        engine, *_ = wherry.initialize(model=copy.deepcopy(model), optimizer=adamw, config=config, mesh=comm)
        with torch.no_grad():
            seen: dict[str, torch.Tensor] = {}
            for name, module in engine.module.named_modules():
                if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
                    module.register_forward_hook(lambda m, i, o, n=name: seen.update({n: m.weight.clone()}))
            engine(*token_batch(0, 0, 0))
        return seen

    first, *others = run_ranks(3, body)
    assert first
    for other in others:
        for name, weight in first.items():
            assert torch.equal(weight, other[name]), name
