"""The order of an accumulation window: one micro-batch after another, or all of them through a unit before the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from wherry.observe.log import say
from wherry.sharding.watch import StateWatch

if TYPE_CHECKING:
    from wherry.engine import Engine


class Accumulation:
    """Runs whole windows for `engine.train_batch`.

    Layer-major, every unit is gathered once in the forward and once in the backward for all micro-batches, their
    gradients are summed in fp32 on the device, and reduced once. The first window runs step-major and is watched: a
    model that keeps something on its modules from one part of its forward to another cannot run layer-major.
    """

    def __init__(self, engine: Engine, order: str) -> None:
        self.engine = engine
        self.order = order
        self._watched = False
        self._warned = False
        self._low_precision = [
            parameter
            for gradient in engine._gradients.all
            if gradient.flat.dtype.itemsize < torch.float32.itemsize
            for parameter in gradient.flat.parameters
        ]

    def window(self, data: Iterator[Any]) -> torch.Tensor:
        """The mean loss of one window, detached; the weights are updated."""
        engine = self.engine
        count = engine.gradient_accumulation_steps()
        if self.order == "auto":
            self._choose()
        if self.order == "layer_major" and self._low_precision and not hasattr(torch.Tensor, "grad_dtype"):
            self._give_up(f"torch {torch.__version__} sums gradients in the type of the weights, from 2.10 on in fp32")
        if self.order == "step_major" or count == 1 or engine._window_begun():
            return self._mean([self._step(engine._to_device(next(data))) for _ in range(count)])
        batches = [engine._to_device(next(data)) for _ in range(count)]
        if not self._watched:
            return self._mean(self._watch(batches))
        return self._mean(self._together(batches))

    @staticmethod
    def _mean(losses: Sequence[torch.Tensor]) -> torch.Tensor:
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total / len(losses)

    def _step(self, batch: Any) -> torch.Tensor:
        loss = self.engine._loss_of(batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def _together(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        engine = self.engine
        watch = StateWatch(engine.module)
        watch.begin()
        try:
            counting = engine._reporter.counting("forward", engine.global_steps + 1)
            with engine._spans("wherry::forward"), counting:
                losses = engine._hooks.run_together([partial(engine._loss_of, batch) for batch in batches])
        except Exception as error:
            error.add_note(
                "This was raised while micro-batches ran together, a unit at a time; "
                '"wherry": {"accumulation": "step_major"} runs them one after another.'
            )
            raise
        watch.look()
        self._warn(watch, uniform=engine._hooks.interleaver.uniform)
        try:
            self._sum_in(torch.float32)
            engine._backward(losses)
        finally:
            self._sum_in(None)
        engine.micro_steps += len(batches) - 1
        engine.step()
        return [loss.detach() for loss in losses]

    def _sum_in(self, dtype: torch.dtype | None) -> None:
        """The type in which autograd adds the gradients of all micro-batches; None for that of the weights."""
        for parameter in self._low_precision:
            parameter.grad_dtype = dtype or parameter.dtype  # type: ignore[attr-defined]

    # Whether it can be done.

    def _choose(self) -> None:
        """`auto`: layer-major where weights or gradients would travel once for every micro-batch."""
        engine = self.engine
        travels = any(unit.travelling for unit in engine.units)
        reduced = any(gradient.partitioned for gradient in engine._gradients.all)
        self.order = "layer_major" if travels or reduced else "step_major"

    def _watch(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """The first window: step-major, and every change of state of the model's modules is noted."""
        engine = self.engine
        watch = StateWatch(engine.module)
        interleaver = engine._hooks.interleaver
        losses: list[torch.Tensor] = []
        for batch in batches:
            watch.begin()
            # What is changed and changed back shows at the units' boundaries only; one micro-batch is enough for that.
            interleaver.observer = None if losses else lambda unit: watch.look()
            try:
                loss = engine._loss_of(batch)
            finally:
                interleaver.observer = None
            watch.look()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        watch.end()
        self._watched = True
        first = next(iter(watch.changed), None)
        reasons = [reason for reason in engine.comm.gather_objects(first) if reason is not None]
        if reasons:
            self._give_up(f"the forward changes {reasons[0]!r}, which micro-batches running together would share")
        return losses

    def _warn(self, watch: StateWatch, *, uniform: bool) -> None:
        """What the first window has not shown."""
        reason = next(iter(watch.changed), None)
        if reason is None and not uniform and _has_statistics(self.engine.module):
            reason = "running statistics, in an order that differs where micro-batches take different ways"
        if reason is not None and not self._warned:
            self._warned = True
            self.engine._log.warning(
                "micro-batches ran together, and the model's forward changes %s: losses may differ from one "
                'after another; set "wherry": {"accumulation": "step_major"}', reason,
            )  # fmt: skip

    def _give_up(self, reason: str) -> None:
        self.order = "step_major"
        say("micro-batches run one after another (step_major): %s", reason)


def _has_statistics(model: torch.nn.Module) -> bool:
    """Whether a normalization layer of the model is updating running statistics."""
    return any(
        isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats and module.training
        for module in model.modules()
    )
