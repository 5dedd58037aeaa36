"""One thread at a time is inside of an engine: another that comes meanwhile is told, before anything is harmed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType

import torch
from torch import nn

from wherry.errors import WherryError

_FORWARD = nn.Module._call_impl.__code__
# Where a thread is that runs a backward.
_AUTOGRAD = ("torch.autograd", "torch.autograd.graph")


class Taken:
    """The engine's place is this thread's, from here on to the end of its call."""

    __slots__ = ("_call", "_outer", "_takes", "_turns")

    def __init__(self, turns: Turns, call: str) -> None:
        self._turns, self._call = turns, call

    def __enter__(self) -> None:
        turns = self._turns
        self._takes = turns.lock.acquire(blocking=False)
        if self._takes:
            self._outer, turns.holder = turns.holder, get_ident()
        elif not isinstance(threading.current_thread(), threading._DummyThread):  # autograd's own, for who is inside
            turns.refuse(self._call)

    def __exit__(self, *exception: object) -> None:
        if self._takes:
            self._turns.holder = self._outer
            self._turns.lock.release()


class Turns:
    """Which threads are inside: of the engine's own calls, of the model's forward, of a backward of the user's.

    Only the first let go of their place whatever happens. A forward or a backward that has failed may leave its
    thread's number here, so whoever finds it looks at what that thread is really doing.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        # Held inside of a call of the engine, by a thread that may make others from there.
        self.lock = threading.RLock()
        # The thread that holds it, or none; those that have begun the forward, and the backward, that runs.
        self.holder = self.forward = self.backward = 0

    def taken(self, call: str) -> Taken:
        """Inside of a call of the engine."""
        return Taken(self, call)

    def check(self, call: str, *, forward: bool, backward: bool) -> None:
        """Raise if another thread is inside: of a call, of the `forward` or the `backward` that has not ended."""
        me = get_ident()
        if isinstance(threading.current_thread(), threading._DummyThread):
            return  # autograd's own, which works for the one that is inside
        if self.holder not in (0, me):
            self.refuse(call)
        if forward and self.forward != me and _is_inside(self.forward, self._runs_forward):
            self._refuse(call, self.forward)
        if backward:
            # On a device it is a thread of autograd's that says when it has begun, and not the one that waits for it.
            suspects = (self.backward,) if self._device.type == "cpu" else tuple(sys._current_frames())
            for thread in suspects:
                if thread != me and self.backward != me and _is_inside(thread, _runs_backward):
                    self._refuse(call, thread)

    def is_nested(self) -> bool:
        """Whether this thread is inside of the model's forward."""
        return _is_inside(get_ident(), self._runs_forward)

    def refuse(self, call: str) -> None:
        self._refuse(call, self.holder)

    def _refuse(self, call: str, other: int) -> None:
        name = next((thread.name for thread in threading.enumerate() if thread.ident == other), str(other))
        raise WherryError(
            f"{call}: thread {threading.current_thread().name} has come to this engine while thread {name} is inside "
            "of it, and one at a time may be; let them take turns, with a lock around whole steps, or give each a "
            "model and an engine of its own"
        )

    def _runs_forward(self, frame: FrameType) -> bool:
        return frame.f_code is _FORWARD and frame.f_locals.get("self") is self._model


def _runs_backward(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _AUTOGRAD


def _is_inside(thread: int, runs: Callable[[FrameType], bool]) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if runs(frame):
            return True
        frame = frame.f_back
    return False
