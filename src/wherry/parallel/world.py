"""All ranks of all mesh axes as one group, for what is rare and small: agreeing, reporting, telling failures."""

from __future__ import annotations

from typing import Any

from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology


class World(Comm):
    """The groups of a topology, one after the other: data fastest, then tensor, then pipe. It gathers objects alone."""

    def __init__(self, topology: Topology) -> None:
        self._axes = (topology.data, topology.tensor, topology.pipe)
        rank, size = 0, 1
        for axis in self._axes:
            rank += axis.rank * size
            size *= axis.size
        super().__init__(rank, size)

    def _gather_objects(self, value: Any) -> list[Any]:
        found = [value]
        for axis in self._axes:
            found = [item for part in axis.gather_objects(found) for item in part]
        return found

    def _barrier(self) -> None:
        self._gather_objects(None)

    def _meet(self, what: str) -> None:
        for axis in self._axes:
            axis.meet(what)


def world_of(topology: Topology) -> Comm:
    """The group of all ranks: the data axis itself, where there is no other."""
    return topology.data if topology.tensor.size == topology.pipe.size == 1 else World(topology)
