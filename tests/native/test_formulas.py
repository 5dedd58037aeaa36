"""Update rules against torch.optim over many steps; `test_properties` compares one step with double precision."""

from __future__ import annotations

import pytest
import torch

from wherry import native
from wherry.errors import WherryError

from .cases import on_every_isa

TORCH = {
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=False),
        lambda k: native.Adam(1e-3, weight_decay=0.1, step=k),
    ),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, maximize=True),
        lambda k: native.Adam(1e-3, 0.8, 0.95, 1e-6, 0.1, decoupled=False, step=k, maximize=True),
    ),
    "adam, high lerp": (
        lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.25, 0.9)),
        lambda k: native.Adam(1e-3, 0.25, 0.9, step=k),
    ),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=1e-2, weight_decay=0.1, eps=1e-8),
        lambda k: native.Adagrad(1e-2, 1e-2, 1e-8, 0.1, k),
    ),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1), lambda k: native.SGD(0.01, weight_decay=0.1)),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.2, weight_decay=0.1, maximize=True),
        lambda k: native.SGD(0.01, 0.9, 0.2, False, 0.1, k == 1, maximize=True),
    ),
    "nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        lambda k: native.SGD(0.01, 0.9, nesterov=True, first=k == 1),
    ),
}


@on_every_isa
@pytest.mark.parametrize("name", TORCH)
def test_as_torch_optim_after_100_steps(name, isa):
    make, rule = TORCH[name]
    torch.manual_seed(0)
    theirs = torch.randn(1000, requires_grad=True)
    ours = theirs.detach().clone()
    optimizer = make([theirs])
    states = tuple(torch.zeros(1000) for _ in range(rule(1).state_count))
    plan = native.PackedSegments([native.Segment(None, ours, state=states)], isa=isa)
    for k in range(1, 101):
        grad = torch.randn(1000)
        theirs.grad = grad.clone()
        optimizer.step()
        plan.run(rule(k), grads=[grad])
    # 1e-6 of the weights' size: a weight that passes close to zero has no relative accuracy in either.
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_bias_correction_off():
    weight = torch.zeros(4)
    states = (torch.zeros(4), torch.zeros(4))
    packed = native.PackedSegments([native.Segment(torch.ones(4), weight, state=states)])
    packed.run(native.Adam(1.0, bias_correction=False))
    assert weight.tolist() == pytest.approx([-0.1 / (0.001**0.5)] * 4, rel=1e-6)


def test_steps_are_counted_from_one():
    with pytest.raises(WherryError, match=r"Adam: step=0, expected the 1-based"):
        native.Adam(1e-3, step=0)
