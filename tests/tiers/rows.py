"""The placements that tests go through: rows of the table with states off the device."""

from __future__ import annotations

from dataclasses import replace

from wherry.parallel.topology import Topology
from wherry.tiers.disk import DiskStore

# Name: stage, and where optimizer state and parameters rest, as the config says it.
ROWS = {
    "offload-0": (0, "cpu", "none"),
    "offload-1": (1, "cpu", "none"),
    "offload-2": (2, "cpu", "none"),
    "offload-3": (3, "cpu", "none"),
    "offload-3-parameters": (3, "cpu", "cpu"),
    "parameters-only": (3, "none", "cpu"),
    "disk-0": (0, "nvme", "none"),
    "disk-2": (2, "nvme", "none"),
    "disk-3": (3, "nvme", "none"),
    "disk-3-parameters": (3, "nvme", "cpu"),
    "infinity": (3, "nvme", "nvme"),
    "disk-parameters": (3, "cpu", "nvme"),
}


def with_stores(place: Topology) -> tuple[Topology, list[DiskStore]]:
    """The same place, and the stores that will be opened there."""
    stores: list[DiskStore] = []

    def open_store(*args: object, **options: object) -> DiskStore:
        stores.append(place.open_store(*args, **options))
        return stores[-1]

    return replace(place, open_store=open_store), stores
