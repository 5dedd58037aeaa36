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


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 256 * 40 + 77])
@pytest.mark.parametrize(("signed", "relative", "linear"), BOUNDS)
def test_values_are_near_and_the_same_on_every_instruction_set(numel, signed, relative, linear):
    torch.manual_seed(0)
    values = torch.randn(numel) * torch.exp(3 * torch.randn(numel))
    values = values if signed else values.square()
    made = {isa: there_and_back(values, signed=signed, isa=isa) for isa in ISAS}
    blocks, back = made[ISAS[0]]
    padded = torch.nn.functional.pad(values, (0, -values.numel() % 256)).view(-1, 256)
    largest = padded.abs().amax(1, keepdim=True).expand_as(padded).reshape(-1)[: values.numel()]
    error = (back - values).abs()
    assert torch.all(error <= (relative * values.abs()).maximum(linear * largest) * 1.0001 + 1e-45)
    for isa, (others, again) in made.items():
        assert_same_bits([others.codes, others.scales, again], [blocks.codes, blocks.scales, back], isa)


@on_every_isa
def test_blocks_with_a_value_that_has_no_code(isa):
    """A value that is not finite makes its block NaN and no other; tiny ones have no scale; a second moment stays."""
    for bad in (float("nan"), float("inf")):
        values = torch.ones(768)
        values[300] = bad
        _, back = there_and_back(values, signed=True, isa=isa)
        assert back[256:512].isnan().all()
        assert torch.equal(back[:256], torch.ones(256)) and torch.equal(back[512:], torch.ones(256))
    blocks, back = there_and_back(torch.full((300,), 1e-36), signed=True, isa=isa)
    assert not back.any() and not blocks.scales.any()
    _, back = there_and_back(torch.tensor([1.0, 0.0] + [1e-30] * 254), signed=False, isa=isa)
    assert back[1] == 0 and torch.all(back[2:] > 0)


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
    got = back.view(-1, 256)[:, 1:].flatten()
    exact = 0.7105 if signed else 0.7105**2
    step = (got.max() - got.min()).item()
    assert len(got.unique()) == 2
    assert abs(got.double().mean().item() - exact) < 5 * step / 2 / got.numel() ** 0.5
