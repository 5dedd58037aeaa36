"""Tensors that share memory, by their addresses alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from wherry.fake import is_fake
from wherry.parallel.partition import part_of


class _AddressRange(NamedTuple):
    """Addresses from a tensor's first byte to its last, and the tensor's position among others."""

    device: str
    start: int
    stop: int
    position: int


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the positions of every two tensors that have an element in common, the lower position first.

    Address ranges are sorted; only overlapping ones are compared exactly, as interleaved columns share nothing.
    """
    parts = [part_of(tensor) for tensor in tensors]
    ranges = sorted(_addresses_of(part, position) for position, part in enumerate(parts) if _has_memory(part))
    near: list[_AddressRange] = []
    for own in ranges:
        near = [other for other in near if other.device == own.device and other.stop > own.start]
        mine = _as_array(parts[own.position]) if near else None
        for other in near:
            if np.shares_memory(mine, _as_array(parts[other.position])):
                yield min(other.position, own.position), max(other.position, own.position)
        near.append(own)


def _has_memory(part: torch.Tensor) -> bool:
    """Exclude tensors without an address, and placeholders that are expanded from one element."""
    if part.is_meta or is_fake(part) or part.layout is not torch.strided or not part.numel():
        return False
    return part.is_contiguous() or all(
        stride or size == 1 for size, stride in zip(part.shape, part.stride(), strict=True)
    )


def _addresses_of(part: torch.Tensor, position: int) -> _AddressRange:
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    start = part.data_ptr()
    return _AddressRange(str(part.device), start, start + (last + 1) * part.element_size(), position)


def _as_array(part: torch.Tensor) -> Any:
    """Describe a tensor's memory as an array that is never read: of any dtype, on any device."""
    size = part.element_size()
    described = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (part.data_ptr(), True),
        "shape": tuple(part.shape),
        "strides": tuple(stride * size for stride in part.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))
