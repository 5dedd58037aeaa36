"""Weights that autograd saves: gathered again when the backward wants them.

Units are gathered for their backward by hooks on their outputs. This is for the ways past those: outputs in objects of
the user's own, losses kept on a module, weights used detached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from wherry.parallel.partition import is_dtensor
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.sharding.weights import Gatherer


class SavedWeights:
    """Packs for autograd what it saves in the model's forwards, and unpacks it."""

    def __init__(self, units: Iterable[Unit], gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._flat_of = {flat.whole.untyped_storage()._cdata: flat for unit in units for flat in unit.travelling}
        # Told of every tensor that autograd saves in the model's forwards, as long as somebody asks.
        self.notice: Callable[[torch.Tensor], None] | None = None

    def around(self) -> AbstractContextManager[Any]:
        """For a forward to run in."""
        if not (self._flat_of or self.notice is not None) or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Flat]:
        """What autograd keeps of a tensor: itself, or with the flat that it is a view of."""
        inner = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        if self.notice is not None:
            self.notice(inner)
        flat = self._flat_of.get(inner.untyped_storage()._cdata) if self._flat_of else None
        return tensor if flat is None else (tensor, flat)

    def unpack(self, saved: torch.Tensor | tuple[torch.Tensor, Flat]) -> torch.Tensor:
        """The tensor again, its flat gathered."""
        if isinstance(saved, torch.Tensor):
            return saved
        tensor, flat = saved
        if flat.weights is not Weights.WHOLE:
            self._gatherer.gather_flat(flat)
        return tensor
