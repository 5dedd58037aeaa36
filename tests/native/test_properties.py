"""One step of every rule, in every form of weights, gradients and state, against the same formula in float64.

The bound: fp32 rounds each operation by 2^-24 of its result. A step has fewer than `ROUNDINGS` of them, so a weight is
within that many of its own size and its update's together; a sum that cancels is bounded by what it sums.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wherry import native

from .cases import GRADS, ISAS, RULES, STATES, WEIGHTS, assert_same_bits, bits, place

ROUNDINGS = 24
UNIT = 2.0**-24
# The loss by underflow: the smallest fp32 number a few times; and the size of which that would be a rounding.
LOST = 1e-43
TINY = LOST / (ROUNDINGS * UNIT)


@dataclass
class Reference:
    """The result of a step in float64, and the sizes that its roundings are relative to."""

    weight: np.ndarray
    weight_size: np.ndarray
    states: list[np.ndarray]
    state_sizes: list[np.ndarray]
    sure: np.ndarray  # False where a sign hangs on a rounding


def reference(rule: Any, p: np.ndarray, g: np.ndarray, multiplier: float, states: list[np.ndarray]) -> Reference:
    g = g * float(np.float32(multiplier)) * (-1.0 if rule.maximize else 1.0)
    sure = np.ones(p.shape, dtype=bool)
    decay, size = rule.weight_decay, np.abs(g) + TINY
    decoupled = isinstance(rule, native.Lion) or (isinstance(rule, native.Adam) and rule.decoupled)
    if not decoupled:
        g, size = g + decay * p, size + np.abs(decay * p)
    kept = p * (1 - rule.lr * decay) if decoupled else p
    if isinstance(rule, native.Adam):
        m = rule.beta1 * states[0] + (1 - rule.beta1) * g
        v = rule.beta2 * states[1] + (1 - rule.beta2) * g * g
        denominator = np.sqrt(v / (1 - rule.beta2**rule.step)) + rule.eps
        rate = rule.lr / (1 - rule.beta1**rule.step)
        most = np.abs(states[0]) + size
        return Reference(
            kept - rate * m / denominator, np.abs(p) + (rate * most + TINY) / denominator, [m, v], [most, v], sure
        )
    if isinstance(rule, native.Adagrad):
        total = states[0] + g * g
        rate = rule.lr / (1 + (rule.step - 1) * rule.lr_decay)
        denominator = np.sqrt(total) + rule.eps
        update_size = (rate * size + TINY) / denominator
        return Reference(p - rate * g / denominator, np.abs(p) + update_size, [total], [total], sure)
    if isinstance(rule, native.Lion):
        toward = rule.beta1 * states[0] + (1 - rule.beta1) * g
        most = np.abs(states[0]) + size
        sure = ~(np.abs(toward) <= ROUNDINGS * UNIT * most) | ((g == 0) & (states[0] == 0))
        m = rule.beta2 * states[0] + (1 - rule.beta2) * g
        weight = kept - rule.lr * np.nan_to_num(np.sign(toward))  # a NaN has no direction
        return Reference(weight, np.abs(p) + rule.lr, [m], [most], sure)
    assert isinstance(rule, native.SGD)
    if not rule.momentum:
        return Reference(p - rule.lr * g, np.abs(p) + rule.lr * size, [], [], sure)
    buffer = g if rule.first else rule.momentum * states[0] + (1 - rule.dampening) * g
    most = size if rule.first else rule.momentum * np.abs(states[0]) + size
    step, step_size = (g + rule.momentum * buffer, size + most) if rule.nesterov else (buffer, most)
    return Reference(p - rule.lr * step, np.abs(p) + rule.lr * step_size, [buffer], [most], sure)


class Numbers:
    """Values of all sizes that stay within fp32 through a step, zeros and denormals among them."""

    def __init__(self, seed: int, numel: int) -> None:
        self.generator, self.numel = np.random.default_rng(seed), numel

    def any(self, largest: float = 1e3) -> np.ndarray:
        sizes = self.generator.choice([0.0, 1e-45, 1e-40, 1e-20, 1e-8, 1e-3, 1.0, largest], self.numel)
        return (sizes * self.generator.standard_normal(self.numel).clip(-4, 4)).astype(np.float32)

    def with_bad(self, values: np.ndarray, share: float) -> np.ndarray:
        bad = self.generator.choice([np.inf, -np.inf, np.nan], self.numel)
        return np.where(self.generator.random(self.numel) < share, bad, values).astype(np.float32)


def start_state(numbers: Numbers, kind: str, signed: bool) -> Tensor | native.Blocks8:
    values = torch.from_numpy(numbers.any(1.0))
    values = values if signed else values.abs()
    if kind != "8bit":
        return values.to(torch.float32 if kind == "fp32" else torch.bfloat16)
    made = native.Blocks8.zeros(numbers.numel, signed=signed)
    native.quantize(values, made, isa="portable" if "portable" in ISAS else "torch")
    return made


def opened(state: Tensor | native.Blocks8) -> np.ndarray:
    if isinstance(state, native.Blocks8):
        values = torch.empty(state.codes.numel())
        native.dequantize(state, values)
        return values.double().numpy()
    return state.double().numpy()


def state_error(exact: np.ndarray, size: np.ndarray, kind: str, signed: bool) -> np.ndarray:
    """The largest error that stored state may have."""
    rounding = ROUNDINGS * UNIT * size + LOST
    if kind == "fp32":
        return rounding
    if kind == "bf16":
        return 2.0**-7 * np.abs(exact) + rounding + 1e-40
    # A small float over the largest of 256: 4 or 3 bits of mantissa, and a least step.
    padded = np.pad(np.abs(exact), (0, -exact.size % 256)).reshape(-1, 256)
    most = np.repeat(padded.max(1), 256)[: exact.size] if exact.size else exact
    bits, top = (4, 1984.0) if signed else (3, 16106127360.0)
    return 2.0**-bits * np.abs(exact) + 1.01 * most / top + rounding + 1e-30


class Made:
    """A segment in pieces, each stream at an alignment of its own."""

    def __init__(self, weights: Tensor, mode: str, states: list[Tensor | native.Blocks8], at: list[int]) -> None:
        numel = weights.numel()
        self.working: Tensor | None = None
        self.master: Tensor | None = None
        self.low: Tensor | None = None
        if mode == "split":
            self.working = place(torch.zeros(numel, dtype=torch.bfloat16), at[0])
            self.low = place(torch.zeros(numel, dtype=torch.int16), at[1])
            native.split(weights, self.working, self.low)
        elif mode == "fp32":
            self.working = place(weights, at[0])
        else:
            self.master = place(weights, at[1])
            if mode != "master":
                self.working = place(weights.to(torch.bfloat16 if mode == "bf16" else torch.float16), at[0])
        self.states = [
            native.Blocks8(s.codes.clone(), s.scales.clone()) if isinstance(s, native.Blocks8) else place(s, offset)
            for s, offset in zip(states, at[2:], strict=False)
        ]

    def pieces(self, ends: list[int]) -> list[native.Segment]:
        def part(tensor: Tensor | None, a: int, b: int) -> Tensor | None:
            return None if tensor is None else tensor[a:b]

        return [
            native.Segment(
                None,
                part(self.working, a, b),
                part(self.master, a, b),
                part(self.low, a, b),
                tuple(s if isinstance(s, native.Blocks8) else s[a:b] for s in self.states),
                seed=11,
                start=a,
            )
            for a, b in itertools.pairwise(ends)
        ]

    def full(self) -> Tensor:
        """The weights in fp32."""
        if self.low is not None:
            assert self.working is not None
            whole = torch.empty(self.working.numel())
            native.join(self.working, self.low, whole)
            return whole
        held = self.working if self.master is None else self.master
        assert held is not None
        return held

    def tensors(self) -> list[Tensor]:
        stored = [t for s in self.states for t in ((s.codes, s.scales) if isinstance(s, native.Blocks8) else (s,))]
        # Of a split NaN the halves may be any that make one.
        return [self.full(), *([] if self.working is None else [self.working]), *stored]


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(list(RULES)),
    mode=st.sampled_from(WEIGHTS),
    kind=st.sampled_from(STATES[:-1]),
    grad_dtype=st.sampled_from(GRADS),
    numel=st.one_of(st.sampled_from([0, 1, 2, 31, 32, 33, 255, 256, 257]), st.integers(0, 800)),
    offsets=st.lists(st.integers(0, 33), min_size=5, max_size=5),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    multiplier=st.sampled_from([1.0, 0.0, -2.5, 0.37, 1e-30, 128.0]),
    step=st.sampled_from([1, 2, 7, 1000]),
    bad=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_step_of_anything(name, mode, kind, grad_dtype, numel, offsets, cuts, multiplier, step, bad, seed):
    rule, numbers = RULES[name](step), Numbers(seed, numel)
    weights, grad = numbers.any(4.0), numbers.any()
    scale = -multiplier if rule.maximize else multiplier
    if isinstance(rule, native.Adam | native.Adagrad) and not getattr(rule, "decoupled", False):
        # A gradient that weight decay cancels but for its roundings has a direction of its roundings alone.
        grad = np.copysign(grad, weights * (scale or 1.0))
    if kind != "8bit":  # one bad value makes its block of 256 so
        grad = numbers.with_bad(grad, bad)
    grads = torch.from_numpy(grad).to(grad_dtype)
    states = [start_state(numbers, kind, signed) for signed in rule.state_signed[: rule.state_count]]
    with np.errstate(all="ignore"):
        exact = reference(
            rule, weights.astype(np.float64), grads.double().numpy(), multiplier, [opened(s) for s in states]
        )

    found: dict[tuple[str, bool], list[Tensor]] = {}
    ends = [0, *sorted(round(cut * numel) for cut in cuts), numel] if kind != "8bit" else [0, numel]
    held = place(grads, offsets[4])
    for isa in ISAS:
        for cut_up in (False, True):
            made = Made(torch.from_numpy(weights), mode, states, offsets if cut_up else [0] * 5)
            here = ends if cut_up else [0, numel]
            parts = [(held if cut_up else grads)[a:b] for a, b in itertools.pairwise(here)]
            native.PackedSegments(made.pieces(here), isa=isa).run(rule, multiplier, grads=parts)
            found[isa, cut_up] = made.tensors()
    for key, tensors in found.items():
        assert_same_bits(tensors, found[ISAS[0], False], key)

    # All are the same: one stands for all.
    got = made.full()
    if mode in ("bf16", "fp16"):
        assert torch.equal(bits(made.working), bits(got.to(made.working.dtype)))
    if mode == "split":
        near = got.isfinite() & made.working.isfinite()
        gap = (made.working.double() - got.double()).abs()[near]
        assert bool((gap <= 2.0**-8 * got.double().abs()[near] + 1e-40).all())
    check("weight", got.double().numpy()[exact.sure], exact.weight[exact.sure],
          (ROUNDINGS * UNIT * exact.weight_size + LOST)[exact.sure])  # fmt: skip
    rows = zip(made.states, exact.states, exact.state_sizes, rule.state_signed, strict=False)
    for k, (stored, expected, size, signed) in enumerate(rows):
        check(f"state {k}", opened(stored), expected, state_error(expected, size, kind, signed))


def check(name: str, got: np.ndarray, exact: np.ndarray, allowed: np.ndarray) -> None:
    finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(got), finite), f"{name}: different elements are finite"
    wrong = np.flatnonzero(np.abs(got[finite] - exact[finite]) > allowed[finite])
    assert wrong.size == 0, (
        f"{name}: {got[finite][wrong[:3]]}, expected {exact[finite][wrong[:3]]} within {allowed[finite][wrong[:3]]}"
    )
