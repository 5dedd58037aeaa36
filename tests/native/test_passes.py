"""Casts, sums and stochastic rounding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry import native

from .cases import GRADS, ISAS, assert_same_bits, bits, on_every_isa, place, random_bits


def every(dtype):
    return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_cast_as_torch_does(isa, dtype):
    src = every(dtype)
    for to in GRADS:
        dst = torch.empty(src.numel(), dtype=to)
        native.cast_copy(dst, src, isa=isa)
        assert_same_bits([dst], [src.float().to(to)], to)


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_is_rounded_as_torch_does(isa, dtype):
    generator = np.random.default_rng(0)
    # All patterns, then the halves, where ties and overflow are, and their neighbors.
    near = every(dtype).float().view(torch.int32)
    between = [near + offset for offset in (0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001)]
    src = torch.cat([random_bits(generator, 300_000), *(b.view(torch.float32) for b in between)])
    dst = torch.empty(src.numel(), dtype=dtype)
    native.cast_copy(dst, src, isa=isa)
    assert_same_bits([dst], [src.to(dtype)])


@settings(max_examples=30)
@given(
    numel=st.integers(0, 300),
    offset=st.integers(0, 20),
    scale=st.sampled_from([1.0, 0.0, -0.5, 1e-30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_accumulate(numel, offset, scale, seed):
    generator = np.random.default_rng(seed)
    a, b = random_bits(generator, numel), random_bits(generator, numel)
    for to, dtype in itertools.product(GRADS, GRADS):
        expected = (a.to(to).float() + b.to(dtype).float() * scale).to(to)
        for isa in ISAS:
            dst = place(a.to(to), offset)
            native.accumulate(dst, place(b.to(dtype), offset // 2), scale, isa=isa)
            assert_same_bits([dst], [expected], (to, dtype, isa))


@settings(max_examples=40)
@given(numel=st.integers(0, 70_000), offset=st.integers(0, 20), seed=st.integers(0, 2**32 - 1))
def test_sum_squares_is_the_same_everywhere(numel, offset, seed):
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.standard_normal(numel).astype(np.float32))
    for dtype in GRADS:
        src = place(values.to(dtype), offset)
        sums = {isa: native.sum_squares(src, isa=isa) for isa in ISAS}
        assert len(set(sums.values())) == 1, sums
        exact = float(np.square(src.double().numpy()).sum())
        assert sums[ISAS[0]] == pytest.approx(exact, rel=1e-12)


def test_sum_squares_of_what_is_not_finite():
    values = torch.ones(100)
    values[50] = float("inf")
    assert native.sum_squares(values) == float("inf")
    values[51] = float("nan")
    assert np.isnan(native.sum_squares(values))


def rounded(values, *, isa=None, seed=5, start=0):
    """Set bf16 state to these values by an update."""
    state = torch.zeros(values.numel(), dtype=torch.bfloat16)
    segment = native.Segment(values, torch.zeros(values.numel()), state=(state,), seed=seed, start=start)
    native.PackedSegments([segment], isa=isa).run(native.SGD(0.1, 0.9, first=True))
    return state


@on_every_isa
def test_stochastic_rounding_keeps_the_mean(isa):
    value = torch.tensor(1.0 + 0.3 * 2**-7)  # three tenths of the way from 1 to the next bf16
    src = value.repeat(1 << 17)
    dst = rounded(src, isa=isa)
    assert sorted(dst.unique().tolist()) == [1.0, 1.0078125]
    share = (dst > 1).double().mean().item()
    # Five standard deviations of a binomial of this size.
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / src.numel()) ** 0.5
    # No pattern: the share among even numbers is that among odd ones, and neighbors do not follow each other.
    up = (dst > 1).double() - share
    assert abs((up[::2].mean() - up[1::2].mean()).item()) < 5 * (2 * 0.21 / (src.numel() / 2)) ** 0.5
    assert abs((up[1:] * up[:-1]).mean().item()) < 5 * 0.21 / src.numel() ** 0.5


def test_stochastic_rounding_draws_by_number_and_seed():
    generator = np.random.default_rng(0)
    src = random_bits(generator, 3000)
    made = {isa: rounded(src, isa=isa, start=10) for isa in ISAS}
    first = made[ISAS[0]]
    for isa in ISAS:
        assert_same_bits([made[isa]], [first], isa)
    assert torch.equal(bits(rounded(src[777:1777].clone(), start=787)), bits(first)[777:1777])
    for others in ({"seed": 2, "start": 10}, {"start": 11}, {"start": 10 + (1 << 32)}):
        assert not torch.equal(bits(rounded(src, **others)), bits(first))


@on_every_isa
def test_stochastic_rounding_leaves_exact_values_and_infinities(isa):
    exact = every(torch.bfloat16)
    assert_same_bits([rounded(exact.float(), isa=isa)], [exact])


@on_every_isa
def test_large_passes_have_the_same_bits_on_any_number_of_threads(isa):
    torch.manual_seed(1)
    src, into = torch.randn(2, 300_001)
    sums = set()
    for threads in (1, 3):
        with native.Pool(threads=threads) as pool:
            dst, total = torch.empty(src.numel(), dtype=torch.bfloat16), into.clone()
            native.cast_copy(dst, src, pool=pool, isa=isa)
            assert torch.equal(dst, src.bfloat16())
            native.accumulate(total, dst, 0.5, pool=pool, isa=isa)
            assert torch.equal(total, into + dst.float() * 0.5)
            sums.add(native.sum_squares(src, pool, isa=isa))
    assert len(sums) == 1
