"""Weights that autograd saves: gathered again when the backward wants them.

Units are gathered for their backward by hooks on their outputs. This is for the ways past those: outputs in objects of
the user's own, losses kept on a module, weights used detached.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from wherry.parallel.partition import is_dtensor
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.sharding.weights import Gatherer

# A view of a flat, the flat, and for what was cast from the view its type, shape, strides and offset.
Packed = tuple[torch.Tensor, Flat, tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None]


class SavedWeights:
    """Packs for autograd what it saves in the model's forwards, and unpacks it."""

    def __init__(self, units: Iterable[Unit], gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._flat_of = {flat.whole.untyped_storage()._cdata: flat for unit in units for flat in unit.travelling}

    def around(self) -> AbstractContextManager[Any]:
        """For a forward to run in."""
        if not self._flat_of or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Packed:
        """What autograd keeps of a tensor: itself, or with the flat that it is a view of, or was cast from."""
        inner = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        if self._flat_of:
            flat = self._flat_of.get(inner.untyped_storage()._cdata)
            if flat is not None:
                return tensor, flat, None
            cast = tensor._base if tensor._is_view() else tensor
            made_by = cast.grad_fn if cast is not None else None
            if made_by is not None and made_by.name() == "ToCopyBackward0":
                # Of a weight, as autocast makes it: kept, they would be another whole model until the backward.
                leaf = getattr(made_by.next_functions[0][0], "variable", None)
                if leaf is not None and not is_dtensor(leaf):
                    flat = self._flat_of.get(leaf.untyped_storage()._cdata)
                if flat is not None:
                    shape = (tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
                    return leaf.data, flat, shape  # type: ignore[union-attr]
        return tensor

    def unpack(self, saved: torch.Tensor | Packed) -> torch.Tensor:
        """The tensor again, its flat gathered."""
        if isinstance(saved, torch.Tensor):
            return saved
        tensor, flat, cast = saved
        if flat.weights is not Weights.WHOLE:
            self._gatherer.gather_flat(flat)
        return tensor if cast is None else tensor.to(cast[0]).as_strided(*cast[1:])
