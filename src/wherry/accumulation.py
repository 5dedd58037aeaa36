"""The order of an accumulation window: one micro-batch after another, or all of them through a unit before the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from wherry.activations.auto import is_strange
from wherry.activations.build import free_bytes
from wherry.observe.log import say
from wherry.observe.memory import format_bytes
from wherry.sharding.thread_state import RandomStream
from wherry.sharding.watch import StateWatch

if TYPE_CHECKING:
    from wherry.engine import Engine
    from wherry.sharding.unit import Flat

T = TypeVar("T")


class Accumulation:
    """Runs whole windows for `engine.train_batch`.

    Layer-major, every unit is gathered once in the forward and once in the backward for all micro-batches, their
    gradients are summed in fp32 on the device, and reduced once. The first window runs step-major and is watched: a
    model that keeps something on its modules from one part of its forward to another cannot run layer-major. With
    `auto`, what its micro-batches save for the backward is measured too, and windows run in groups that fit.
    """

    def __init__(self, engine: Engine, order: str) -> None:
        self.engine = engine
        self.order = order
        self._watched = False
        # Whether each micro-batch draws from a stream of its own: with the first window that is to be layer-major,
        # which runs step-major itself, and so after a load as well as without.
        self._apart = False
        # Whether no more micro-batches run together than fit, and how many do; None before that is known.
        self._bounded = order == "auto"
        self.together: int | None = None
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
        given = _taken(data, count)
        if count == 1 or engine._window_begun() or not (self._apart or self.order == "layer_major"):
            return self._mean([self._step(engine._to_device(batch)) for batch in given])
        self._apart = True
        batches = [engine._to_device(batch) for batch in given]
        if self.order == "step_major":
            return self._mean([self._step(batch) for _, batch in self._streams(batches)])
        engine._hooks.take_turns()
        if not self._watched:
            return self._mean(self._watch(batches))
        losses: list[torch.Tensor] = []
        size = self._group(count)
        # A micro-batch draws the same random numbers whatever group it is in.
        own = RandomStream.now(engine.device)
        streams = own.several(count)
        for begin in range(0, count, size):
            losses += self._together(batches[begin : begin + size], streams[begin : begin + size])
            if begin:
                own.use()
            else:
                own = RandomStream.now(engine.device)
        return self._mean(losses)

    def _streams(self, batches: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Micro-batches that run one after another: each draws from the stream that it has where all run together."""
        own = RandomStream.now(self.engine.device)
        for number, stream in enumerate(own.several(len(batches))):
            stream.use()
            yield number, batches[number]
            if number == 0:
                own = RandomStream.now(self.engine.device)
        own.use()

    def resized(self) -> None:
        """Micro-batches are of another size from here on: what fits is found out anew, in the next window."""
        if self._bounded:
            self._watched = False
            self.together = None

    def _group(self, count: int) -> int:
        """How many of a window's micro-batches run together: as few groups as fit, and these of one size."""
        groups = -(-count // min(count, self.together or count))
        return -(-count // groups)

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

    def _together(self, batches: Sequence[Any], streams: Sequence[RandomStream]) -> list[torch.Tensor]:
        engine = self.engine
        watch = StateWatch(engine.module)
        watch.begin()
        try:
            with engine._reporter.phase("forward", engine.global_steps + 1):
                forwards = [partial(engine._loss_of, batch) for batch in batches]
                losses = engine._hooks.run_together(forwards, streams)
        except Exception as error:
            error.add_note(
                "This was raised while micro-batches ran together, a unit at a time; "
                '"wherry": {"accumulation": "step_major"} runs them one after another.'
            )
            engine.zero_grad()  # of groups before this one
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
            parameter.grad_dtype = dtype or parameter.dtype

    # Whether it can be done.

    def _choose(self) -> None:
        """`auto`: layer-major where every micro-batch would send weights or gradients over a wire, a bus or to a disk.

        What only moves within the memory of one rank costs less than the activations of several micro-batches at once.
        """
        engine = self.engine
        apart = not engine._tiering.link.shared
        weights = any(_comes_anew(flat, apart) for unit in engine.units for flat in unit.travelling)
        gradients = any(g.partitioned and (apart or g.flat.layout.ranks > 1) for g in engine._gradients.all)
        # Ranks that have cut weights unevenly may find room for them in different places.
        self.order = "layer_major" if any(self._of_all(weights or gradients)) else "step_major"

    def _of_all(self, mine: T) -> list[T]:
        """What every rank says whose forwards communicate with those of this one."""
        found = [mine]
        for comm in (self.engine.comm, self.engine.topology.tensor):
            found = [each for part in comm.gather_objects(found) for each in part]
        return found

    def _watch(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """The first window: step-major, and every change of state of the model's modules is noted."""
        engine = self.engine
        watch = StateWatch(engine.module)
        interleaver = engine._hooks.interleaver
        losses: list[torch.Tensor] = []
        room = Room(engine)
        for _, batch in self._streams(batches):
            watch.begin()
            # What is changed and changed back shows at the units' boundaries only; one micro-batch is enough for that.
            interleaver.observer = None if losses else lambda unit: watch.look()
            try:
                # `activation_checkpointing` with `auto` decides after the first.
                with room.measuring(bool(losses) and self._bounded):
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
        reasons = [reason for reason in self._of_all(first) if reason is not None]
        if reasons:
            self._give_up(f"the forward changes {reasons[0]!r}, which micro-batches running together would share")
        elif self._bounded:
            self._bound(room, len(batches))
        return losses

    def _bound(self, room: Room, count: int) -> None:
        """No more together than fit on any rank."""
        most = min(self._of_all(room.fits()))
        here = f"each saves {format_bytes(room.saved)}, and {format_bytes(room.free)} are free beside one"
        if most < 2:
            self._give_up(f"on some rank there is no room for the activations of two; on this one {here}")
            return
        self.together = most
        if most < count:
            say("micro-batches run together in groups of %d of %d: on this rank %s", self._group(count), count, here)

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


def _taken(data: Iterator[Any], count: int) -> list[Any]:
    """A window's micro-batches. Of too few none is run: the window would go on with the data's next pass."""
    batches = list(islice(data, count))
    if len(batches) == count:
        return batches
    left_out = f" after {len(batches)} of a window's {count} micro-batches, which are left out" if batches else ""
    raise StopIteration(
        f"train_batch: the iterator has ended{left_out}; for another pass make a new one, as with data = iter(loader)"
    )


class Room:
    """Bytes that one micro-batch saves for its backward, at most, and those that are free beside it, at least."""

    def __init__(self, engine: Engine) -> None:
        self.saved = 0
        self.free = 0
        self._engine = engine
        self._measured = False

    def fits(self) -> int:
        """Micro-batches whose activations fit at once."""
        return 1 + self.free // self.saved if self.saved else 2**31

    @contextmanager
    def measuring(self, wanted: bool) -> Iterator[None]:
        """Around a forward. An allocator that counts is asked; for any other, what autograd saves is counted."""
        if not wanted:
            yield
            return
        engine, device = self._engine, self._engine.device
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            yield
            saved = torch.cuda.memory_allocated(device) - before
        else:
            storages: dict[int, int] = {}
            weights = {flat.whole.untyped_storage()._cdata for unit in engine.units for flat in unit.flats}

            def notice(tensor: torch.Tensor) -> None:
                if not is_strange(tensor) and (storage := tensor.untyped_storage())._cdata not in weights:
                    storages[storage._cdata] = storage.nbytes()

            engine._hooks.saved.notice = notice
            try:
                yield
            finally:
                engine._hooks.saved.notice = None
            saved = sum(storages.values())
        free = free_bytes(engine.topology)
        self.free = min(self.free, free) if self._measured else free
        self.saved = max(self.saved, saved)
        self._measured = True


def _comes_anew(flat: Flat, apart: bool) -> bool:
    """Whether each gather of it comes from other ranks, from a host that is not the device, or from a disk."""
    if flat.layout.ranks > 1:
        return True
    return flat.home is not None and (apart or not flat.home.stays)


def _has_statistics(model: torch.nn.Module) -> bool:
    """Whether a normalization layer of the model is updating running statistics."""
    return any(
        isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats and module.training
        for module in model.modules()
    )
