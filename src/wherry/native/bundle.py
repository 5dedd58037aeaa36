"""Tensors that several passes read: looked at once, and then known by their addresses."""

from __future__ import annotations

from torch import Tensor

from wherry.errors import WherryError


class Bundle:
    """Contiguous tensors of one dtype on the CPU, of any shapes.

    >>> Bundle([torch.ones(2, 2), torch.ones(3)]).numels
    [4, 3]
    """

    __slots__ = ("addresses", "dtype", "numels", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.dtype = dtype = tensors[0].dtype
        self.addresses = [t.data_ptr() for t in tensors if t.is_cpu and t.dtype is dtype and t.is_contiguous()]
        self.numels = [tensor.numel() for tensor in tensors]
        if len(self.addresses) < len(tensors):
            raise WherryError(f"Bundle: expected contiguous CPU tensors of {dtype}, not all of {len(tensors)} are")
