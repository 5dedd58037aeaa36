"""How far gathers look ahead of their use: as far as the config says, or as far as steps turn out to want."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from wherry.observe.log import logger
from wherry.sharding.reach import further
from wherry.tiers.tickets import Ticket

# Windows that pass before anything is timed, and that are timed at each distance.
LEARNING, TIMED = 2, 2
# The part of a window that may be spent waiting for gathers, and what of the waiting a longer look must leave at most.
IDLE, LESS = 0.02, 0.9


class LookAhead:
    """`limit` elements may be on their way beside the unit at work; one unit always may.

    To be found, it begins at that one unit, and is doubled, up to `most`, as long as windows wait for gathers and wait
    less for it. All ranks go by the one that waits longest, so that they look equally far.
    """

    def __init__(self, limit: int, *, device: torch.device | None = None, step: int = 0, most: int = 0) -> None:
        self.limit = limit if not step else 0
        # Whether it is still to be found, in steps of so many elements at first.
        self.searching = step > 0
        self._step, self._most = step, most
        self._on_device = device is not None and device.type == "cuda"
        self._learning = LEARNING
        self._begun = 0.0
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._timed: list[float] = []
        # The distance before this one, and how long windows waited at it.
        self._before: tuple[int, float] | None = None

    def wait(self, ticket: Ticket) -> None:
        """Wait for a gather, and note how long that takes: the host, or the device that computes."""
        if self._on_device:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            ticket.wait()
            after.record()
            self._events.append((before, after))
        else:
            begun = time.perf_counter()
            ticket.wait()
            self._seconds += time.perf_counter() - begun

    def settle(self, exchange: Callable[[Any], list[Any]]) -> None:
        """After a window, on every rank alike. `exchange` gives every rank's value to all."""
        if not self.searching:
            return
        now = time.perf_counter()
        took, waited = now - self._begun, self._waited()
        self._begun = now
        if self._learning:
            self._learning -= 1
            return
        told = exchange((waited, took))
        self._timed.append(max(each[0] for each in told))
        if len(self._timed) == TIMED:
            self._decide(min(self._timed), max(each[1] for each in told))
            self._timed.clear()

    def _waited(self) -> float:
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _decide(self, waits: float, window: float) -> None:
        wanted = further(self.limit, self._step)
        if self._before is not None and waits > LESS * self._before[1]:
            self.limit, self.searching = self._before[0], False
        elif waits <= IDLE * window or wanted > self._most:
            self.searching = False
        else:
            self._before = self.limit, waits
            self.limit = wanted
        if not self.searching:
            distance = f"{self.limit:,} elements" if self.limit else "one unit"
            logger.debug("weights are gathered %s ahead; a window waits %.1f ms for them", distance, 1000 * waits)
