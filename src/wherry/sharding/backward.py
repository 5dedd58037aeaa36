"""The backward that runs, if one does: what the engine and every hook ask and tell of it."""

from __future__ import annotations

import torch

from wherry.sharding.autograd import NO_TASK, backward_task
from wherry.sharding.unit import Unit


class Backward:
    """One for a model. Only `begin` and `end` move it between running and not."""

    def __init__(self) -> None:
        self.running = False
        # autograd's number of it; NO_TASK until the first hook inside it.
        self.task = NO_TASK
        # Whether its loss carries the loss scale. Known before it begins.
        self.scaled = False
        # Whether it makes gradients of weights, and not of inputs only; None as long as nobody has asked.
        self.reduces: bool | None = None
        # Units that it has reached, and whose gradients it has not brought all.
        self.open: list[Unit] = []

    def notice_scaled(self, grad: torch.Tensor) -> None:
        """A hook on a loss that carries the scale, which a backward of it calls first."""
        self.scaled = True

    def begin(self) -> None:
        """It is about to run, or has just begun to."""
        self.running = True
        self.task = backward_task()
        self.reduces = None
        self.open = []

    def end(self) -> None:
        """Nothing of it is left to run."""
        self.running = False
        self.task = NO_TASK
        self.scaled = False
