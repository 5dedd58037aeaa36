"""Gradients in `.grad`, where scripts look at them, change and drop them: at stage 0, and at 1 until the boundary.

They are copies of the engine's sums. What a script has made of them goes back there before anything else happens.
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
    """What stands in `.grad` between a backward and what follows it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Of each weight its flat, its place there, and whether a gradient was put into its `.grad`.
        self._shown: list[tuple[FlatGradient, int, bool]] = []
        self._scale = 1.0
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Have them taken before autograd adds to them, in whichever backward."""
        mine = weakref.ref(self)

        def comes(grad: torch.Tensor) -> None:
            attributes = mine()
            if attributes is not None:
                attributes.take()

        if self._engine.zero_optimization_stage() <= 1:
            weights = (weight for gradient in self._engine._gradients.all for weight in gradient.flat.parameters)
            self._handles += [weight.register_hook(comes) for weight in weights]

    def show(self) -> None:
        """The sums so far, as means of the window and times the loss scale."""
        gradients, stage = self._engine._gradients, self._engine.zero_optimization_stage()
        self._shown.clear()
        if stage > 1 or (stage == 1 and gradients.complete):
            return
        self._scale = (gradients.scale if gradients.complete else gradients.own_scale) * self._engine.loss_scale
        for gradient in gradients.all:
            if gradient.fresh or gradient.partitioned or gradient.flat.distributed:
                continue
            for index, weight in enumerate(gradient.flat.parameters):
                there = index not in gradient.absent
                weight.grad = self._mean(gradient, index) if there else None
                self._shown.append((gradient, index, there))

    def _mean(self, gradient: FlatGradient, index: int) -> torch.Tensor:
        return (gradient.sum_of(index) * self._scale).to(gradient.flat.parameters[index].dtype)

    def take(self) -> None:
        """`.grad` is empty, and the sums are what a script has made of them."""
        shown, self._shown = self._shown, []
        found: list[tuple[FlatGradient, int, torch.Tensor | None]] = []
        same: list[torch.Tensor] = []
        for gradient, index, was_there in shown:
            weight = gradient.flat.parameters[index]
            given, weight.grad = weight.grad, None
            if gradient.fresh or not (was_there or given is not None):  # fresh: the sums have gone
                continue
            alike = weight.new_zeros((), dtype=torch.bool)
            if was_there and given is not None:
                # By the values: a change through `.data`, or by a collective, leaves no other trace.
                alike = torch.eq(given, self._mean(gradient, index)).all()
            found.append((gradient, index, given))
            same.append(alike)
        untouched = torch.stack(same).tolist() if same else []
        for (gradient, index, given), alike in zip(found, untouched, strict=True):
            if not alike:
                self._put(gradient, index, given)

    def _put(self, gradient: FlatGradient, index: int, given: torch.Tensor | None) -> None:
        others = [each for each in gradient.absent if each != index]
        gradient.absent = others if given is not None else sorted([*others, index])
        own = gradient.sum_of(index)
        own.copy_(torch.zeros_like(own) if given is None else given.to(torch.float32) / self._scale)
        if self._engine._gradients.complete:
            gradient.replace(index, own)

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.take()
        yield
        self.show()

    def drop(self) -> None:
        """The sums have gone."""
        self._shown.clear()

    def close(self) -> None:
        self.drop()
        while self._handles:
            self._handles.pop().remove()
