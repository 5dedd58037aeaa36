"""Optimizers of torch's that keep their state themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wherry.update.optimizer import describe
from wherry.update.rules import TorchRule, UpdateSegment

STEPS = 3


class Adagrad(torch.optim.Adagrad):
    """Make the state in the constructor alone, as Adagrad does before torch 2.13."""

    __module__ = "torch.optim.adagrad"

    def __init__(self, params: Any, initial_accumulator_value: float = 0.0) -> None:
        super().__init__(params, initial_accumulator_value=initial_accumulator_value)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, initial_accumulator_value)}

    def _init_group(self, group: Any, *lists: Any) -> Any:
        assert all(self.state[p] for p in group["params"])
        return super()._init_group(group, *lists)


def test_state_that_a_constructor_makes_is_kept_and_made_again() -> None:
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(64, generator=generator) for _ in range(1 + STEPS))
    plain = nn.Parameter(start.clone())
    optimizer = Adagrad([plain], initial_accumulator_value=0.1)
    for grad in grads:
        plain.grad = grad
        optimizer.step()
    spec = describe(Adagrad([nn.Parameter(start.clone())], initial_accumulator_value=0.1))
    rule = spec.make_rule(on_host=False)
    assert isinstance(rule, TorchRule)
    segment = UpdateSegment(grad=None, working=start.clone(), state=())
    for begin_again in (False, True):
        if begin_again:
            segment.whole_master.copy_(start)
            rule.load_kept([segment], [0], [{}])
        for step, grad in enumerate(grads, 1):
            segment.grad = grad
            rule.update([segment], [step], spec.groups, 1.0).wait()
        assert torch.equal(segment.whole_master, plain.detach())


def test_a_rule_without_masters_updates_the_weights_themselves() -> None:
    """Round gradients, accumulated in fp32, first; keep moments in the weights' type."""
    weights, grads = torch.randn(64).bfloat16(), torch.randn(4, 64)
    plain = nn.Parameter(weights.clone())
    adam = torch.optim.AdamW([plain], lr=0.01)
    spec = describe(torch.optim.AdamW([nn.Parameter(weights)], lr=0.01), state_dtype="bf16")
    rule = spec.make_rule(on_host=False, masters=False)
    assert isinstance(rule, TorchRule)
    segment = UpdateSegment(grad=None, working=weights)
    for step, grad in enumerate(grads, 1):
        plain.grad = grad.bfloat16() * 0.3
        adam.step()
        segment.grad = grad
        rule.update([segment], [step], spec.groups, 0.3)
    assert torch.equal(weights, plain.detach())
    assert {value.dtype for value in rule.kept()[0].values()} == {torch.bfloat16}
