"""What can be done with an engine at the moment: it is open, generating, offloaded or closed, and maybe in a fork."""

from __future__ import annotations

import enum
import os
import weakref

from wherry.errors import WherryError


class Life(enum.Enum):
    OPEN = "open"
    GENERATING = "inside gathered_for_generation: weights are whole, and do not change"
    OFFLOADED = "offloaded: states are away from the device"
    CLOSED = "closed"


_NEXT = {
    Life.OPEN: {Life.GENERATING, Life.OFFLOADED, Life.CLOSED},
    Life.GENERATING: {Life.OPEN, Life.CLOSED},
    Life.OFFLOADED: {Life.OPEN, Life.CLOSED},
    Life.CLOSED: set[Life](),
}


class Lifetime:
    """One engine's. `forked`, in a copy of its process without its threads, connections and files, goes with any.

    `closed` is what whoever calls a closed one is told.
    """

    def __init__(self, closed: str) -> None:
        self.now = Life.OPEN
        self._closed = closed
        self.process = os.getpid()
        self.forked = False
        # Whether nothing is forbidden: it is open, in its own process. All that a step has to look at.
        self.free = True
        _all.add(self)

    def become(self, life: Life) -> None:
        if life is not self.now and life not in _NEXT[self.now]:
            raise WherryError(f"this engine is {self.now.value}; it cannot be {life.value} now")
        self.now = life
        self.free = life is Life.OPEN and not self.forked

    def fork(self) -> None:
        self.forked, self.free = True, False

    def check_open(self) -> None:
        if self.now is Life.CLOSED:
            raise WherryError(self._closed)
        if self.now is Life.OFFLOADED:
            raise WherryError("this engine's states were sent away by offload_states(); call reload_states() first")

    def check_not_generating(self, call: str) -> None:
        if self.now is Life.GENERATING:
            raise WherryError(f"{call}: weights are held by gathered_for_generation; leave that context first")

    def check_process(self, call: str) -> None:
        if self.forked:
            raise WherryError(
                f"{call}: this engine is of process {self.process}, and process {os.getpid()} is its fork, which has "
                "none of its threads, files and connections; train in the first process, or call wherry.initialize "
                "here with a model of its own"
            )


_all: weakref.WeakSet[Lifetime] = weakref.WeakSet()


def _forked() -> None:
    for lifetime in _all:
        lifetime.fork()


os.register_at_fork(after_in_child=_forked)
