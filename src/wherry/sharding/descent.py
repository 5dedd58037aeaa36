"""Gradients on their way to the host, a reduced micro-batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from wherry import native
from wherry.sharding.flat_gradient import FlatGradient
from wherry.tiers.streams import Link
from wherry.tiers.tickets import CallbackTicket

# Copies down whose sources are kept: one travels while the next is filled.
IN_FLIGHT = 2


class Descent:
    """Copies down, and the memory on the device that they still read."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sources: deque[Callable[[], None]] = deque()

    def send(self, gradient: FlatGradient, shard: torch.Tensor, give: Callable[[], None], *, fresh: bool) -> None:
        """Send `shard` to the gradient's memory on the host, and add it there unless it is the `fresh` first.

        The gradient's `landing` says when that is done; `give` is called when `shard` may be written again.
        """
        owned = gradient.host_memory()
        gradient.landing.wait()
        if fresh and owned.dtype == shard.dtype:
            gradient.landing = copied = self._link.down(owned, shard)
        else:
            staging = self._link.host.take(shard.nbytes)
            copied = self._link.down(staging.view(shard.dtype), shard)

            def land() -> None:
                copied.wait()
                if fresh:
                    native.cast_copy(owned, staging.view(shard.dtype))
                else:
                    native.accumulate(owned, staging.view(shard.dtype))
                self._link.host.give(staging)

            gradient.landing = CallbackTicket(land, copied.done)

        def let_go() -> None:
            self._link.order(copied)
            give()

        self._sources.append(let_go)
        while len(self._sources) > IN_FLIGHT:
            self._sources.popleft()()

    def rest(self) -> None:
        """Every source may be written again."""
        while self._sources:
            self._sources.popleft()()

    def give_up(self) -> None:
        """As `rest`, whatever went wrong with the copies."""
        while self._sources:
            with suppress(Exception):
                self._sources.popleft()()
