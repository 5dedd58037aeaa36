"""Weights in a backward that hooks on outputs and on parameters do not tell of: those saved, and frozen ones."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from wherry.parallel.partition import inside, is_dtensor
from wherry.sharding.autograd import NO_TASK, backward_task, tensors_in
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.sharding.weights import Gatherer

# A view of a flat, the flat, and for what was cast from the view its type, shape, strides and offset.
Packed = tuple[torch.Tensor, Flat, tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None]


class SavedWeights:
    """Packs for autograd what it saves in the model's forwards; unpacked, weights are gathered again.

    Units are gathered for their backward by hooks on their outputs. This is for the ways past those: outputs in objects
    of the user's own, losses kept on a module, weights used detached.
    """

    def __init__(self, units: Iterable[Unit], gatherer: Gatherer) -> None:
        self._units = units
        self._gatherer = gatherer
        self.take_stock()

    def take_stock(self) -> None:
        """Note the flats that units have now."""
        travelling = (flat for unit in self._units for flat in unit.travelling)
        self._flat_of = {flat.whole.untyped_storage()._cdata: flat for flat in travelling}

    def around(self) -> AbstractContextManager[Any]:
        """For a forward to run in."""
        if not self._flat_of or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a weight of a flat, or a view of one."""
        packed = self.pack(tensor)
        return isinstance(packed, tuple) and packed[2] is None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Packed:
        """What autograd keeps of a tensor: itself, or with the flat that it is a view of, or was cast from."""
        place = None if type(tensor) is torch.Tensor else inside(tensor)
        inner = tensor if place is None else getattr(*place)
        if self._flat_of:
            try:
                flat = self._flat_of.get(inner.untyped_storage()._cdata)
            except NotImplementedError:  # a sparse tensor, or one of torch.vmap
                flat = None
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
        # An operation that keeps its own result as it is keeps its graph, for ever if no backward comes to free it.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def unpack(self, saved: torch.Tensor | Packed) -> torch.Tensor:
        """The tensor again, its flat gathered."""
        if isinstance(saved, torch.Tensor):
            return saved
        tensor, flat, cast = saved
        if flat.weights is not Weights.WHOLE:
            self._gatherer.gather_flat(flat)
        return tensor if cast is None else tensor.to(cast[0]).as_strided(*cast[1:])


class FrozenCalls:
    """Releases frozen weights in a backward. No gradient of their own says when they are done with: their inputs' do.

    It counts the calls of units whose backward may still want them.
    """

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._calls: dict[Unit, int] = {}
        # In forwards that run together: how often a unit ran without a graph, to be recomputed in the backward.
        self._ungraphed: dict[Unit, int] = {}

    def forget(self) -> None:
        """No backward is to come for what has run."""
        self._calls, self._ungraphed = {}, {}

    def ran_without_graph(self, unit: Unit) -> None:
        self._ungraphed[unit] = self._ungraphed.get(unit, 0) + 1

    def await_recomputations(self) -> None:
        """Forwards have run together: what ran without a graph is wanted once more for each of them."""
        for unit, calls in self._ungraphed.items():
            self._count(unit, calls)

    def watch(self, unit: Unit, args: Any, kwargs: Any, output: Any, *, together: bool) -> None:
        """Release the unit's frozen flats once the gradients of this call's inputs are complete.

        `together`: other forwards run together with this one.
        """
        inputs = [t for t in (*tensors_in(args), *tensors_in(kwargs)) if t.requires_grad]
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        if not inputs or not outputs or unit.shared:
            return
        begun = False

        def begins(grad: torch.Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._count(unit, 1)

        def ends(grads: Any) -> None:
            if self._count(unit, -1) == 0 and not unit.shared:
                for flat in unit.travelling:
                    if not flat.trainable:
                        self._gatherer.release_flat(flat)

        if together:
            # All of these forwards get their backward, the last first: the flats are needed until the first has had it.
            self._count(unit, 1)
        elif backward_task() != NO_TASK:
            if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
                return  # a non-reentrant checkpoint recomputes: its backward runs on the graph of the first forward
            if unit not in self._ungraphed:  # else counted when the forwards ran
                self._count(unit, 1)
        else:
            for tensor in outputs:
                tensor.register_hook(begins)
        torch.autograd.graph.register_multi_grad_hook(inputs, ends)

    def _count(self, unit: Unit, change: int) -> int:
        self._calls[unit] = self._calls.get(unit, 0) + change
        return self._calls[unit]
