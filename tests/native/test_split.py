"""Split master: bf16 upper half and 16 low bits name every fp32 number, and the upper half is a usable weight."""

from __future__ import annotations

import numpy as np
import torch

from wherry import native

from .cases import GRADS, master_of, on_every_isa


def patterns(raw) -> torch.Tensor:
    return torch.from_numpy(np.asarray(raw, dtype=np.uint32).view(np.int32)).view(torch.float32)


def split(master, isa):
    hi, low = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(master.numel(), dtype=torch.int16)
    native.split(master, hi, low, isa=isa)
    return hi, low


def assert_round_trip(master, isa):
    hi, low = split(master, isa)
    back = torch.empty_like(master)
    native.join(hi, low, back, isa=isa)
    number = ~master.isnan()
    assert torch.equal(back.view(torch.int32)[number], master.view(torch.int32)[number])
    assert torch.equal(back.isnan(), master.isnan()) and torch.equal(hi.isnan(), master.isnan())
    return hi, low


# Upper halves at every seam: zeros, denormals, the smallest normals, one, the largest finite, infinity, NaNs.
UPPER = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFE, 0x7FFF]


@on_every_isa
def test_patterns_come_back_and_the_upper_half_is_the_master_rounded_half_up(isa):
    """Every low half beside an upper half of each kind, and random patterns."""
    upper = np.array([half | sign for half in UPPER for sign in (0, 0x8000)], dtype=np.uint32) << 16
    low_halves = np.arange(1 << 16, dtype=np.uint32)
    drawn = np.random.default_rng(1).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    raw = np.concatenate([(upper[:, None] | low_halves).reshape(-1), drawn])
    master = patterns(raw)
    finite = master.isfinite()
    hi, low = assert_round_trip(master, isa)
    torch_hi = master.bfloat16()
    tie = torch.from_numpy((raw & 0xFFFF) == 0x8000)
    same = hi.view(torch.int16) == torch_hi.view(torch.int16)
    assert torch.equal(same[finite & ~tie], torch.ones_like(same[finite & ~tie]))
    assert torch.equal(low, torch.from_numpy(raw.astype(np.uint16).view(np.int16)))
    infinities, _ = assert_round_trip(patterns([0x7F800000, 0xFF800000]), isa)
    assert infinities.tolist() == [float("inf"), float("-inf")]
    # At a tie the magnitude goes up: at most one unit from torch's.
    ties = patterns((np.arange(0x10000, dtype=np.uint32) << 16) | 0x8000)
    ties = ties[ties.isfinite()]
    up, _ = split(ties, isa)
    expected = (ties.view(torch.int32) >> 16).to(torch.int16) + 1
    assert torch.equal(up.view(torch.int16), expected)


@on_every_isa
def test_an_update_of_a_split_master_is_that_of_a_whole_one(isa):
    torch.manual_seed(0)
    master = torch.randn(5000)
    hi, low = split(master, isa)
    whole = native.Segment(None, None, master, state=(torch.zeros(5000), torch.zeros(5000)))
    halves = native.Segment(None, hi, low=low, state=(torch.zeros(5000), torch.zeros(5000)))
    plan = native.PackedSegments([whole, halves], isa=isa)
    for step, dtype in enumerate(2 * GRADS, 1):
        grad = torch.randn(5000).to(dtype)
        plan.run(native.Adam(1e-3, weight_decay=0.1, step=step), 0.3, grads=[grad, grad])
    assert torch.equal(master_of(halves), master)


@on_every_isa
def test_a_weight_that_a_program_sets_is_within_half_a_unit_of_its_master(isa):
    """A zero stays one, whatever the lower half of the value before it was."""
    before = patterns(np.arange(1 << 16, dtype=np.uint32) | 0x3F800000)
    for value in (0.0, -0.0, 1.5, -0.375):
        hi, low = split(before, isa)
        hi.fill_(value)
        update = native.Segment(torch.zeros(1 << 16), hi, low=low)
        joined = torch.empty_like(before)
        native.join(hi, low, joined, isa=isa)
        assert (joined - value).abs().max() <= max(abs(value) / 256, 1e-40), value
        native.PackedSegments([update], isa=isa).run(native.SGD(0.1))
        assert torch.equal(hi, torch.full_like(hi, value)), value
