"""Passes over memory other than the update: casts, sums, split and join."""

from __future__ import annotations

import torch
from torch import Tensor

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.native import fallback
from wherry.native.blocks import Blocks8
from wherry.native.loading import Engine, engine
from wherry.native.plan import INLINE_RUN, KINDS
from wherry.native.pool import Pool, default_pool

# Elements up to which a sum is quicker here than by waking the pool: it reads, and writes nothing.
INLINE_SUM = 1 << 18
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = (torch.int16, torch.uint16)


def _check(function: str, **tensors: tuple[Tensor, tuple[torch.dtype, ...]]) -> int:
    """The common numel of contiguous CPU tensors of the dtypes beside them."""
    first = next(iter(tensors))
    numel = tensors[first][0].numel()
    for name, (tensor, dtypes) in tensors.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise WherryError(
                f"{function}: {name} must be contiguous and on the CPU, got shape {tuple(tensor.shape)}, strides "
                f"{tuple(tensor.stride())}, on {tensor.device}"
            )
        if tensor.dtype not in dtypes:
            raise WherryError(f"{function}: {name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.numel() != numel:
            raise WherryError(f"{function}: {name} has {tensor.numel()} elements, {first} has {numel}")
    return numel


def _threads(chosen: Engine, pool: Pool | None, numel: int) -> int | None:
    """The library's pool for a pass of this size, or None for the calling thread, which waits for it."""
    if chosen.library is None or numel <= INLINE_RUN:
        return None
    pool = pool or default_pool()
    return pool.handle(chosen.library) if pool.threads > 1 else None


def accumulate(
    dst: Tensor, src: Tensor, scale: float = 1.0, *, pool: Pool | None = None, isa: str | None = None
) -> None:
    """dst += scale * src, in fp32, rounded once to dst's dtype. Both may be fp32, bf16 or fp16."""
    numel = _check("accumulate", dst=(dst, _FLOATS), src=(src, _FLOATS))
    if is_fake(dst):
        return
    use = engine(isa)
    if use.library is None:
        return fallback.accumulate(dst, src, scale)
    use.library.wherry_accumulate(
        use.code, _threads(use, pool, numel), dst.data_ptr(), KINDS[dst.dtype], src.data_ptr(), KINDS[src.dtype], scale,
        numel,
    )  # fmt: skip


def sum_squares(tensor: Tensor, pool: Pool | None = None, *, isa: str | None = None) -> float:
    """The sum of squares, in double and in an order of its own: however many threads, the same bits."""
    numel = _check("sum_squares", tensor=(tensor, _FLOATS))
    if is_fake(tensor):
        return 1.0
    use = engine(isa)
    if use.library is None:
        return fallback.sum_squares(tensor)
    threads = None if numel <= INLINE_SUM else _threads(use, pool, numel)
    return use.library.wherry_sum_squares(use.code, threads, tensor.data_ptr(), KINDS[tensor.dtype], numel)


def cast_copy(
    dst: Tensor,
    src: Tensor,
    *,
    stochastic: int | None = None,
    start: int = 0,
    pool: Pool | None = None,
    isa: str | None = None,
) -> None:
    """Copy with a cast among fp32, bf16 and fp16, to nearest even.

    `stochastic`, a seed, rounds fp32 to bf16 up or down by chance instead, so that the mean is kept; the draws are a
    function of the seed and the element's number, counted from `start`.
    """
    if is_fake(dst):
        return
    use = engine(isa)
    if stochastic is not None:
        numel = _check("cast_copy(stochastic=...)", dst=(dst, (torch.bfloat16,)), src=(src, (torch.float32,)))
        if use.library is None:
            return fallback.cast_stochastic(dst, src, start, stochastic)
        use.library.wherry_cast_stochastic(
            use.code, _threads(use, pool, numel), dst.data_ptr(), src.data_ptr(), start, stochastic & 0xFFFFFFFF, numel
        )
        return
    numel = _check("cast_copy", dst=(dst, _FLOATS), src=(src, _FLOATS))
    if use.library is None:
        dst.view(-1).copy_(src.view(-1))
        return
    use.library.wherry_cast(
        use.code, _threads(use, pool, numel), dst.data_ptr(), KINDS[dst.dtype], src.data_ptr(), KINDS[src.dtype], numel
    )


def split(master: Tensor, hi: Tensor, low: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """fp32 `master` into bf16 `hi`, rounded half up, and `low`, its lower 16 bits. `join` gives the same bits back."""
    numel = _check("split", master=(master, (torch.float32,)), hi=(hi, (torch.bfloat16,)), low=(low, _WORDS))
    if is_fake(master):
        return
    use = engine(isa)
    if use.library is None:
        return fallback.split(master, hi, low)
    use.library.wherry_split(
        use.code, _threads(use, pool, numel), master.data_ptr(), hi.data_ptr(), low.data_ptr(), numel
    )


def join(hi: Tensor, low: Tensor, master: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """The fp32 master of a split one."""
    numel = _check("join", master=(master, (torch.float32,)), hi=(hi, (torch.bfloat16,)), low=(low, _WORDS))
    if is_fake(master):
        return
    use = engine(isa)
    if use.library is None:
        return fallback.join(hi, low, master)
    use.library.wherry_join(
        use.code, _threads(use, pool, numel), hi.data_ptr(), low.data_ptr(), master.data_ptr(), numel
    )


def quantize(src: Tensor, blocks: Blocks8, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """fp32 `src` into 8-bit blocks, each value to the nearest code."""
    numel = _check("quantize", src=(src, (torch.float32,)), codes=(blocks.codes, (torch.int8, torch.uint8)))
    if is_fake(src):
        return
    use = engine(isa)
    if use.library is None:
        return fallback.quantize(src, blocks)
    use.library.wherry_quantize(
        use.code, _threads(use, pool, numel), src.data_ptr(), blocks.codes.data_ptr(), blocks.scales.data_ptr(),
        KINDS[blocks.codes.dtype], numel,
    )  # fmt: skip


def dequantize(blocks: Blocks8, dst: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """The values of 8-bit blocks, in fp32."""
    numel = _check("dequantize", dst=(dst, (torch.float32,)), codes=(blocks.codes, (torch.int8, torch.uint8)))
    if is_fake(dst):
        return
    use = engine(isa)
    if use.library is None:
        return fallback.dequantize(blocks, dst)
    use.library.wherry_dequantize(
        use.code, _threads(use, pool, numel), blocks.codes.data_ptr(), blocks.scales.data_ptr(), dst.data_ptr(),
        KINDS[blocks.codes.dtype], numel,
    )  # fmt: skip
