"""Adam without bias correction against the formula in plain torch, by both rules and through configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.compat.deepspeed import ops
from wherry.compat.deepspeed.config import load
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.update.optimizer import describe, from_config
from wherry.update.rules import NativeRule, TorchRule, UpdateRule, UpdateSegment

LR, DECAY, STEPS = 0.01, 0.1, 6
OPTIONS = {"lr": LR, "weight_decay": DECAY, "bias_correction": False}


def by_hand(weights: torch.Tensor, grads: list[torch.Tensor], *, decoupled: bool) -> torch.Tensor:
    weights, mean, square = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    for grad in grads:
        if decoupled:
            weights *= 1 - LR * DECAY
        else:
            grad = grad + DECAY * weights
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad * grad
        weights -= LR * mean / (square.sqrt() + 1e-8)
    return weights


def values(seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, generator=generator), [torch.randn(64, generator=generator) for _ in range(STEPS)]


def run(rule: UpdateRule, groups: Any, weights: torch.Tensor, grads: list[torch.Tensor], first: int = 1) -> None:
    states = {field.name: torch.zeros(64) for field in rule.fields(groups[0], (64,), torch.float32)}
    segment = UpdateSegment(grad=None, working=weights, state=tuple(states.values()))
    for step, grad in enumerate(grads, first):
        segment.grad = grad
        rule.update([segment], [step], groups, 1.0).wait()


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("on_host", [True, False])
def test_both_rules_follow_the_formula(name: str, on_host: bool) -> None:
    weights, grads = values()
    expected = by_hand(weights, grads, decoupled=name == "AdamW")
    spec = describe(from_config(name, OPTIONS, [nn.Parameter(weights)]))
    rule = spec.make_rule(on_host=on_host)
    assert isinstance(rule, NativeRule if on_host else TorchRule)
    run(rule, spec.groups, weights, grads)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_torchs_rule_is_torchs_adam_at_a_step_beyond_all_correction_and_goes_on_where_it_was(amsgrad: bool) -> None:
    weights, grads = values()
    plain, half = nn.Parameter(weights.clone()), STEPS // 2
    adam = torch.optim.AdamW([plain], lr=LR, weight_decay=DECAY, amsgrad=amsgrad)
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + amsgrad]
    adam.state[plain].update(step=torch.tensor(1e12), **{name: torch.zeros(64) for name in moments})
    for grad in grads:
        plain.grad = grad
        adam.step()
    spec = describe(from_config("AdamW", OPTIONS | {"amsgrad": amsgrad}, [plain]))
    rule = spec.make_rule(on_host=False)
    run(rule, spec.groups, weights, grads[:half])
    kept = [{name: value.clone() for name, value in state.items()} for state in rule.kept()]
    again = spec.make_rule(on_host=False)
    again.load_kept([UpdateSegment(grad=None, working=weights)], [half], kept)  # type: ignore[arg-type]
    run(again, spec.groups, weights, grads[half:], half + 1)
    assert torch.equal(weights, plain.detach())
    # Without moments it begins anew, and not with a correction.
    again.load_kept([UpdateSegment(grad=None, working=weights)], [0], [{}])
    before = weights.clone()
    run(again, spec.groups, weights, grads[:1])
    torch.testing.assert_close(weights, by_hand(before, grads[:1], decoupled=True), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("alias", "kind", "more", "tier"),
    [(False, "Adam", {"adam_w_mode": False}, "none"), (True, "Adam", {}, "none"), (True, "AdamW", {}, "cpu")],
)
def test_a_config_turns_it_off(alias: bool, kind: str, more: dict[str, Any], tier: str) -> None:
    weights, grads = values(1)
    model = nn.Linear(64, 1, bias=False)
    model.weight.data.copy_(weights)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": kind, "params": OPTIONS | more},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": tier}},
        "gradient_clipping": 0.0,
    }
    how: Any = {"config": load(config), "engine_class": DeepSpeedEngine} if alias else {"config": config}
    engine, optimizer = wherry.initialize(model=model, **how)[:2]
    assert optimizer.param_groups[0]["bias_correction"] is False
    if alias:
        assert type(optimizer.instance) is (ops.DeepSpeedCPUAdam if tier == "cpu" else ops.FusedAdam)
    for grad in grads:
        engine.backward(engine(grad[None]).sum())  # whose gradient is its input
        engine.step()
    expected = by_hand(weights, grads, decoupled=not more)
    torch.testing.assert_close(engine.states.full("weight", "master").flatten(), expected, rtol=1e-6, atol=1e-6)
    engine.destroy() if alias else engine.close()


def test_a_group_may_say_otherwise() -> None:
    groups = [{"params": [nn.Parameter(values()[0])], "bias_correction": True}]
    made = from_config("AdamW", OPTIONS, groups)
    assert made.param_groups[0]["bias_correction"] is True and made.defaults["bias_correction"] is False
