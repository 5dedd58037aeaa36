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


@pytest.mark.parametrize("name", RULES)
def test_same_bits_on_every_instruction_set(name):
    """Three blocks of ordinary numbers and a ragged end of any bits, at any alignment."""
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    weights, *grads = (torch.cat([torch.randn(768), random_bits(generator, 293)]) for _ in range(3))
    multipliers = itertools.cycle([0.7, -2.5, 0.7, 1e-30, 3e38])
    for number, (state, mode, grad_dtype) in enumerate(itertools.product(STATES, WEIGHTS, GRADS)):
        multiplier, offsets, made = next(multipliers), range(number % 41, 41), {}
        for isa in ISAS:
            made[isa] = segment(
                RULES[name](1), weights, grads[0].to(grad_dtype), mode=mode, state=state, offsets=offsets, isa=isa
            )
            plan = native.PackedSegments([made[isa]], isa=isa)
            for step, grad in enumerate(grads, 1):
                plan.run(RULES[name](step), multiplier, grads=[grad.to(grad_dtype)])
        for isa in ISAS[:-1]:
            assert_same_segment(made[isa], made[ISAS[-1]], (name, state, mode, grad_dtype, multiplier, isa))


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(RULES)),
    mode=st.sampled_from(WEIGHTS),
    state=st.sampled_from(STATES),
    grad_dtype=st.sampled_from(GRADS),
    numel=st.one_of(st.sampled_from([0, 1, 2, 31, 32, 33, 255, 256, 257]), st.integers(0, 800)),
    offsets=st.lists(st.integers(0, 33), min_size=5, max_size=5),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    multiplier=st.sampled_from([1.0, 0.0, -2.5, 1e-30, 3e38]),
    step=st.sampled_from([1, 2, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_length_in_any_parts_at_any_alignment(
    name, mode, state, grad_dtype, numel, offsets, cuts, multiplier, step, seed
):
    generator, rule = np.random.default_rng(seed), RULES[name](step)
    weights, grad = random_bits(generator, numel), random_bits(generator, numel).to(grad_dtype)
    grain = 1 if state in ("fp32", "bf16") else 256
    ends = [0, *sorted(round(cut * numel) // grain * grain for cut in cuts), numel]
    expected = segment(rule, weights, grad, mode=mode, state=state)
    native.PackedSegments([expected], isa="torch").run(rule, multiplier)
    for isa in ISAS:
        made = segment(rule, weights, grad, mode=mode, state=state, offsets=offsets, isa=isa)
        parts = [made.cut(start, stop) for start, stop in itertools.pairwise(ends)]
        native.PackedSegments(parts, isa=isa).run(rule, multiplier)
        assert_same_segment(made, expected, isa)


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
    for start in range(0, numel, 16384):  # small enough to run in the calling thread
        native.PackedSegments([inline.cut(start, min(start + 16384, numel))], isa=isa).run(rule)
    for other in results:
        assert_same_bits(other, tensors(inline))


@on_every_isa
def test_many_segments_of_all_sizes_in_one_submission(isa):
    torch.manual_seed(0)
    sizes = [0, 1, 31, 32, 33, 32767, 32768, 32769, 100_000, 5, 0]
    weights, grads = [torch.randn(n) for n in sizes], [torch.randn(n) for n in sizes]
    before = [weight.clone() for weight in weights]
    packed = native.PackedSegments([native.Segment(*each) for each in zip(grads, weights, strict=True)], isa=isa)
    with native.Pool(threads=3) as pool:
        packed.submit(native.SGD(1.0), 1.0, pool).wait()
    for new, old, grad in zip(weights, before, grads, strict=True):
        assert torch.equal(new, old - grad)


@on_every_isa
def test_one_rule_each_and_gradients_instead_of_the_plans(isa):
    native.PackedSegments([], isa=isa).run(native.Adam(1.0))
    weights = [torch.ones(5), torch.ones(0), torch.ones(7)]
    plan = native.PackedSegments([native.Segment(torch.ones_like(weight), weight) for weight in weights], isa=isa)
    rules = [native.SGD(0.5), native.SGD(1.0), native.SGD(0.25)]
    plan.run(rules)
    assert (weights[0].tolist(), weights[2].tolist()) == ([0.5] * 5, [0.75] * 7)
    plan.run(rules, grads=[torch.full_like(weight, 2, dtype=torch.float16) for weight in weights])
    plan.run(rules)
    assert (weights[0].tolist(), weights[2].tolist()) == ([-1.0] * 5, [0.0] * 7)


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
