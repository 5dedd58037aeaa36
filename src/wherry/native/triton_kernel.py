"""The update as a Triton kernel: what `fallback.update` does to a segment, in one pass over a GPU's memory.

It is imported where a GPU is updated, and nowhere else: Triton takes its time, and is not everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wherry.native.fallback import int32_of, seed_of
from wherry.native.formulas import (
    FLAG_FIRST,
    FLAG_L2,
    FLAG_LERP_HIGH,
    FLAG_MAXIMIZE,
    FLAG_NESTEROV,
    Formula,
)
from wherry.native.segment import Blocks8, Segment

# Elements of a program.
TILE = 1024
DIGEST_TILE = 4096
OPTIONS = {"enable_fp_fusion": False}
_WORDS = (torch.bfloat16, torch.uint16)


def update(s: Segment, formula: Formula, multiplier: float) -> None:
    """Of states in fp32 and bf16, on the current device's current stream."""
    if not s.numel:
        return
    _, flags, rule_seed, numbers = formula.rounded()
    weight, working = (s.working, None) if s.master is None and s.low is None else (s.master, s.working)
    tensors = [s.grad, weight, working, s.low, *s.state, *(None,) * (2 - len(s.state))]
    _update[(triton.cdiv(s.numel, TILE),)](
        *map(_words, tensors),
        s.numel,
        int32_of(s.start),
        int32_of(seed_of(rule_seed, s)),
        -multiplier if flags & FLAG_MAXIMIZE else multiplier,
        *numbers[:8],
        rule=type(formula).__name__,
        l2=bool(flags & FLAG_L2),
        lerp_high=bool(flags & FLAG_LERP_HIGH),
        starts=bool(flags & FLAG_FIRST),
        nesterov=bool(flags & FLAG_NESTEROV),
        tile=TILE,
        **OPTIONS,
    )  # fmt: skip


def _words(tensor: torch.Tensor | Blocks8 | None) -> torch.Tensor | None:
    """bf16 as the patterns, as which the kernel reads and writes it."""
    assert not isinstance(tensor, Blocks8), "8-bit states are updated in torch"
    return tensor.view(torch.int16) if tensor is not None and tensor.dtype in _WORDS else tensor


def digest(words: torch.Tensor) -> torch.Tensor:
    """Do what `on_device.digest` does, in one pass."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    _digest[(triton.cdiv(words.numel(), DIGEST_TILE),)](words, total, words.numel(), tile=DIGEST_TILE)
    return total


@triton.jit
def _digest(words: tl.tensor, total: tl.tensor, numel: tl.tensor, tile: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    x = tl.load(words + at, at < numel, other=0)
    x = (x ^ x >> 31) * (2 * at + 1)
    # Sums of integers are the same in any order.
    tl.atomic_add(total, tl.sum(x ^ x >> 29))


@triton.jit(do_not_specialize=["number", "seed"])
def _update(
    grad: tl.tensor,
    weight: tl.tensor,
    working: tl.tensor,
    low: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    numel: tl.tensor,
    number: tl.tensor,
    seed: tl.tensor,
    multiplier: tl.tensor,
    c0: tl.tensor,
    c1: tl.tensor,
    c2: tl.tensor,
    c3: tl.tensor,
    c4: tl.tensor,
    c5: tl.tensor,
    c6: tl.tensor,
    c7: tl.tensor,
    rule: tl.constexpr,
    l2: tl.constexpr,
    lerp_high: tl.constexpr,
    starts: tl.constexpr,
    nesterov: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < numel
    g = _opened(tl.load(grad + at, inside)) * multiplier
    if low is not None:  # the lower half has a sign: this is `join`, but for which NaN a NaN is
        upper = tl.load(working + at, inside).to(tl.int32) << 16
        raw = upper + tl.load(low + at, inside).to(tl.int32)
        p = tl.where((raw & 0x7FFF8000) == 0x7FFF8000, upper, raw).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weight + at, inside)
    a = _opened(tl.load(first + at, inside)) if first is not None else p
    b = _opened(tl.load(second + at, inside)) if second is not None else p

    if rule == "Adam":
        if l2:
            g += p * c7
        gap = g - a
        a = g - gap * (1.0 - c0) if lerp_high else a + gap * c0
        b = b * c1 + g * c2 * g
        p = p * c6 + _quotient(a * c5, _root(b) * c3 + c4)
    elif rule == "Adagrad":
        if l2:
            g += p * c2
        a += g * g
        p += _quotient(g * c0, _root(a) + c1)
    elif rule == "Lion":
        toward = a * c0 + g * c1
        sign = (toward > 0).to(tl.float32) - (toward < 0).to(tl.float32)
        a = a * c2 + g * c3
        p = p * c5 + sign * c4
    else:
        if l2:
            g += p * c3
        if first is not None:
            a = g if starts else a * c0 + g * c1
            g = g + a * c0 if nesterov else a
        p += g * c2

    if low is not None:
        raw = p.to(tl.int32, bitcast=True)
        tl.store(working + at, (tl.where(p != p, raw, raw + 0x8000) >> 16).to(tl.int16), inside)
        tl.store(low + at, raw.to(tl.int16), inside)
    else:
        tl.store(weight + at, p, inside)
    if low is None and working is not None:
        even = (p.to(tl.uint32, bitcast=True) >> 16 & 1) + 0x7FFF
        tl.store(working + at, _closed(p, even, working.dtype.element_ty), inside)
    noise = _noise(at, number, seed)
    if first is not None:
        tl.store(first + at, _closed(a, noise & 0xFFFF, first.dtype.element_ty), inside)
    if second is not None:
        tl.store(second + at, _closed(b, noise >> 16, second.dtype.element_ty), inside)


@triton.jit
def _opened(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _closed(x: tl.tensor, below: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """`below` is what is added below the last bit of a bf16 number, before the rest is dropped."""
    if dtype == tl.int16:
        return tl.where(x != x, 0x7FC0, x.to(tl.uint32, bitcast=True) + below >> 16).to(tl.int16)
    return x.to(dtype)


@triton.jit
def _noise(at: tl.tensor, number: tl.tensor, seed: tl.tensor) -> tl.tensor:
    x = at.to(tl.uint32) + number.to(tl.uint32) ^ seed.to(tl.uint32)
    x = (x ^ x >> 16) * 0x7FEB352D
    x = (x ^ x >> 15) * 0x846CA68B
    return x ^ x >> 16


# On NVIDIA's GPUs the fp32 division and root of some versions of Triton take what is denormal for zero (3.5's do, by
# libdevice). A quotient or a root of fp32 numbers that is rounded to fp64 and then to fp32 is as if rounded once.
@triton.jit
def _quotient(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return (x.to(tl.float64) / y.to(tl.float64)).to(tl.float32)


@triton.jit
def _root(x: tl.tensor) -> tl.tensor:
    return tl.sqrt(x.to(tl.float64)).to(tl.float32)
