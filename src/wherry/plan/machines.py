"""Machines: what they hold and how fast they are, described by name, by numbers, or measured (`probe`)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from wherry.errors import WherryError
from wherry.placement import Tier

GB = 10**9
TERA = 10**12

# Kept free on each tier: what lies below tensors (the driver's context, fragments, a process's own memory).
DEVICE_SLACK = 0.08
HOST_SLACK = 0.05
DISK_SLACK = 0.05
# Bytes a second between nodes whose ranks meet by TCP.
HOST_NETWORK = 1.0 * GB
# What torch itself takes in each process.
PROCESS = 500 * 10**6


@dataclass(frozen=True)
class Machine:
    """`nodes` nodes of `gpus` GPUs each. Rates are bytes, operations or elements a second that are reached, not peaks.

    Without GPUs the host computes: its memory is the device's too, and its rates are shared by the ranks.
    """

    name: str
    gpus: int
    # Of a GPU, and of a node.
    gpu_memory: int
    host_memory: int
    disk: int
    # Matrix products in half precision and in fp32, of a GPU; of the host where there is none.
    matrix: float
    matrix_fp32: float
    # What computes reads and writes its own memory at this rate.
    device_stream: float
    # A node's memory, as the host's update sees it.
    stream: float
    # Host to a GPU, each way.
    pcie: float
    disk_read: float
    disk_write: float
    # Between the GPUs (or ranks) of a node, and between nodes, for each GPU.
    link: float
    network: float
    nodes: int = 1
    # Seconds that an operation costs however small it is.
    overhead: float = 6e-6
    measured: bool = False
    # Whether others kept cores busy meanwhile, so that the rates are too low.
    busy: bool = False
    # What computes fast in half precision.
    half: str = "bf16"

    def ranks(self) -> int:
        """One for each GPU; on the host, one for each node."""
        return max(1, self.gpus) * self.nodes

    def ranks_per_node(self, ranks: int) -> int:
        return -(-ranks // self.nodes)

    def holding(self, ranks: int) -> Machine:
        """With as many nodes as this many ranks need, where each has a GPU of its own."""
        if not self.gpus or ranks <= self.gpus * self.nodes:
            return self
        return replace(self, nodes=-(-ranks // self.gpus))

    def capacity(self, tier: Tier, ranks: int) -> int:
        """Bytes that training may use: of a GPU for the device, else of a node."""
        if tier is Tier.DEVICE and self.gpus:
            return int(self.gpu_memory * (1 - DEVICE_SLACK))
        if tier is Tier.DISK:
            return int(self.disk * (1 - DISK_SLACK))
        processes = self.ranks_per_node(ranks)
        return max(0, int(self.host_memory * (1 - HOST_SLACK)) - PROCESS * processes)


def kept_free(machine: Machine) -> str:
    """What `capacity` leaves out, in words."""
    gpu = f"{DEVICE_SLACK:.0%} of a GPU, " if machine.gpus else ""
    host = f"{HOST_SLACK:.0%} of the host and {PROCESS / 1e9:g} GB for each process"
    return f"Usable is all but {gpu}{host}, {DISK_SLACK:.0%} of the disk."


def _gpu_node(
    name: str, gpus: int, memory: int, host: int, *, matrix: float, fp32: float, hbm: float, stream: float,
    pcie: float, link: float, network: float = 25, disk: int = 8, read: float = 10, write: float = 5,
    half: str = "bf16",
) -> Machine:  # fmt: skip
    """Memory in GB, disk in TB, rates in GB/s and TFLOP/s."""
    return Machine(
        name, gpus, memory * GB, host * GB, disk * TERA, matrix * TERA, fp32 * TERA, hbm * GB,
        stream * GB, pcie * GB, read * GB, write * GB, link * GB, network * GB,
        half=half,
    )  # fmt: skip


# Typical machines of their kind, at rates that programs reach: matrix products at about 0.6 of the sheet's figure,
# host memory as STREAM sees it.
KNOWN = {
    machine.name: machine
    for machine in (
        _gpu_node(
            "v100-dgx2", 16, 32, 1500, matrix=70, fp32=13, hbm=780, stream=190, pcie=12, link=120, network=12,
            disk=30, read=25, write=16, half="fp16",
        ),
        _gpu_node(
            "v100", 8, 32, 512, matrix=70, fp32=13, hbm=780, stream=150, pcie=12, link=100, network=12,
            half="fp16",
        ),
        _gpu_node("a100", 8, 80, 1000, matrix=220, fp32=75, hbm=1700, stream=300, pcie=24, link=230),
        _gpu_node("h100", 8, 80, 2000, matrix=620, fp32=280, hbm=2900, stream=440, pcie=50, link=350, network=45),
        _gpu_node("h200", 8, 141, 2000, matrix=620, fp32=280, hbm=4100, stream=440, pcie=50, link=350, network=45),
        _gpu_node("b200", 8, 180, 2000, matrix=1400, fp32=600, hbm=6800, stream=500, pcie=52, link=700, network=45),
        _gpu_node("gh200", 1, 96, 480, matrix=620, fp32=280, hbm=3400, stream=380, pcie=380, link=380, network=45),
        _gpu_node("3090", 1, 24, 64, matrix=62, fp32=28, hbm=850, stream=40, pcie=24, link=20, disk=2, read=6),
        _gpu_node("4090", 1, 24, 128, matrix=155, fp32=70, hbm=920, stream=70, pcie=24, link=20, disk=2, read=6),
        _gpu_node("5090", 1, 32, 128, matrix=200, fp32=90, hbm=1600, stream=70, pcie=52, link=40, disk=2, read=12),
    )
}  # fmt: skip


def _server(stream: float) -> Machine:
    """The cores of a server, whose memory is this fast."""
    return Machine(
        "a server", gpus=0, gpu_memory=0, host_memory=0, disk=0, matrix=3 * TERA, matrix_fp32=1.5 * TERA,
        device_stream=stream, stream=stream, pcie=stream / 2, disk_read=0, disk_write=0, link=stream / 4,
        network=HOST_NETWORK, overhead=3e-6,
    )  # fmt: skip


def known(name: str) -> Machine:
    """The machine of this name.

    >>> known("4090").gpu_memory
    24000000000
    """
    machine = KNOWN.get(name.lower())
    if machine is None:
        close = difflib.get_close_matches(name.lower(), KNOWN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise WherryError(f"--machine: expected one of {', '.join(KNOWN)}, got {name!r}{hint}")
    return machine


def described(
    base: Machine,
    *,
    gpus: int | None = None,
    stream: float | None = None,
    disk_bandwidth: float | None = None,
    **sizes: int | None,
) -> Machine:
    """`base` with other numbers; `sizes` are fields of it.

    One that has no GPU and gets some has the rates of an A100's, and the other way round those of a server's cores.
    """
    if gpus is not None and bool(gpus) != bool(base.gpus):
        of_host = ("name", "host_memory", "disk", "stream", "disk_read", "disk_write", "nodes")
        computes = KNOWN["a100"] if gpus else _server(base.stream)
        # Nobody has said how large GPUs are.
        base = replace(computes, gpu_memory=0, **{name: getattr(base, name) for name in of_host})
    given: dict[str, Any] = {"gpus": gpus, "stream": stream, **sizes}
    changes = {name: value for name, value in given.items() if value is not None}
    if disk_bandwidth is not None:
        changes |= {"disk_read": disk_bandwidth, "disk_write": disk_bandwidth}
    if stream is not None and not (base.gpus if gpus is None else gpus):
        changes["device_stream"] = stream  # what computes reads the host's memory
    if not changes:
        return base
    name = base.name if base.name.endswith(", changed") else f"{base.name}, changed"
    return replace(base, name=name, **changes)
