"""What a plan accepts, and what it says of what it does not."""

from __future__ import annotations

import pytest
import torch

from wherry import native
from wherry.errors import WherryError
from wherry.native import Blocks8, Plan, Segment

F = torch.zeros
HALF = torch.zeros(4, dtype=torch.bfloat16)
LOW = torch.zeros(4, dtype=torch.int16)

WRONG = {
    "no weights": (lambda: Segment(F(4), None), "segment 0: it has no weights"),
    "strides": (
        lambda: Segment(F(4), F(8)[::2], name="layer 3"),
        r"segment 0 \(layer 3\).working: expected a 1-D contiguous CPU tensor, got shape \(4,\), of strides \(2,\)",
    ),
    "shape": (lambda: Segment(F(4), F(2, 2)), r"working: expected a 1-D contiguous CPU tensor, got shape \(2, 2\)"),
    "device": (lambda: Segment(F(4), torch.empty(4, device="meta")), "working: .* on meta"),
    "length": (lambda: Segment(F(5), F(4)), "grad: expected 4 elements like the weights, got 5"),
    "grad dtype": (lambda: Segment(F(4, dtype=torch.float64), F(4)), "grad: expected torch.float32 or .*, got .*64"),
    "bf16 without master": (lambda: Segment(F(4), HALF), "need an fp32 `master`, or `low`"),
    "fp16 without master": (lambda: Segment(F(4), HALF.half()), "torch.float16 need an fp32 `master`$"),
    "two masters": (lambda: Segment(F(4), HALF, F(4), LOW), "leave `master` out"),
    "fp32 split": (lambda: Segment(F(4), F(4), None, LOW), "working: expected torch.bfloat16, got torch.float32"),
    "low dtype": (lambda: Segment(F(4), HALF, None, F(4)), "low: expected torch.int16 or torch.uint16"),
    "master beside fp32": (lambda: Segment(F(4), F(4), F(4)), "working: expected torch.bfloat16 or torch.float16"),
    "three states": (lambda: Segment(F(4), F(4), state=(F(4), F(4), F(4))), "3 state tensors"),
    "state dtype": (lambda: Segment(F(4), F(4), state=(LOW,)), r"state\[0\]: expected torch.float32 or torch.bfloat16"),
    "state length": (
        lambda: Segment(F(4), F(4), state=(Blocks8.zeros(5, signed=True),)),
        r"state\[0\].codes: expected 4 elements",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_segments_are_named(name):
    make, message = WRONG[name]
    with pytest.raises(WherryError, match=message):
        Plan([make()])


def test_rules_that_do_not_fit():
    plan = Plan([Segment(F(4), F(4), state=(F(4), F(4)))])
    with pytest.raises(WherryError, match="SGD keeps 1 state tensors, the segment has 2"):
        plan.run(native.SGD(1.0, 0.9))
    with pytest.raises(WherryError, match="2 rules for 1 segments"):
        plan.run([native.Adam(1.0), native.Adam(1.0)])
    blocks = (Blocks8.zeros(4, signed=True), Blocks8.zeros(4, signed=True))
    with pytest.raises(WherryError, match=r"state\[1\]: Adam needs codes without a sign .* signed=False"):
        Plan([Segment(F(4), F(4), state=blocks)]).run(native.Adam(1.0))


def test_gradients_that_do_not_fit():
    plan = Plan([Segment(None, F(4), name="block 7")])
    with pytest.raises(WherryError, match=r"segment 0 \(block 7\): it was made without a gradient"):
        plan.run(native.SGD(1.0))
    with pytest.raises(WherryError, match="2 gradients for 1 segments"):
        plan.run(native.SGD(1.0), grads=[F(4), F(4)])
    with pytest.raises(WherryError, match=r"grads\[0\]: expected 4 elements like the weights, got 3"):
        plan.run(native.SGD(1.0), grads=[F(3)])


def test_gradients_of_the_submit_replace_those_of_the_plan():
    weight = F(4)
    plan = Plan([Segment(torch.ones(4), weight)])
    plan.run(native.SGD(1.0), grads=[torch.full((4,), 2.0, dtype=torch.float16)])
    plan.run(native.SGD(1.0))
    assert weight.tolist() == [-3.0] * 4


def test_empty_plans_and_segments():
    Plan([]).run(native.Adam(1.0))
    weight = torch.ones(4)
    plan = Plan([Segment(F(0), F(0)), Segment(torch.ones(4), weight), Segment(F(0), F(0))])
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
        Plan([Segment(g, w) for g, w in zip(grads, weights, strict=True)]).submit(native.SGD(1.0), 1.0, pool).wait()
    for new, old, grad in zip(weights, before, grads, strict=True):
        assert torch.equal(new, old - grad)


def test_uint16_lows_serve_like_int16():
    torch.manual_seed(0)
    master = torch.randn(50)
    hi, low = torch.empty(50, dtype=torch.bfloat16), torch.empty(50, dtype=torch.uint16)
    native.split(master, hi, low)
    Plan([Segment(F(50), hi, low=low)]).run(native.SGD(1.0))
    back = torch.empty(50)
    native.join(hi, low, back)
    assert torch.equal(back, master)


def test_passes_name_what_does_not_fit():
    with pytest.raises(WherryError, match="accumulate: src has 3 elements, dst has 4"):
        native.accumulate(F(4), F(3))
    with pytest.raises(WherryError, match=r"cast_copy: src must be contiguous and on the CPU, got shape \(4,\)"):
        native.cast_copy(HALF, F(8)[::2])
    with pytest.raises(WherryError, match=r"split: low must be torch.int16 or torch.uint16, got torch.float32"):
        native.split(F(4), HALF, F(4))


def test_a_bare_rule_is_no_rule():
    with pytest.raises(TypeError, match="Rule is not an update rule"):
        native.Rule().pack()
