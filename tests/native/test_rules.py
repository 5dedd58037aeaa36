"""The rules against torch.optim, and against the same mathematics in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry import native
from wherry.errors import WherryError

from .cases import ISAS

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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TORCH)
def test_as_torch_optim_after_100_steps(name, isa):
    make, rule = TORCH[name]
    torch.manual_seed(0)
    theirs = torch.randn(1000, requires_grad=True)
    ours = theirs.detach().clone()
    optimizer = make([theirs])
    states = tuple(torch.zeros(1000) for _ in range(rule(1).state_count))
    plan = native.Plan([native.Segment(None, ours, state=states)], isa=isa)
    for k in range(1, 101):
        grad = torch.randn(1000)
        theirs.grad = grad.clone()
        optimizer.step()
        plan.run(rule(k), grads=[grad])
    # 1e-6 of the weights' size: a weight that passes close to zero has no relative accuracy in either.
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


def reference(name, p, g, state, k):
    """One step in float64, from the rules' definitions."""
    if name == "adam":
        lr, b1, b2, eps, wd = 1e-3, 0.9, 0.999, 1e-8, 0.1
        m = b1 * state[0] + (1 - b1) * g
        v = b2 * state[1] + (1 - b2) * g * g
        update = (m / (1 - b1**k)) / (np.sqrt(v / (1 - b2**k)) + eps)
        return p * (1 - lr * wd) - lr * update, (m, v)
    if name == "adagrad":
        total = state[0] + g * g
        return p - 1e-2 * g / (np.sqrt(total) + 1e-8), (total,)
    if name == "lion":
        b1, b2 = 0.9, 0.99
        return p * (1 - 1e-3 * 0.1) - 1e-3 * np.sign(b1 * state[0] + (1 - b1) * g), (b2 * state[0] + (1 - b2) * g,)
    buffer = 0.9 * state[0] + g
    return p - 1e-2 * buffer, (buffer,)


RULES = {
    "adam": lambda k: native.Adam(1e-3, weight_decay=0.1, step=k),
    "adagrad": lambda k: native.Adagrad(1e-2, eps=1e-8, step=k),
    "lion": lambda k: native.Lion(1e-3, weight_decay=0.1, step=k),
    "momentum": lambda k: native.SGD(1e-2, 0.9, step=k),
}


@settings(max_examples=40)
@given(
    name=st.sampled_from(list(RULES)),
    isa=st.sampled_from(ISAS),
    numel=st.integers(1, 200),
    size=st.sampled_from([1e-6, 1.0, 1e3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_within_a_bound_of_double_precision(name, isa, numel, size, seed):
    generator = np.random.default_rng(seed)
    p = generator.standard_normal(numel).astype(np.float32)
    ours = torch.from_numpy(p.copy())
    rule = RULES[name]
    states = tuple(torch.zeros(numel) for _ in range(rule(1).state_count))
    plan = native.Plan([native.Segment(None, ours, state=states)], isa=isa)
    exact, exact_state = p.astype(np.float64), tuple(np.zeros(numel) for _ in states)
    for k in range(1, 11):
        grad = (size * (1 + generator.random(numel))).astype(np.float32)
        plan.run(rule(k), grads=[torch.from_numpy(grad)])
        exact, exact_state = reference(name, exact, grad.astype(np.float64), exact_state, k)
    # Ten steps of a handful of fp32 roundings each.
    scale = np.maximum(np.abs(exact), np.abs(p))
    assert np.all(np.abs(ours.numpy() - exact) <= 1e-5 * scale + 1e-6 * size * (name == "momentum"))
    for got, expected in zip(states, exact_state, strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)


def test_bias_correction_off():
    weight = torch.zeros(4)
    states = (torch.zeros(4), torch.zeros(4))
    native.Plan([native.Segment(torch.ones(4), weight, state=states)]).run(native.Adam(1.0, bias_correction=False))
    assert weight.tolist() == pytest.approx([-0.1 / (0.001**0.5)] * 4, rel=1e-6)


def test_steps_are_counted_from_one():
    with pytest.raises(WherryError, match=r"Adam: step=0, expected the 1-based"):
        native.Adam(1e-3, step=0)


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        (native.Adam(1.0), 2),
        (native.Adagrad(1.0), 1),
        (native.Lion(1.0), 1),
        (native.SGD(1.0), 0),
        (native.SGD(1.0, 0.9), 1),
    ],
)
def test_state_count(rule, count):
    assert rule.state_count == count
