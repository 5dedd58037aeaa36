"""The placements that tests go through: rows of the table with states off the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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


def zero_block(stage: int, optimizer: str, parameters: str, folder: Path) -> dict[str, Any]:
    """Write the config's block for a row, with two buffers for each state that rests on disk."""
    zero: dict[str, Any] = {"stage": stage}
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer, "buffer_count": 2}
        if optimizer == "nvme":
            zero["offload_optimizer"]["nvme_path"] = str(folder)
    if parameters != "none":
        zero["offload_param"] = {"device": parameters}
        if parameters == "nvme":
            zero["offload_param"] |= {"nvme_path": str(folder), "max_in_cpu": 0, "buffer_count": 2}
    return zero


def offload(row: str, folder: Path, policy: str, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    """Write the config of a row; `optimizer` has further keys of `offload_optimizer`."""
    zero = zero_block(*ROWS[row], folder)
    if "offload_optimizer" in zero:
        zero["offload_optimizer"] |= more.pop("optimizer", {})
    config: dict[str, Any] = {"zero_optimization": zero, "wherry": {"update_policy": policy}} | more
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def with_stores(place: Topology) -> tuple[Topology, list[DiskStore]]:
    """The same place, and the stores that will be opened there."""
    stores: list[DiskStore] = []

    def open_store(*args: object, **options: object) -> DiskStore:
        stores.append(place.open_store(*args, **options))
        return stores[-1]

    return replace(place, open_store=open_store), stores
