"""The same passes in plain torch, for machines without the library and for other devices: the same operations in the
same order.

Only operations that round once are used (no lerp, addcmul or addcdiv, which may fuse), so the bits agree with the
kernels', but for which NaN a NaN is. On a device nothing is read back: the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wherry.native.formulas import (
    FLAG_FIRST,
    FLAG_L2,
    FLAG_LERP_HIGH,
    FLAG_MAXIMIZE,
    FLAG_NESTEROV,
    SGD,
    Adagrad,
    Adam,
    Formula,
    Lion,
)
from wherry.native.segment import BLOCK, Blocks8

if TYPE_CHECKING:
    from wherry.native.segment import Segment

# Elements at a time: temporaries stay in cache. A multiple of BLOCK, and the kernels' unit of summing.
CHUNK = 32768
# On another device: few launches, and temporaries of a few tens of MB.
DEVICE_CHUNK = 1 << 20
_MASK = 0xFFFFFFFF


def _chunks(flat: Tensor) -> Iterator[slice]:
    numel, size = flat.numel(), CHUNK if flat.is_cpu else DEVICE_CHUNK
    return (slice(i, min(i + size, numel)) for i in range(0, numel, size))


# Bits: patterns are int32, which wraps around, and whose shift to the right brings the sign --------------------------


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def _words(tensor: Tensor) -> Tensor:
    """16-bit patterns; above them the sign."""
    return tensor.view(torch.int16).to(torch.int32)


def _put_words(tensor: Tensor, bits: Tensor) -> None:
    tensor.view(torch.int16).copy_(bits)


def int32_of(x: int) -> int:
    """The int32 that has the last 32 bits of it."""
    return (x + 0x80000000 & _MASK) - 0x80000000


def _scramble(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def seed_of(rule_seed: int, segment: Segment) -> int:
    """What the draws of a segment at a step begin with."""
    seed = _scramble(rule_seed ^ _scramble(segment.seed & _MASK))
    return _scramble(seed ^ _scramble(segment.start >> 32 & _MASK))


def _noise(first: int, like: Tensor, seed: int, part: int) -> Tensor:
    """16 random bits for each element from number `first`; part 0 or 1 of the element's hash."""
    x = torch.arange(like.numel(), out=torch.empty_like(like, dtype=torch.int32))
    x = x + int32_of(first) ^ int32_of(seed)
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * int32_of(0x846CA68B)
    x = x ^ (x >> 16 & 0xFFFF)
    return (x >> 16 if part else x) & 0xFFFF


def _put_stochastic(dst: Tensor, src: Tensor, noise: Tensor) -> None:
    _put_words(dst, torch.where(src.isnan(), 0x7FC0, _bits(src) + noise >> 16))


# Split master -------------------------------------------------------------------------------------------------------


def split(master: Tensor, hi: Tensor, low: Tensor) -> None:
    master, hi, low = master.view(-1), hi.view(-1), low.view(-1)
    for at in _chunks(master):
        raw = _bits(master[at])
        _put_words(hi[at], torch.where(master[at].isnan(), raw >> 16 | 0x40, raw + 0x8000 >> 16))
        _put_words(low[at], raw & 0xFFFF)


def join(hi: Tensor, low: Tensor, master: Tensor) -> None:
    master, hi, low = master.view(-1), hi.view(-1), low.view(-1)
    for at in _chunks(master):
        upper, below = _words(hi[at]), _words(low[at]) & 0xFFFF
        high = below > 0x7FFF
        raw = torch.where(high, (upper << 16 | below) - 0x10000, upper << 16 | below)
        master[at] = _floats(torch.where(high & (upper & 0x7FFF == 0), upper << 16, raw))


# 8-bit blocks -------------------------------------------------------------------------------------------------------

# A scale below this has no finite reciprocal; such a block is zero.
_SMALLEST_SCALE = float(np.float32(1e-37))


def _code_numbers(signed: bool) -> tuple[int, int, int, int, float]:
    """Mantissa bits, offset of the codes above the linear ones, count of those, largest code, its value."""
    mantissa = 4 if signed else 3
    offset = ((127 + mantissa) << mantissa) - (1 << mantissa)
    return mantissa, offset, 2 << mantissa, 127 if signed else 255, 1984.0 if signed else 16106127360.0


