"""A link for tests: the device is the host, and yet every copy is made, late and in a random order."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from wherry.tiers.buffers import HostPool
from wherry.tiers.streams import Link
from wherry.tiers.tickets import DONE, Ticket


class _Late(Ticket):
    def __init__(self, link: LateLink, copy: Callable[[], None]) -> None:
        self.link = link
        self.copy: Callable[[], None] | None = copy

    def run(self) -> None:
        copy, self.copy = self.copy, None
        if copy is not None:
            copy()

    def wait(self) -> None:
        self.link.hurry(self)

    def done(self) -> bool:
        return self.copy is None


class LateLink(Link):
    """Targets hold NaN until their ticket was waited for; a copy that others overtook has not been made by then."""

    shared = False

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        super().__init__(device, pin=pin)
        self.host = HostPool(poison=True)
        self.waiting: list[_Late] = []
        self.random = random.Random(0)
        self.down_bytes = self.up_bytes = 0

    def up(self, target: torch.Tensor, source: torch.Tensor, *, after: Ticket = DONE) -> Ticket:
        self.up_bytes += target.numel()
        return self._later(target, source)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self.down_bytes += target.numel()
        return self._later(target, source)

    def _later(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        target.fill_(0xFF)

        def copy() -> None:
            target.copy_(source)

        ticket = _Late(self, copy)
        self.waiting.append(ticket)
        return ticket

    def hurry(self, ticket: _Late) -> None:
        """Make this copy, and some of the others, in any order."""
        some = [other for other in self.waiting if other is ticket or self.random.random() < 0.3]
        self.random.shuffle(some)
        for other in some:
            other.run()
        self.waiting = [other for other in self.waiting if not other.done()]
