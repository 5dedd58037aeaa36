"""Layer-major accumulation: several forwards of one model on one thread, each unit run for all of them, then the next.

Every unit is gathered once in the forward and once in the backward for all micro-batches of a window, and their
gradients are summed in fp32 on the device and reduced once.

A forward is a greenlet. It stops where it reaches a unit, and goes on when it is that unit's turn. What torch keeps for
the thread is taken off at each stop and put back at each start, so that the model's own `with` blocks hold.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from wherry.sharding.thread_state import RandomStream, ThreadState, can_switch, swap
from wherry.sharding.unit import Unit

T = TypeVar("T")


class MicroBatch:
    """One of the forwards: where it waits, and what is its own while it does not run."""

    def __init__(self, index: int, greenlet: Any, units: int, random: RandomStream) -> None:
        self.index = index
        self.greenlet = greenlet
        self.random = random
        # How many forwards of each unit it has entered and not left.
        self.running = [0] * units
        self.waits_at: Unit | None = None
        self.calls = 0
        self.result: Any = None


class Interleaver:
    """Runs forwards together, once. The hooks tell it, by `reach`, when a forward comes to a unit."""

    def __init__(self, units: int, device: torch.device) -> None:
        self.units = units
        self.device = device
        self._micros: list[MicroBatch] = []
        self._current: MicroBatch | None = None
        self._hub: Any = None
        # What the thread keeps between the forwards.
        self._base: ThreadState | None = None
        # Forwards are being ended after an error in one of them.
        self.stopping = False
        self._first_of_wave = True

    def needed(self, unit: Unit) -> bool:
        """Whether a forward other than the one that runs is inside `unit`, or about to be."""
        return any(
            other is not self._current and (other.waits_at is unit or other.running[unit.index])
            for other in self._micros
        )

    def reach(self, unit: Unit) -> bool:
        """The forward that runs has come to `unit`: wait for its turn. True for the first forward of a turn."""
        import greenlet

        micro = self._current
        assert micro is not None
        if greenlet.getcurrent() is not micro.greenlet or not can_switch():
            return True
        if self.stopping:
            raise greenlet.GreenletExit
        micro.waits_at = unit
        micro.calls += 1
        own = swap(self._base, self.device)
        try:
            self._hub.switch()
        finally:
            # Also when the forward is stopped: its `with` blocks are left in the state they were entered in.
            swap(own, self.device)
            micro.waits_at = None
        first, self._first_of_wave = self._first_of_wave, False
        return first

    def run(self, forwards: Sequence[Callable[[], T]], enter: Callable[[list[int]], None]) -> list[T]:
        """The results of `forwards`, run together, each with a stream of random numbers of its own.

        `enter` is given the counters of the forward about to run.
        """
        import greenlet

        self._hub = greenlet.getcurrent()
        self._base = swap(None, self.device)
        streams = RandomStream.now(self.device).several(len(forwards))
        self._micros = [MicroBatch(index, None, self.units, stream) for index, stream in enumerate(streams)]
        for micro, forward in zip(self._micros, forwards, strict=True):
            micro.greenlet = greenlet.greenlet(lambda micro=micro, forward=forward: setattr(micro, "result", forward()))
            micro.greenlet.gr_context = contextvars.copy_context()
        micros = self._micros
        try:
            for micro in micros:
                self._resume(micro, enter)
            while waiting := [micro for micro in micros if not micro.greenlet.dead]:
                self._turn(waiting, enter)
            return [micro.result for micro in micros]
        finally:
            try:
                self._stop(enter)
            finally:
                # The thread's own stream has moved on by what the first micro-batch drew.
                micros[0].random.use()

    def _turn(self, waiting: list[MicroBatch], enter: Callable[[list[int]], None]) -> None:
        """The forward that is furthest behind says which unit's turn it is, for all that wait there.

        Which forward it is does not matter, so that ranks whose micro-batches branch in another order still agree.
        """
        assert all(micro.waits_at is not None for micro in waiting)
        _, _, unit = min((m.calls, m.waits_at.index, m.waits_at) for m in waiting)  # type: ignore[union-attr]
        turn = [micro for micro in waiting if micro.waits_at is unit]
        self._first_of_wave = True
        for micro in turn:
            self._resume(micro, enter)

    def _resume(self, micro: MicroBatch, enter: Callable[[list[int]], None], error: Any = None) -> None:
        self._current = micro
        enter(micro.running)
        micro.random.use()
        try:
            if error is None:
                micro.greenlet.switch()
            else:
                micro.greenlet.throw(error)
        finally:
            micro.random = RandomStream.now(self.device)
            if micro.greenlet.dead:
                swap(self._base, self.device)
                micro.running = [0] * self.units

    def _stop(self, enter: Callable[[list[int]], None]) -> None:
        """End the forwards that have not ended, after an error in one of them."""
        import greenlet

        self.stopping = True
        for micro in self._micros:
            if not micro.greenlet.dead:
                self._resume(micro, enter, greenlet.GreenletExit)
            assert micro.greenlet.dead, f"the forward of micro-batch {micro.index} does not end"


@contextmanager
def sums_in_fp32(units: Iterable[Unit]) -> Iterator[None]:
    """Around a backward of several micro-batches: autograd adds up their gradients in fp32."""
    flats = [flat for unit in units for flat in unit.flats if flat.trainable]
    parameters = [p for flat in flats if flat.dtype.itemsize < torch.float32.itemsize for p in flat.parameters]
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad_dtype = parameter.dtype
