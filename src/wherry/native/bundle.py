"""Tensors that several passes read: looked at once, and then known by their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wherry.errors import WherryError


class Bundle:
    """Contiguous tensors of one dtype on the CPU, of any shapes.

    >>> Bundle([torch.ones(2, 2), torch.ones(3)]).numels
    [4, 3]
    """

    __slots__ = ("addresses", "dtype", "numels", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        dtype = tensors[0].dtype
        addresses = [t.data_ptr() for t in tensors if t.is_cpu and t.dtype is dtype and t.is_contiguous()]
        if len(addresses) < len(tensors):
            raise WherryError(f"Bundle: expected contiguous CPU tensors of {dtype}, not all of {len(tensors)} are")
        self._fill(tensors, addresses, dtype)

    def _fill(self, tensors: list[Tensor], addresses: list[int], dtype: torch.dtype) -> None:
        self.tensors = tensors
        self.addresses = addresses
        self.dtype = dtype
        self.numels = [tensor.numel() for tensor in tensors]

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
        bundle._fill(plain, [gradient.data_ptr() for gradient in plain], dtype)
        return bundle
