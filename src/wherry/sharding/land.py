"""The third phase of a gradient: reduced, it is added to the sum, and that goes to where the update reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from wherry import native
from wherry.sharding.flat_gradient import FlatGradient, Landing
from wherry.sharding.norm import Norm
from wherry.tiers.streams import Link
from wherry.tiers.tickets import CallbackTicket

# Copies down whose sources are kept: one travels while the next is filled.
IN_FLIGHT = 2


class Sums:
    """Adds gradients up, on the device or on the host, and measures them for the norm where that costs no pass."""

    def __init__(self, link: Link, norm: Norm) -> None:
        self._link = link
        self._norm = norm
        # What gives memory on the device back that a copy down still reads.
        self._sources: deque[Callable[[], None]] = deque()

    def add(self, gradient: FlatGradient, shard: torch.Tensor, give: Callable[[], None], *, fresh: bool) -> None:
        """Add a reduced micro-batch; the `fresh` first overwrites. `give` gives `shard` back to its pool."""
        if gradient.keeps:
            (gradient.own_sum.copy_ if fresh else gradient.own_sum.add_)(shard)
            give()
        elif not gradient.stays:
            # Measured on its way out: if it is the only one, nobody need read it again for the norm.
            gradient.sum_squares = self._norm.measure(gradient, shard) if fresh else None
            self._send_down(gradient, shard, give, fresh=fresh)
        elif fresh:
            gradient.keep(shard, give)
        else:
            gradient.owned.add_(shard)
            give()

    def complete(self, gradient: FlatGradient) -> None:
        """The window's sum over the ranks is there: measure it, and send it to where its update reads it."""
        if gradient.keeps:
            gradient.sum_squares = self._norm.measure(gradient, gradient.own_sum)
            if gradient.way is Landing.COPIED:
                gradient.landing = self._link.down(gradient.owned, gradient.own_sum)
        elif gradient.stays:
            gradient.sum_squares = self._norm.measure(gradient, gradient.owned)

    def rest(self) -> None:
        """Every source may be written again."""
        while self._sources:
            self._sources.popleft()()

    def drop(self) -> None:
        """As `rest`, whatever went wrong with the copies."""
        while self._sources:
            with suppress(Exception):
                self._sources.popleft()()

    def _send_down(self, gradient: FlatGradient, shard: torch.Tensor, give: Callable[[], None], *, fresh: bool) -> None:
        """The gradient's `landing` says when it is added on the host; `give` is called when `shard` may be written."""
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
