"""Tensors that several passes read: looked at once, and then known by their addresses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from wherry.errors import WherryError
from wherry.fake import is_fake


class Bundle:
    """Contiguous tensors of one dtype on the CPU, of any shapes.

    >>> list(Bundle([torch.ones(2, 2), torch.ones(3)]).numels)
    [4, 3]
    """

    __slots__ = ("addresses", "dtype", "numels", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        dtype = tensors[0].dtype
        if not all(t.is_cpu and t.dtype is dtype and t.is_contiguous() for t in tensors):
            raise WherryError(f"Bundle: expected contiguous CPU tensors of {dtype}, not all of {len(tensors)} are")
        self._look_at(tensors)

    def _look_at(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.dtype = tensors[0].dtype
        # As the library takes them: arrays of ctypes take five times as long to make. Without memory there are none.
        self.addresses = array("Q", () if is_fake(tensors[0]) else map(Tensor.data_ptr, tensors))
        self.numels = array("q", map(Tensor.numel, tensors))

    @classmethod
    def of_gradients(cls, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Bundle | None:
        """A bundle of what autograd has left; None if a gradient is missing, or is not plain values of `dtype`."""
        plain = [
            gradient
            for gradient in gradients
            if gradient is not None
            and gradient.dtype is dtype
            and gradient.layout is torch.strided
            and gradient.is_cpu
            and not gradient.requires_grad
            and gradient.is_contiguous()
        ]
        if len(plain) < len(gradients):
            return None
        bundle = cls.__new__(cls)
        bundle._look_at(plain)
        return bundle
