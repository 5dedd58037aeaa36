"""What can be done with an engine at the moment: open, generating, offloaded, closed, or in a fork of its process."""

from __future__ import annotations

import enum
import os
import weakref

from wherry.errors import WherryError


class Life(enum.Enum):
    OPEN = "open"
    GENERATING = "inside gathered_for_generation: weights are whole, and do not change"
    OFFLOADED = "states are away from the device, by offload_states"
    CLOSED = "closed"
    FORKED = "in a fork of the engine's process, without its threads, connections and files"


_NEXT = {
    Life.OPEN: {Life.GENERATING, Life.OFFLOADED, Life.CLOSED, Life.FORKED},
    Life.GENERATING: {Life.OPEN, Life.CLOSED, Life.FORKED},
    Life.OFFLOADED: {Life.OPEN, Life.CLOSED, Life.FORKED},
    Life.FORKED: {Life.CLOSED},
    Life.CLOSED: set[Life](),
}


class Lifetime:
    """One engine's."""

    def __init__(self) -> None:
        self.now = Life.OPEN
        _all.add(self)

    def become(self, life: Life) -> None:
        if life is not self.now:
            assert life in _NEXT[self.now], f"{self.now} -> {life}"
            self.now = life

    def check_open(self) -> None:
        if self.now is Life.CLOSED:
            raise WherryError("this engine has been closed; call wherry.initialize again for a new one")
        if self.now is Life.OFFLOADED:
            raise WherryError("this engine's states were sent away by offload_states(); call reload_states() first")

    def check_not_generating(self, call: str) -> None:
        if self.now is Life.GENERATING:
            raise WherryError(f"{call}: weights are held by gathered_for_generation; leave that context first")

    def check_process(self, call: str) -> None:
        if self.now is Life.FORKED:
            raise WherryError(
                f"{call}: this engine is of another process, and process {os.getpid()} is its fork, which has none of "
                "its threads, files and connections; train in the first process, or call wherry.initialize here"
            )


_all: weakref.WeakSet[Lifetime] = weakref.WeakSet()


def _forked() -> None:
    """In a child process: threads, connections and files stay with the first."""
    for lifetime in _all:
        if lifetime.now is not Life.CLOSED:
            lifetime.become(Life.FORKED)


os.register_at_fork(after_in_child=_forked)
