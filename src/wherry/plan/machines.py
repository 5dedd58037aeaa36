"""Machines: what they hold and how fast they are, described by name, by numbers, or measured (`probe`)."""

from __future__ import annotations

import difflib
import re
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

    def with_host_memory(self, host_memory: int | None) -> Machine:
        """Return the machine with at least this `wherry.host_memory`: that of some machines grows as it is used."""
        return replace(self, host_memory=max(self.host_memory, host_memory or 0))

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


def _geforce(name: str, memory: int, sheet: float, bandwidth: float, *, host: int = 64, pcie: float = 24) -> Machine:
    """A card in a desktop, from its sheet: TFLOP/s of products in half precision that are summed up in fp32, and GB/s.

    These cards sum up in fp32 at half their rate, and so reach nine tenths of that; products in fp32 have half of it.
    """
    return _gpu_node(
        name, 1, memory, host, matrix=round(0.9 * sheet), fp32=round(0.42 * sheet), hbm=round(0.9 * bandwidth),
        stream=60, pcie=pcie, link=round(0.8 * pcie), disk=2, read=6,
    )  # fmt: skip


# Typical machines of their kind, at rates that programs reach: matrix products at about 0.6 of the sheet's dense
# figure, which is noted, and less where a card's watts end first; its memory at 0.85 to 0.9 of the sheet's; host memory
# as STREAM sees it.
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
        # Four of the 72 that NVLink joins, with the two processors beside them: 2,500 TFLOP/s, 8 TB/s; each processor
        # gives its two GPUs 450 GB/s each way.
        _gpu_node("gb200", 4, 186, 960, matrix=1500, fp32=650, hbm=6800, stream=760, pcie=190, link=700, network=45),
        # 1,307 TFLOP/s (163 of fp32, which torch does not round to fewer bits there); 5.3 and 6 TB/s.
        _gpu_node("mi300x", 8, 192, 2000, matrix=750, fp32=100, hbm=4500, stream=500, pcie=50, link=300, network=45),
        _gpu_node("mi325x", 8, 256, 2000, matrix=750, fp32=100, hbm=5100, stream=500, pcie=50, link=300, network=45),
        # 65 TFLOP/s of fp16 in 70 W, and 320 GB/s.
        _gpu_node("t4", 1, 16, 64, matrix=30, fp32=5, hbm=270, stream=60, pcie=12, link=10, half="fp16"),
        # 125 in 150 W, and 600 GB/s; the second is Amazon's, of 70.
        _gpu_node("a10", 1, 24, 128, matrix=75, fp32=32, hbm=540, stream=100, pcie=24, link=20),
        _gpu_node("a10g", 1, 24, 128, matrix=55, fp32=28, hbm=540, stream=100, pcie=24, link=20),
        # 121 in 72 W, and 300 GB/s.
        _gpu_node("l4", 1, 24, 128, matrix=60, fp32=30, hbm=270, stream=100, pcie=24, link=20),
        # 362 and 864 GB/s.
        _gpu_node("l40s", 1, 48, 256, matrix=215, fp32=100, hbm=780, stream=150, pcie=24, link=20),
        # 155 and 768 GB/s; 364 and 960 GB/s; 504 and 1.79 TB/s.
        _gpu_node("a6000", 1, 48, 128, matrix=93, fp32=46, hbm=690, stream=100, pcie=24, link=20, read=6),
        _gpu_node("rtx-6000-ada", 1, 48, 128, matrix=218, fp32=105, hbm=860, stream=100, pcie=24, link=20, read=6),
        _gpu_node("rtx-pro-6000", 1, 96, 256, matrix=300, fp32=145, hbm=1600, stream=200, pcie=52, link=40, read=12),
        _geforce("3060", 12, 25.5, 360, host=32),
        _gpu_node("3090", 1, 24, 64, matrix=62, fp32=28, hbm=850, stream=40, pcie=24, link=20, disk=2, read=6),
        _geforce("4060", 8, 30.2, 272, host=32, pcie=12),
        _geforce("4060ti", 16, 44.1, 288, host=32, pcie=12),
        _geforce("4070", 12, 58.3, 504),
        _geforce("4070-super", 12, 70.9, 504),
        _geforce("4070ti", 12, 80.2, 504),
        _geforce("4070ti-super", 16, 88.2, 672),
        _geforce("4080", 16, 97.5, 717),
        _geforce("4080-super", 16, 104.4, 736),
        _gpu_node("4090", 1, 24, 128, matrix=155, fp32=70, hbm=920, stream=70, pcie=24, link=20, disk=2, read=6),
        _geforce("5060", 8, 38.4, 448, host=32, pcie=26),
        _geforce("5060ti", 16, 47.4, 448, host=32, pcie=26),
        _geforce("5070", 12, 61.7, 672, pcie=52),
        _geforce("5070ti", 16, 87.9, 896, pcie=52),
        _geforce("5080", 16, 112.6, 960, pcie=52),
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


# What names of cards have around the one that tells them apart.
_AROUND = re.compile("nvidia|amd|geforce|[rg]tx|tesla|instinct|blackwell|workstation|edition|generation|sxm.?|hbm.*")


def _words(name: str) -> list[str]:
    """What is left of a name as people and drivers write it."""
    words = (word.removeprefix("rtx") for word in re.findall(r"[a-z0-9]+", name.lower()))
    return [word for word in words if word and not _AROUND.fullmatch(word)]


def known(name: str) -> Machine:
    """The machine of this name, or of the name of its GPU.

    >>> known("NVIDIA GeForce RTX 4090").gpu_memory, known("A100-SXM4-80GB").name
    (24000000000, 'a100')
    """
    words = _words(name)
    sizes = [int(found[1]) for word in words if (found := re.fullmatch(r"(\d+)gi?b", word))]
    asked = "".join(word for word in words if not re.fullmatch(r"\d+gi?b", word))
    names = {"".join(_words(each)): each for each in KNOWN}
    if asked not in names:
        close = difflib.get_close_matches(asked, names, n=1)
        hint = f"did you mean {names[close[0]]}? " if close else ""
        raise WherryError(f"--machine: none is known as {name!r}; {hint}`wherry plan --machine list` shows them all")
    machine = KNOWN[names[asked]]
    for size in sizes:  # some are sold with several
        if size * GB not in (machine.gpu_memory, machine.host_memory):
            raise WherryError(
                f"--machine: {machine.name} has {machine.gpu_memory // GB} GB here, not {size}; give --machine "
                f"{machine.name} --gpu-memory {size}GB"
            )
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
