"""Gradients in `.grad`, which scripts read, change and drop: at stage 0, and at 1 until the boundary.

They are copies of the engine's sums; a script's changes are copied back before the engine uses the sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle

from wherry.engine import Engine
from wherry.sharding.flat_gradient import FlatGradient


class Attributes:
    """The `.grad` of an engine's weights, between a backward and the next use of the gradients."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # For each weight its flat, its index there, and whether `show` set its `.grad`.
        self._shown: list[tuple[FlatGradient, int, bool]] = []
        self._scale = 1.0
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Take gradients back before autograd adds to `.grad`, in any backward."""
        reference = weakref.ref(self)

        def take(grad: torch.Tensor) -> None:
            attributes = reference()
            if attributes is not None:
                attributes.take()

        if self._engine.zero_optimization_stage() <= 1:
            weights = (weight for gradient in self._engine.flat_gradients.all for weight in gradient.flat.parameters)
            self._handles += [weight.register_hook(take) for weight in weights]

    def show(self) -> None:
        """Copy the sums so far to `.grad`, as means of the window times the loss scale."""
        gradients, stage = self._engine.flat_gradients, self._engine.zero_optimization_stage()
        self._shown.clear()
        if stage > 1 or (stage == 1 and gradients.complete):
            return
        self._scale = (gradients.scale if gradients.complete else gradients.own_scale) * self._engine.loss_scale
        for gradient in gradients.all:
            if gradient.fresh or gradient.partitioned or gradient.flat.distributed:
                continue
            for index, weight in enumerate(gradient.flat.parameters):
                is_set = index not in gradient.absent
                weight.grad = self._mean(gradient, index) if is_set else None
                self._shown.append((gradient, index, is_set))

    def _mean(self, gradient: FlatGradient, index: int) -> torch.Tensor:
        return (gradient.sum_of(index) * self._scale).to(gradient.flat.parameters[index].dtype)

    def take(self) -> None:
        """Empty `.grad`, and copy what a script has changed back to the sums."""
        shown, self._shown = self._shown, []
        changes: list[tuple[FlatGradient, int, torch.Tensor | None]] = []
        unchanged: list[torch.Tensor] = []
        for gradient, index, was_set in shown:
            weight = gradient.flat.parameters[index]
            grad, weight.grad = weight.grad, None
            if gradient.fresh or not (was_set or grad is not None):  # fresh: the sums have been dropped
                continue
            is_same = weight.new_zeros((), dtype=torch.bool)
            if was_set and grad is not None:
                # Compare values: a change through `.data`, or by a collective, leaves no other trace.
                is_same = torch.eq(grad, self._mean(gradient, index)).all()
            changes.append((gradient, index, grad))
            unchanged.append(is_same)
        flags = torch.stack(unchanged).tolist() if unchanged else []
        for (gradient, index, grad), is_same in zip(changes, flags, strict=True):
            if not is_same:
                self._put(gradient, index, grad)

    def _put(self, gradient: FlatGradient, index: int, grad: torch.Tensor | None) -> None:
        others = [each for each in gradient.absent if each != index]
        gradient.absent = others if grad is not None else sorted([*others, index])
        own = gradient.sum_of(index)
        own.copy_(torch.zeros_like(own) if grad is None else grad.to(torch.float32) / self._scale)
        if self._engine.flat_gradients.complete:
            gradient.replace(index, own)

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.take()
        yield
        self.show()

    def drop(self) -> None:
        """Forget the sums, which the engine has dropped."""
        self._shown.clear()

    def close(self) -> None:
        self.drop()
        while self._handles:
            self._handles.pop().remove()
