"""Passes over memory other than the update: casts, sums, split and join."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wherry.fake import is_fake
from wherry.native import fallback
from wherry.native.loading import engine
from wherry.native.packed import INLINE_RUN
from wherry.native.pool import Pool, default_pool
from wherry.native.segment import CODES, KINDS, Blocks8

# Elements up to which a sum is quicker here than by waking the pool: it reads, and writes nothing.
INLINE_SUM = 1 << 18
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SPLIT = (torch.float32,), (torch.bfloat16,), (torch.int16, torch.uint16)


def _check(first: Tensor, *others: Tensor, dtypes: Sequence[Sequence[torch.dtype]]) -> int:
    """The common numel of contiguous CPU tensors of these dtypes."""
    for tensor, allowed in zip((first, *others), dtypes, strict=True):
        assert tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in allowed, tensor.dtype
        assert tensor.numel() == first.numel(), f"{tensor.numel()} elements, {first.numel()} in the first"
    return first.numel()


def _native(
    function: str, numel: int, pool: Pool | None, isa: str | None, *arguments: int | float, inline: int = INLINE_RUN
) -> float | None:
    """What the library's function of this name returns (of a pass: 0), or None where there is no library.

    A pass up to `inline` elements runs in the calling thread, which waits for it.
    """
    use = engine(isa)
    if use.library is None:
        return None
    threads = None
    if numel > inline:
        pool = pool or default_pool()
        threads = pool.handle(use.library) if pool.threads > 1 else None
    return getattr(use.library, function)(use.code, threads, *arguments, numel) or 0.0


def accumulate(
    dst: Tensor, src: Tensor, scale: float = 1.0, *, pool: Pool | None = None, isa: str | None = None
) -> None:
    """dst += scale * src, in fp32, rounded once to dst's dtype. Both may be fp32, bf16 or fp16."""
    numel = _check(dst, src, dtypes=(_FLOATS, _FLOATS))
    if is_fake(dst):
        return
    given = dst.data_ptr(), KINDS[dst.dtype], src.data_ptr(), KINDS[src.dtype], scale
    if _native("wherry_accumulate", numel, pool, isa, *given) is None:
        fallback.accumulate(dst, src, scale)


def sum_squares(tensor: Tensor, pool: Pool | None = None, *, isa: str | None = None) -> float:
    """The sum of squares, in double and in an order of its own: however many threads, the same bits."""
    numel = _check(tensor, dtypes=(_FLOATS,))
    if is_fake(tensor):
        return 1.0
    given = tensor.data_ptr(), KINDS[tensor.dtype]
    total = _native("wherry_sum_squares", numel, pool, isa, *given, inline=INLINE_SUM)
    return fallback.sum_squares(tensor) if total is None else total


def cast_copy(dst: Tensor, src: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """Copy with a cast among fp32, bf16 and fp16, to nearest even."""
    numel = _check(dst, src, dtypes=(_FLOATS, _FLOATS))
    if is_fake(dst):
        return
    given = dst.data_ptr(), KINDS[dst.dtype], src.data_ptr(), KINDS[src.dtype]
    if _native("wherry_cast", numel, pool, isa, *given) is None:
        dst.view(-1).copy_(src.view(-1))


def split(master: Tensor, hi: Tensor, low: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """fp32 `master` into bf16 `hi`, rounded half up, and `low`, its lower 16 bits. `join` gives the same bits back."""
    numel = _check(master, hi, low, dtypes=_SPLIT)
    if is_fake(master):
        return
    if _native("wherry_split", numel, pool, isa, master.data_ptr(), hi.data_ptr(), low.data_ptr()) is None:
        fallback.split(master, hi, low)


def join(hi: Tensor, low: Tensor, master: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """The fp32 master of a split one."""
    numel = _check(master, hi, low, dtypes=_SPLIT)
    if is_fake(master):
        return
    if _native("wherry_join", numel, pool, isa, hi.data_ptr(), low.data_ptr(), master.data_ptr()) is None:
        fallback.join(hi, low, master)


def quantize(src: Tensor, blocks: Blocks8, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """fp32 `src` into 8-bit blocks, each value to the nearest code."""
    numel = _check(src, blocks.codes, dtypes=((torch.float32,), CODES))
    if is_fake(src):
        return
    given = src.data_ptr(), blocks.codes.data_ptr(), blocks.scales.data_ptr(), KINDS[blocks.codes.dtype]
    if _native("wherry_quantize", numel, pool, isa, *given) is None:
        fallback.quantize(src, blocks)


def dequantize(blocks: Blocks8, dst: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """The values of 8-bit blocks, in fp32."""
    numel = _check(dst, blocks.codes, dtypes=((torch.float32,), CODES))
    if is_fake(dst):
        return
    given = blocks.codes.data_ptr(), blocks.scales.data_ptr(), dst.data_ptr(), KINDS[blocks.codes.dtype]
    if _native("wherry_dequantize", numel, pool, isa, *given) is None:
        fallback.dequantize(blocks, dst)
