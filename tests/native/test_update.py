"""Update kernels: every instruction set and the torch fallback give the same bits for any input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry import native

from .cases import (
    GRADS,
    ISAS,
    RULES,
    STATES,
    WEIGHTS,
    assert_same_bits,
    assert_same_segment,
    on_every_isa,
    random_bits,
    segment,
    tensors,
)


def run(isa, name, weights, grads, *, mode, state, grad_dtype=torch.float32, offset=0, multiplier=0.7):
    made = segment(RULES[name](1), weights, grads[0].to(grad_dtype), mode=mode, state=state, offset=offset, isa=isa)
    plan = native.PackedSegments([made], isa=isa)
    for step, grad in enumerate(grads, 1):
        plan.run(RULES[name](step), multiplier, grads=[grad.to(grad_dtype)])
    return made


@pytest.mark.parametrize("name", RULES)
def test_same_bits_on_every_instruction_set(name):
    torch.manual_seed(0)
    weights, grads = torch.randn(1061), [torch.randn(1061) for _ in range(3)]
    for state, mode, grad_dtype in itertools.product(STATES, WEIGHTS, GRADS):
        made = {isa: run(isa, name, weights, grads, mode=mode, state=state, grad_dtype=grad_dtype) for isa in ISAS}
        for isa in ISAS[1:]:
            assert_same_bits(tensors(made[isa]), tensors(made[ISAS[0]]), (name, state, mode, grad_dtype, isa))


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(RULES)),
    mode=st.sampled_from(WEIGHTS),
    state=st.sampled_from(STATES),
    grad_dtype=st.sampled_from(GRADS),
    numel=st.integers(0, 700),
    offset=st.integers(0, 40),
    multiplier=st.sampled_from([1.0, 0.0, -2.5, 1e-30, 3e38]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_numbers_any_length_any_alignment(name, mode, state, grad_dtype, numel, offset, multiplier, seed):
    generator = np.random.default_rng(seed)
    weights = random_bits(generator, numel)
    grads = [random_bits(generator, numel) for _ in range(2)]
    made = {
        (isa, at): run(
            isa, name, weights, grads, mode=mode, state=state, grad_dtype=grad_dtype, offset=at, multiplier=multiplier
        )
        for isa in ISAS
        for at in (offset, 0)
    }
    expected = made[ISAS[-1], 0]
    for key, got in made.items():
        assert_same_segment(got, expected, key)


@pytest.mark.parametrize("state", STATES)
@on_every_isa
def test_threads_and_chunks_do_not_change_bits(isa, state):
    numel = 3 * 32768 + 321
    torch.manual_seed(2)
    weights, grad = torch.randn(numel), torch.randn(numel)
    rule = RULES["adamw"](1)
    results = []
    for threads in (1, 2, 5):
        made = segment(rule, weights, grad, mode="split", state=state)
        with native.Pool(threads=threads) as pool:
            native.PackedSegments([made], isa=isa).submit(rule, 1.0, pool).wait()
        results.append(tensors(made))
    inline = segment(rule, weights, grad, mode="split", state=state)
    bounds = range(0, numel, 16384)
    for a in bounds:  # small enough to run in the calling thread
        b = min(a + 16384, numel)
        state_here = tuple(
            native.Blocks8(s.codes[a:b], s.scales[a // 256 : -(-b // 256)]) if isinstance(s, native.Blocks8) else s[a:b]
            for s in inline.state
        )
        piece = native.Segment(inline.grad[a:b], inline.working[a:b], None, inline.low[a:b], state_here, 7, a)
        native.PackedSegments([piece], isa=isa).run(rule)
    results.append(tensors(inline))
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("mode", WEIGHTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@on_every_isa
def test_a_bad_gradient_stays_where_it_is(isa, bad, mode):
    torch.manual_seed(4)
    weights, grad = torch.randn(300), torch.randn(300)
    clean = run(isa, "adamw", weights, [grad], mode=mode, state="fp32")
    grad[137] = bad
    made = run(isa, "adamw", weights, [grad], mode=mode, state="fp32")
    held = made.working if made.working is not None else made.master
    expected = clean.working if clean.working is not None else clean.master
    others = torch.arange(300) != 137
    assert held[137].isnan()
    assert torch.equal(held[others], expected[others])


@on_every_isa
def test_denormals_are_kept_even_where_the_caller_flushes_them(isa):
    tiny = torch.full((40,), 1e-40)
    assert torch.set_flush_denormal(True)
    try:
        made = native.Segment(grad=tiny, working=torch.zeros(40))
        native.PackedSegments([made], isa=isa).run(native.SGD(lr=1.0))
    finally:
        torch.set_flush_denormal(False)
    if isa == "torch":  # torch's own arithmetic does what the caller set
        assert made.working.tolist() in ([0.0] * 40, (-tiny).tolist())
    else:
        assert torch.equal(made.working, -tiny)


def test_one_rule_each():
    weights = [torch.ones(5), torch.ones(7)]
    plan = native.PackedSegments([native.Segment(torch.ones_like(w), w) for w in weights])
    plan.run([native.SGD(0.5), native.SGD(0.25)])
    assert weights[0].tolist() == [0.5] * 5
    assert weights[1].tolist() == [0.75] * 7
