"""State in 8-bit blocks."""

from __future__ import annotations

import pytest
import torch

from wherry import native

from .cases import ISAS, assert_same_bits, on_every_isa


def there_and_back(values, *, signed, isa):
    blocks = native.Blocks8.zeros(values.numel(), signed=signed)
    native.quantize(values, blocks, isa=isa)
    back = torch.empty_like(values)
    native.dequantize(blocks, back, isa=isa)
    return blocks, back


@on_every_isa
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_its_own_value(isa, signed):
    codes = torch.arange(256, dtype=torch.uint8)
    blocks = native.Blocks8(codes.view(torch.int8) if signed else codes, torch.tensor([0.125]))
    values = torch.empty(256)
    native.dequantize(blocks, values, isa=isa)
    half = values[:128] if signed else values
    assert torch.all(half[1:] > half[:-1])
    assert half[0] == 0
    if signed:
        assert torch.equal(values[128:], -half)
    again, _ = there_and_back(values, signed=signed, isa=isa)
    assert again.scales.tolist() == [0.125]
    assert torch.equal(again.codes, blocks.codes)


# Half a step; below the first unsigned code a whole one, since what is not zero stays so.
BOUNDS = [(True, 1 / 32, 0.5 / 1984), (False, 1 / 16, 1 / 15 / 2**30)]


@on_every_isa
@pytest.mark.parametrize(("signed", "relative", "linear"), BOUNDS)
def test_values_are_near(isa, signed, relative, linear):
    torch.manual_seed(0)
    values = torch.randn(256 * 40 + 77) * torch.exp(3 * torch.randn(256 * 40 + 77))
    values = values if signed else values.square()
    _, back = there_and_back(values, signed=signed, isa=isa)
    padded = torch.nn.functional.pad(values, (0, -values.numel() % 256)).view(-1, 256)
    largest = padded.abs().amax(1, keepdim=True).expand_as(padded).reshape(-1)[: values.numel()]
    error = (back - values).abs()
    assert torch.all(error <= (relative * values.abs()).maximum(linear * largest) * 1.0001 + 1e-45)


def test_the_same_bits_on_every_instruction_set():
    torch.manual_seed(1)
    for numel in (1, 255, 256, 257, 5000):
        values = torch.randn(numel) * torch.exp(4 * torch.randn(numel))
        for signed in (True, False):
            made = {isa: there_and_back(values.abs() if not signed else values, signed=signed, isa=isa) for isa in ISAS}
            for isa in ISAS:
                (blocks, back), (expected, value) = made[isa], made[ISAS[0]]
                assert_same_bits([blocks.codes, blocks.scales, back], [expected.codes, expected.scales, value], isa)


@on_every_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(isa, bad):
    values = torch.ones(768)
    values[300] = bad
    _, back = there_and_back(values, signed=True, isa=isa)
    assert back[256:512].isnan().all()
    assert torch.equal(back[:256], torch.ones(256))
    assert torch.equal(back[512:], torch.ones(256))


@on_every_isa
def test_zeros_and_what_is_too_small_for_a_scale(isa):
    _, back = there_and_back(torch.zeros(300), signed=True, isa=isa)
    assert not back.any()
    blocks, back = there_and_back(torch.full((300,), 1e-36), signed=True, isa=isa)
    assert not back.any() and not blocks.scales.any()


@on_every_isa
def test_a_second_moment_does_not_vanish(isa):
    values = torch.full((256,), 1e-30)
    values[0] = 1.0
    values[1] = 0.0
    _, back = there_and_back(values, signed=False, isa=isa)
    assert back[1] == 0
    assert torch.all(back[2:] > 0)


@on_every_isa
@pytest.mark.parametrize("signed", [True, False])
def test_rounding_inside_an_update_keeps_the_mean(isa, signed):
    # A rule that replaces its state: the sum of squares, or the momentum, of one step from zero.
    numel = 256 * 400
    grad = torch.full((numel,), 0.7105)
    grad[::256] = 3.0
    state = native.Blocks8.zeros(numel, signed=signed)
    rule = native.SGD(0.1, 0.9, first=True) if signed else native.Adagrad(0.1)
    native.PackedSegments([native.Segment(grad, torch.zeros(numel), state=(state,))], isa=isa).run(rule)
    back = torch.empty(numel)
    native.dequantize(state, back, isa=isa)
    mask = torch.ones(numel, dtype=torch.bool)
    mask[::256] = False
    got = back[mask]
    exact = 0.7105 if signed else 0.7105**2
    step = (got.max() - got.min()).item()
    assert len(got.unique()) == 2
    assert abs(got.double().mean().item() - exact) < 5 * step / 2 / got.numel() ** 0.5
