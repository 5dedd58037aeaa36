"""`deepspeed.utils.safe_*`: of frozen weights, and within a window."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.compat.test_optimizer import FP16, HOST, engine_of, loss_of, make_model

from wherry.compat.deepspeed import tensor_fragment as safe
from wherry.testing import run_ranks

GET = (
    safe.safe_get_full_grad,
    safe.safe_get_local_grad,
    safe.safe_get_full_fp32_param,
    safe.safe_get_local_fp32_param,
    lambda parameter: safe.safe_get_full_optimizer_state(parameter, "exp_avg"),
    lambda parameter: safe.safe_get_local_optimizer_state(parameter, "exp_avg_sq"),
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_weight_has_none_of_it_and_stays(stage):
    model = make_model()
    model[0].weight.requires_grad_(False)
    engine = engine_of(stage, model=model)
    engine.backward(loss_of(engine))
    frozen, trained = (
        parameter for name, parameter in engine.module.named_parameters() if name in ("0.weight", "0.bias")
    )
    before = engine.consolidated_state_dict()["0.weight"].clone()
    assert all(get(frozen) is None for get in GET)
    assert all(get(trained) is not None for get in GET)
    safe.safe_set_full_fp32_param(frozen, torch.zeros(8, 4))
    safe.safe_set_full_grad(frozen, torch.zeros(8, 4))
    safe.safe_set_local_grad(frozen, torch.zeros(32))
    safe.safe_set_full_optimizer_state(frozen, torch.zeros(8, 4), "exp_avg")
    safe.safe_update_full_grad_vectorized([frozen, trained], lambda gradient, parameter: gradient * 0)
    assert safe.safe_get_full_grad(trained).abs().sum() == 0
    engine.step()
    assert torch.equal(engine.consolidated_state_dict()["0.weight"], before)
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "zero", "more"),
    [(0, {}, FP16), (1, {}, {}), (1, HOST, FP16), (2, {}, FP16), (2, HOST, {}), (3, {}, {}), (3, HOST, FP16)],
)
def test_gradients_within_a_window(stage, zero, more):
    """Of the micro-batches so far: at stages 0 and 1 the rank's own until the boundary, else the ranks' mean."""
    model = make_model()

    def body(comm: Any) -> list[torch.Tensor]:
        engine = engine_of(
            stage, model=copy.deepcopy(model), zero=zero, mesh=comm, gradient_accumulation_steps=2, **more
        )
        weight, found = next(engine.module.parameters()), []
        assert safe.safe_get_full_grad(weight) is None
        for micro in range(2):
            engine.backward(loss_of(engine, 2 * micro + comm.rank))
            found.append(safe.safe_get_full_grad(weight).float().clone())
            local = safe.safe_get_local_grad(weight)
            assert local.dim() == 1
            safe.safe_set_full_grad(weight, found[-1] * 2)
            torch.testing.assert_close(safe.safe_get_full_grad(weight).float(), found[-1] * 2, rtol=1e-2, atol=1e-3)
            safe.safe_set_full_grad(weight, found[-1])
            engine.step()
        assert safe.safe_get_full_grad(weight) is None
        assert safe.safe_get_local_grad(weight) is None
        engine.destroy()
        return [gradient / (16 if more else 1) for gradient in found]  # they carry the loss scale

    found = run_ranks(2, body)
    plain = [copy.deepcopy(model) for _ in range(2)]
    for micro in range(2):
        for rank in range(2):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * micro + rank))
            (plain[rank](x).mean() / 2).backward()
        own = [one[0].weight.grad for one in plain]
        for rank in range(2):
            expected = own[rank] if stage < 2 and micro == 0 else (own[0] + own[1]) / 2
            torch.testing.assert_close(found[rank][micro], expected, rtol=2e-2, atol=2e-3)


def test_gradients_inside_no_sync():
    engine = engine_of(1)
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
        weight = next(engine.module.parameters())
        first = safe.safe_get_full_grad(weight).clone()
        safe.safe_set_full_grad(weight, torch.zeros(8, 4))
    engine.backward(loss_of(engine, 0))
    torch.testing.assert_close(safe.safe_get_full_grad(weight), first)
    engine.step()
    engine.destroy()
