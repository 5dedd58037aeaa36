"""Frozen weights in a backward: no gradient of their own says when they are done with. Those of their inputs do."""

from __future__ import annotations

from typing import Any

import torch

from wherry.sharding.autograd import NO_TASK, backward_task, tensors_in
from wherry.sharding.layer_major import Interleaver
from wherry.sharding.unit import Unit
from wherry.sharding.weights import Gatherer


class FrozenCalls:
    """Counts the calls of units whose backward may still want frozen weights: with the last one they are released."""

    def __init__(self, gatherer: Gatherer, interleaver: Interleaver) -> None:
        self._gatherer = gatherer
        self._interleaver = interleaver
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

    def watch(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
        """Release the unit's frozen flats once the gradients of this call's inputs are complete."""
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

        if self._interleaver.active:
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