def _padded(tensor: Tensor) -> Tensor:
    """As rows of whole blocks, zeros at the end."""
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)


def _encode(src: Tensor, codes: Tensor, scales: Tensor, noise: Tensor) -> None:
    signed = codes.dtype is torch.int8
    mantissa, offset, linear, largest, top = _code_numbers(signed)
    drop, numel = 23 - mantissa, src.numel()
    tile = _padded(src)
    raw = _bits(tile)
    magnitude = raw & 0x7FFFFFFF
    most = magnitude.amax(1)
    finite = most < 0x7F800000
    # A device would multiply by the inverse of a number.
    step = torch.where(finite, _floats(most) / torch.full_like(scales, top), torch.nan)
    usable = finite & (step >= _SMALLEST_SCALE)
    scales.copy_(torch.where(finite & ~usable, 0.0, step))
    scaled = _floats(magnitude) * torch.where(usable, 1.0 / step, 0.0)[:, None]
    noise = _padded(noise)
    large = (_bits(scaled) + (noise << drop - 16) >> drop) - offset
    within = scaled < linear
    small = torch.where(within, scaled, 0.0).add(noise.float() * (1 / 65536)).to(torch.int32)
    code = torch.where(within, small, large).clamp(max=largest)
    code = code | raw >> 24 & 0x80 if signed else torch.where((code == 0) & (magnitude > 0), 1, code)
    code = torch.where(usable[:, None], code, 0)
    codes.view(torch.uint8).copy_(code.view(-1)[:numel])


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    signed = codes.dtype is torch.int8
    mantissa, offset, linear, _, _ = _code_numbers(signed)
    code = _padded(codes.view(torch.uint8).to(torch.int32))
    magnitude = code & 0x7F if signed else code
    value = torch.where(magnitude < linear, magnitude.float(), _floats(magnitude + offset << 23 - mantissa))
    value = value * scales[:, None]
    if signed:
        value = _floats(_bits(value) | code >> 7 << 31)
    return value.view(-1)[: codes.numel()]


