"""Update rules against torch.optim over many steps, in every form of weights and state."""

from __future__ import annotations

import pytest
import torch

from wherry import native
from wherry.errors import WherryError

from .cases import RULES, STATES, WEIGHTS, master_of, on_every_isa, segment

TORCH = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.3, 0.95), eps=1e-6, weight_decay=0.1, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1, eps=1e-8),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, maximize=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.01),
}
# How far weights are off with state of fewer bits, as a part of the way that they have gone.
NEAR = {"bf16": 0.01, "8bit": 0.06, "mixed": 0.06}


@on_every_isa
@pytest.mark.parametrize("name", TORCH)
def test_as_torch_optim_after_100_steps(name, isa):
    torch.manual_seed(0)
    rule, start = RULES[name], torch.randn(1000)
    theirs = start.clone().requires_grad_()
    optimizer = TORCH[name]([theirs])
    forms = [*((mode, "fp32") for mode in WEIGHTS), *(("fp32", state) for state in STATES[1:])]
    made = [segment(rule(1), start, start, mode=mode, state=state, isa=isa) for mode, state in forms]
    plan = native.PackedSegments(made, isa=isa)
    for step in range(1, 101):
        grad = torch.randn(1000)
        theirs.grad = 0.5 * grad
        optimizer.step()
        plan.run(rule(step), 0.5, grads=[grad] * len(made))
    expected = theirs.detach()
    for (mode, state), ours in zip(forms, made, strict=True):
        if state == "fp32":
            # Relative to the weights' size: a weight that passes close to zero has no relative accuracy in either.
            torch.testing.assert_close(master_of(ours), expected, rtol=1e-6, atol=1e-6)
        else:
            assert (master_of(ours) - expected).norm() < NEAR[state] * (expected - start).norm()
        if mode in ("bf16", "fp16"):
            assert torch.equal(ours.working, ours.master.to(ours.working.dtype))


def test_bias_correction_off_and_steps_from_one():
    weight = torch.zeros(4)
    states = (torch.zeros(4), torch.zeros(4))
    packed = native.PackedSegments([native.Segment(torch.ones(4), weight, state=states)])
    packed.run(native.Adam(1.0, bias_correction=False))
    assert weight.tolist() == pytest.approx([-0.1 / (0.001**0.5)] * 4, rel=1e-6)
    with pytest.raises(WherryError, match=r"Adam: step=0, expected the 1-based"):
        native.Adam(1e-3, step=0)
