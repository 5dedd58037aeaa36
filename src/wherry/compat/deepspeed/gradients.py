"""Gradients in `.grad`, where scripts look at them, change and drop them: at stage 0, and at 1 until the boundary.

The engine has sums of its own. A script's own changes are carried over to these, and nothing else is.
"""

from __future__ import annotations

import torch

from wherry.engine import Engine
from wherry.sharding.flat_gradient import FlatGradient


class Attributes:
    """What stands in `.grad` between a backward and what follows it."""

    def __init__(self) -> None:
        # Of each weight its flat, its place there, what was put into its `.grad`, and the version of that.
        self._shown: list[tuple[FlatGradient, int, torch.Tensor | None, int]] = []
        self._scale = 1.0

    def show(self, engine: Engine) -> None:
        """After a backward: the sums so far, as means of the window and times the loss scale."""
        gradients, stage = engine._gradients, engine.zero_optimization_stage()
        if stage > 1 or (stage == 1 and gradients.complete):
            return
        self._scale = (gradients.scale if gradients.complete else gradients.own_scale) * engine.loss_scale
        for gradient in gradients.all:
            if gradient.fresh or gradient.partitioned or gradient.flat.distributed:
                continue
            for index, weight in enumerate(gradient.flat.parameters):
                if index not in gradient.absent:
                    weight.grad = (gradient.sum_of(index) * self._scale).to(weight.dtype)
                version = 0 if weight.grad is None else weight.grad._version
                self._shown.append((gradient, index, weight.grad, version))

    def take(self, engine: Engine) -> None:
        """Before a backward and an update: `.grad` is empty, and the sums are what a script has made of them."""
        shown, self._shown = self._shown, []
        for gradient, index, before, version in shown:
            weight = gradient.flat.parameters[index]
            given, weight.grad = weight.grad, None
            untouched = given is before and (given is None or given._version == version)
            if untouched or gradient.fresh:  # fresh: the window has been dropped
                continue
            others = [each for each in gradient.absent if each != index]
            gradient.absent = others if given is not None else sorted([*others, index])
            value = torch.zeros_like(weight) if given is None else given / self._scale
            if engine._gradients.complete:
                gradient.replace(index, value)
            else:
                gradient.sum_of(index).copy_(value)
