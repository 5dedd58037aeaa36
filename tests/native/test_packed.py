"""Segments that are updated together."""

from __future__ import annotations

import torch

from wherry import native
from wherry.native import PackedSegments, Segment

F = torch.zeros


def test_gradients_of_the_submit_replace_those_of_the_plan():
    weight = F(4)
    plan = PackedSegments([Segment(torch.ones(4), weight)])
    plan.run(native.SGD(1.0), grads=[torch.full((4,), 2.0, dtype=torch.float16)])
    plan.run(native.SGD(1.0))
    assert weight.tolist() == [-3.0] * 4


def test_empty_plans_and_segments():
    PackedSegments([]).run(native.Adam(1.0))
    weight = torch.ones(4)
    plan = PackedSegments([Segment(F(0), F(0)), Segment(torch.ones(4), weight), Segment(F(0), F(0))])
    plan.run(native.SGD(1.0))
    plan.submit([native.SGD(1.0)] * 3).wait()
    assert weight.tolist() == [-1.0] * 4


def test_many_segments_of_all_sizes_in_one_submission():
    torch.manual_seed(0)
    sizes = [0, 1, 31, 32, 33, 32767, 32768, 32769, 100_000, 5, 0]
    weights = [torch.randn(n) for n in sizes]
    before = [w.clone() for w in weights]
    grads = [torch.randn(n) for n in sizes]
    with native.Pool(threads=3) as pool:
        packed = PackedSegments([Segment(g, w) for g, w in zip(grads, weights, strict=True)])
        packed.submit(native.SGD(1.0), 1.0, pool).wait()
    for new, old, grad in zip(weights, before, grads, strict=True):
        assert torch.equal(new, old - grad)


def test_uint16_lows_serve_like_int16():
    torch.manual_seed(0)
    master = torch.randn(50)
    hi, low = torch.empty(50, dtype=torch.bfloat16), torch.empty(50, dtype=torch.uint16)
    native.split(master, hi, low)
    PackedSegments([Segment(F(50), hi, low=low)]).run(native.SGD(1.0))
    back = torch.empty(50)
    native.join(hi, low, back)
    assert torch.equal(back, master)
