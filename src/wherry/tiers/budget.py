"""Will it fit: what training states take of host memory, against what there is, before anything is taken."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wherry.errors import WherryError
from wherry.tiers.disk_errors import human
from wherry.tiers.machine import machine


class HostMemoryError(WherryError):
    """Training states would not fit in host memory. `missing` is by how many bytes."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True)
class Room:
    """Host memory that processes share: `key` is the same for all that do, and for no others; `name` is for people."""

    key: str
    name: str
    free: int


def rooms() -> list[Room]:
    """Where this process takes memory from: the machine's, and within it its control group's where that has a limit."""
    import psutil

    here, host = machine(), socket.gethostname()
    found = [Room(here, f"on {host}", int(psutil.virtual_memory().available))]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, taken = Path(limit).read_text().strip(), int(Path(used).read_text())
            group = os.stat(limit)
        except (OSError, ValueError):  # no control groups of this version here
            continue
        if most.isdecimal():
            key = f"{here} {group.st_dev}:{group.st_ino}"
            found.append(Room(key, f"in the container {host}", max(0, int(most) - taken)))
    return found


def free_host_memory() -> int:
    """Bytes that this process may still take."""
    return min(room.free for room in rooms())


def host_room(ranks: int, limit: int | None, held: int) -> int:
    """Bytes of host memory for states of `ranks` ranks: the user's limit, or what is free and what the model has."""
    return limit if limit is not None else free_host_memory() + held * ranks


def check_host(
    needed: int, ranks: int, limit: int | None, held: int, remedies: Iterable[tuple[str, int]]
) -> None:
    """Raise HostMemoryError unless `needed` bytes on each of `ranks` ranks of this machine fit.

    `limit` is the user's, for all ranks; without it, what is free is. `held` bytes of the model that is given are part
    of what is needed. `remedies` are other settings, and what they would need.
    """
    room = host_room(ranks, limit, held)
    missing = needed * ranks - room
    if missing <= 0:
        return
    whose = "wherry.host_memory allows" if limit is not None else "this machine has free"
    fitting = [f"{words} (then {human(bytes_)})" for words, bytes_ in remedies if bytes_ * ranks <= room]
    otherwise = f"; {'raise it, or ' if limit is not None else ''}use more ranks on other machines"
    advice = "; what would fit: " + ", or ".join(fitting) if fitting else otherwise
    each = f"{human(needed)} on each of {ranks} ranks here" if ranks > 1 else human(needed)
    raise HostMemoryError(
        f"training states need {each} of host memory, and {whose} {human(max(0, room))}: {human(missing)} are "
        f"missing{advice}",
        missing,
    )
