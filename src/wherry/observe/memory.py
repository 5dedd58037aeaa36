"""Memory in use: of this process, of the machine, of the device."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def format_bytes(count: float) -> str:
    """Bytes as a person reads them.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def out_of_memory(error: BaseException) -> bool:
    import torch

    # The host's allocator has no error of its own, and differs in words between systems.
    told = str(error)
    kinds = MemoryError | torch.OutOfMemoryError
    return isinstance(error, kinds) or "allocate memory" in told or "DefaultCPUAllocator: not enough memory" in told


@dataclass(frozen=True)
class HostMemory:
    """This process's resident bytes now and at their highest, and what the machine has."""

    resident: int
    peak: int
    available: int
    total: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that torch's allocator has handed out on one device, and what the device has."""

    allocated: int
    peak: int
    free: int
    total: int


def host_memory() -> HostMemory:
    import psutil

    machine = psutil.virtual_memory()
    groups = control_groups()
    return HostMemory(
        resident=psutil.Process().memory_info().rss,
        peak=peak_resident(),
        available=min([machine.available, *(group.free for group in groups)]),
        total=min([machine.total, *(group.limit for group in groups)]),
    )


@dataclass(frozen=True)
class ControlGroup:
    """What the control group of a container may use and uses, in bytes, and the file that limits it."""

    limit: int
    used: int
    file: Path

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


# By version: where a group's files are, its limit, its use, and what of that are files that the system only caches.
_GROUPS = (
    (".", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def control_groups(root: Path = Path("/sys/fs/cgroup")) -> list[ControlGroup]:
    """Those with a limit. What the system caches of files is free, as it is in the memory of a machine."""
    found = []
    for folder, limit, use, cached in _GROUPS:
        group = root / folder
        try:
            most, used = (group / limit).read_text().strip(), int((group / use).read_text())
            stat = group / "memory.stat"
            lines = stat.read_text().splitlines() if stat.exists() else []
        except (OSError, ValueError):  # no control groups of this version here
            continue
        if most.isdecimal():
            files = sum(int(line.split()[1]) for line in lines if line.startswith(f"{cached} "))
            found.append(ControlGroup(int(most), max(0, used - files), group / limit))
    return found


def peak_resident() -> int:
    """The most bytes this process ever held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def driver_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on an accelerator, and that it has; none, where torch cannot tell."""
    import torch

    try:
        tell = getattr(torch.get_device_module(device), "mem_get_info", None) or torch.accelerator.get_memory_info
        return tell(device)
    except (AttributeError, NotImplementedError):
        return 0, 0


def free_on_gpu(device: torch.device) -> int:
    """Bytes that torch may still take there: of the driver's and of what it holds unused, within the part it may have.

    That part is what `set_per_process_memory_fraction` leaves this process, on devices that have it.
    """
    import torch

    free, total = driver_memory(device)
    allocated = torch.accelerator.memory_allocated(device)
    unused = torch.accelerator.memory_reserved(device) - allocated
    part = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    room = free + unused
    return max(0, room if part is None else min(room, int(part(device) * total) - allocated))


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Memory of an accelerator; None for the CPU, whose memory is the host's."""
    import torch

    if device.type == "cpu":
        return None
    free, total = driver_memory(device)
    return DeviceMemory(
        allocated=torch.accelerator.memory_allocated(device),
        peak=torch.accelerator.max_memory_allocated(device),
        free=free,
        total=total,
    )
