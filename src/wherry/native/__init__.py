"""What must be fast on the host: C++ behind a plain C ABI, called with ctypes, and a torch fallback, bit for bit."""

from __future__ import annotations

from wherry.native.formulas import SGD, Adagrad, Adam, Formula, Lion
from wherry.native.loading import available_isas, isa, library, why_not
from wherry.native.on_device import digest, update_on_device
from wherry.native.packed import PackedSegments
from wherry.native.passes import accumulate, cast_copy, dequantize, join, quantize, split, sum_squares
from wherry.native.pool import Pool, default_pool, nodes
from wherry.native.segment import Blocks8, Segment

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Blocks8",
    "Formula",
    "Lion",
    "PackedSegments",
    "Pool",
    "Segment",
    "accumulate",
    "available_isas",
    "cast_copy",
    "default_pool",
    "dequantize",
    "digest",
    "isa",
    "join",
    "library",
    "nodes",
    "quantize",
    "split",
    "sum_squares",
    "update_on_device",
    "why_not",
]  # fmt: skip
