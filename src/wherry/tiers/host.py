"""The host: which machine this is, and whether training states fit in its memory, before anything is taken.

Names of machines do not tell them apart, as containers share names and machines change them.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wherry.errors import WherryError
from wherry.observe.memory import control_groups
from wherry.tiers.buffers import untouched
from wherry.tiers.disk_errors import human


class HostMemoryError(WherryError):
    """Training states would not fit in host memory. `missing` is by how many bytes."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


def machine() -> str:
    """The same for all processes on one machine, in whatever container, until it is started anew; and for no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a system that is not Linux
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def this_process() -> tuple[str, int]:
    """Return the space of process ids that this process is in, which a container may have for itself, and its id."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # a system that is not Linux
        space = ""
    return f"{machine()} {space}", os.getpid()


def has_exited(process: tuple[str, int]) -> bool:
    """Tell whether another process has ended; False where its id says nothing here, as on another machine."""
    import psutil

    space, pid = process
    if space != this_process()[0]:
        return False
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True)
class Room:
    """Host memory that processes share: `key` is the same for all that do, and for no others; `name` is for people."""

    key: str
    name: str
    free: int


def rooms(ranks: int = 1, limit: int | None = None) -> list[Room]:
    """Where this process takes memory from: the machine's, and within it its control group's where that has a limit.

    What `ranks` like this one have promised to states, which have yet to write there, is not free. The rest of `limit`,
    the config's `wherry.host_memory`, counts as free even where the machine reports less: the memory of some virtual
    machines grows as it is used.
    """
    import psutil

    here, host, promised = machine(), socket.gethostname(), ranks * untouched()
    left = 0 if limit is None else max(0, limit - promised - ranks * psutil.Process().memory_info().rss)
    spaces = [Room(here, f"on {host}", max(left, int(psutil.virtual_memory().available) - promised))]
    for limited in control_groups():
        group = os.stat(limited.file)
        key = f"{here} {group.st_dev}:{group.st_ino}"
        spaces.append(Room(key, f"in the container {host}", max(0, limited.free - promised)))
    return spaces


def free_host_memory(ranks: int = 1, limit: int | None = None) -> int:
    """Bytes that `ranks` processes like this one may still take, together, where a config has this `limit`."""
    return min(room.free for room in rooms(ranks, limit))


def check_host(needed: int, ranks: int, limit: int | None, held: int, less: Sequence[str]) -> None:
    """Raise HostMemoryError unless `needed` bytes on each of `ranks` ranks of this machine fit.

    `limit` is the user's, for all ranks; without it, what is free is. `held` bytes of the model that is given are part
    of what is needed. `less` are settings that take less.
    """
    room = limit if limit is not None else free_host_memory(ranks) + held * ranks
    missing = needed * ranks - room
    if not needed or missing <= 0:
        return
    whose = "wherry.host_memory allows" if limit is not None else "this machine has free"
    each = f"{human(needed)} on each of {ranks} ranks here" if ranks > 1 else human(needed)
    larger = "a larger wherry.host_memory" if limit is not None else "wherry.host_memory, if memory grows as it is used"
    ways = [*less, larger, "more ranks on other machines"]
    raise HostMemoryError(
        f"training states need {each} of host memory, and {whose} {human(max(0, room))}: {human(missing)} are "
        f"missing; what helps: {' or '.join(ways)}; `wherry plan` tells what fits",
        missing,
    )