def _block_rows(at: slice) -> slice:
    return slice(at.start // BLOCK, -(-at.stop // BLOCK))


def quantize(src: Tensor, blocks: Blocks8) -> None:
    src, codes = src.view(-1), blocks.codes.view(-1)
    for at in _chunks(src):
        nearest = torch.full((at.stop - at.start,), 0x8000, dtype=torch.int32)
        _encode(src[at], codes[at], blocks.scales[_block_rows(at)], nearest)


def dequantize(blocks: Blocks8, dst: Tensor) -> None:
    dst, codes = dst.view(-1), blocks.codes.view(-1)
    for at in _chunks(dst):
        dst[at] = _decode(codes[at], blocks.scales[_block_rows(at)])


# Casts and sums -----------------------------------------------------------------------------------------------------


def accumulate(dst: Tensor, src: Tensor, scale: float) -> None:
    dst, src = dst.detach().view(-1), src.detach().view(-1)
    for at in _chunks(dst):
        dst[at] = dst[at].float() + src[at].float() * scale


def sum_squares(tensor: Tensor) -> float:
    """32 running sums side by side over each chunk, folded in halves; the chunks then in order."""
    total = 0.0
    flat = tensor.detach().view(-1)
    for at in _chunks(flat):
        squares = flat[at].double().square()
        lanes = torch.nn.functional.pad(squares, (0, -squares.numel() % 32)).view(-1, 32).cumsum(0)[-1]
        while lanes.numel() > 1:
            half = lanes.numel() // 2
            lanes = lanes[:half] + lanes[half:]
        total += lanes.item()
    return total


# Updates ------------------------------------------------------------------------------------------------------------


def _root(x: Tensor) -> Tensor:
    """The exactly rounded square root: torch's fp32 one may be off by a bit, so it is taken in double."""
    return x.double().sqrt_().float()


def _adam(n: Sequence[float], flags: int, p: Tensor, g: Tensor, state: list[Tensor]) -> Tensor:
    m, v = state
    if flags & FLAG_L2:
        g = g + p * n[7]
    p = p * n[6]
    gap = g - m
    rest = float(np.float32(1) - np.float32(n[0]))
    m.copy_(g - gap * rest if flags & FLAG_LERP_HIGH else m + gap * n[0])
    v.mul_(n[1]).add_((g * n[2]).mul_(g))
    return p.add_((m * n[5]).div_(_root(v).mul_(n[3]).add_(n[4])))


def _adagrad(n: Sequence[float], flags: int, p: Tensor, g: Tensor, state: list[Tensor]) -> Tensor:
    if flags & FLAG_L2:
        g = g + p * n[2]
    (total,) = state
    total.add_(g * g)
    return p + (g * n[0]).div_(_root(total).add_(n[1]))


def _lion(n: Sequence[float], flags: int, p: Tensor, g: Tensor, state: list[Tensor]) -> Tensor:
    (m,) = state
    toward = m * n[0] + g * n[1]
    sign = (toward > 0).float() - (toward < 0).float()
    m.mul_(n[2]).add_(g * n[3])
    return (p * n[5]).add_(sign * n[4])


def _sgd(n: Sequence[float], flags: int, p: Tensor, g: Tensor, state: list[Tensor]) -> Tensor:
    if flags & FLAG_L2:
        g = g + p * n[3]
    if state:
        (buffer,) = state
        buffer.copy_(g if flags & FLAG_FIRST else buffer * n[0] + g * n[1])
        g = g + buffer * n[0] if flags & FLAG_NESTEROV else buffer
    return p + g * n[2]


_FORMULAS = {Adam: _adam, Adagrad: _adagrad, Lion: _lion, SGD: _sgd}


def _read_weight(s: Segment, at: slice) -> Tensor:
    if s.low is not None:
        assert s.working is not None
        p = torch.empty(at.stop - at.start, dtype=torch.float32, device=s.low.device)
        join(s.working.detach()[at], s.low[at], p)
        return p
    weights = s.working if s.master is None else s.master
    assert weights is not None
    return weights.detach()[at]


def _write_weight(s: Segment, at: slice, p: Tensor) -> None:
    if s.low is not None:
        assert s.working is not None
        return split(p, s.working.detach()[at], s.low[at])
    for weights in (s.master, s.working):
        if weights is not None:
            weights.detach()[at] = p


def _open(state: Tensor | Blocks8, at: slice) -> Tensor:
    if isinstance(state, Blocks8):
        return _decode(state.codes[at], state.scales[_block_rows(at)])
    return state.detach()[at].float()


def _close(s: Segment, k: int, at: slice, value: Tensor, seed: int) -> None:
    state = s.state[k]
    if not isinstance(state, Blocks8) and state.dtype is torch.float32:
        state.detach()[at] = value
        return
    noise = _noise(s.start + at.start, value, seed, k)
    if isinstance(state, Blocks8):
        _encode(value, state.codes[at], state.scales[_block_rows(at)], noise)
    else:
        _put_stochastic(state.detach()[at], value, noise)


def _update_segment(s: Segment, formula: Formula, multiplier: float, grad: Tensor) -> None:
    _, flags, rule_seed, numbers = formula.rounded()
    apply = _FORMULAS[type(formula)]
    scale = -multiplier if flags & FLAG_MAXIMIZE else multiplier
    seed, grad = seed_of(rule_seed, s), grad.detach().view(-1)
    for at in _chunks(grad):
        state = [_open(state, at) for state in s.state]
        p = apply(numbers, flags, _read_weight(s, at), grad[at].float() * scale, state)
        _write_weight(s, at, p)
        for k, value in enumerate(state):
            _close(s, k, at, value, seed)


def update(
    segments: Sequence[Segment],
    formulas: Formula | Sequence[Formula],
    multiplier: float,
    grads: Sequence[Tensor] | None,
) -> None:
    """What `PackedSegments.submit` does, here and now; on a device, on its current stream."""
    with torch.no_grad():
        for i, segment in enumerate(segments):
            grad = segment.grad if grads is None else grads[i]
            assert grad is not None
            _update_segment(segment, formulas if isinstance(formulas, Formula) else formulas[i], multiplier, grad)
