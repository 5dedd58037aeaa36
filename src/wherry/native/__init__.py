"""What must be fast on the host: C++ behind a plain C ABI, called with ctypes, and a torch fallback, bit for bit."""

from __future__ import annotations

from wherry.native.loading import available_isas, isa, library, why_not
from wherry.native.passes import accumulate, cast_copy, dequantize, join, quantize, split, sum_squares
from wherry.native.plan import Plan
from wherry.native.pool import Pool, default_pool
from wherry.native.rules import SGD, Adagrad, Adam, Lion, Rule
from wherry.native.segment import Blocks8, Segment

__all__ = [
    "SGD", "Adagrad", "Adam", "Blocks8", "Lion", "Plan", "Pool", "Rule", "Segment", "accumulate",
    "available_isas", "cast_copy", "default_pool", "dequantize", "isa", "join", "library", "quantize", "split",
    "sum_squares", "why_not",
]  # fmt: skip
