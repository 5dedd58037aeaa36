"""Will it fit: what training states take of host memory, against what there is, before anything is taken."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from wherry.errors import WherryError
from wherry.observe.memory import control_groups
from wherry.tiers.disk_errors import human
from wherry.tiers.machine import machine


class HostMemoryError(WherryError):
    """Training states would not fit in host memory. `missing` is by how many bytes."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


# Memory that this process was given and has not touched: for the system it is free still. By whose it is, in bytes.
_promised: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def promise(holder: object, nbytes: int) -> None:
    """`holder` has so many bytes that nobody has touched; until `keep`, or as long as it lives."""
    with _lock:
        _promised[holder] = nbytes


def keep(holder: object) -> None:
    """What was promised to `holder` is about to be touched: the system knows of it from now on."""
    with _lock:
        _promised.pop(holder, None)


def promised() -> int:
    """Bytes that this process will take without asking again."""
    with _lock:
        return sum(_promised.values())


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
    taken = promised()
    found = [Room(here, f"on {host}", max(0, int(psutil.virtual_memory().available) - taken))]
    for limited in control_groups():
        group = os.stat(limited.file)
        key = f"{here} {group.st_dev}:{group.st_ino}"
        found.append(Room(key, f"in the container {host}", max(0, limited.free - taken)))
    return found


def free_host_memory() -> int:
    """Bytes that this process may still take."""
    return min(room.free for room in rooms())


def host_room(ranks: int, limit: int | None, held: int) -> int:
    """Bytes of host memory for states of `ranks` ranks: the user's limit, or what is free and what the model has."""
    # The other ranks of this machine have promised as much as this one, of which the system knows as little.
    return limit if limit is not None else free_host_memory() - promised() * (ranks - 1) + held * ranks


def check_host(needed: int, ranks: int, limit: int | None, held: int, remedies: Iterable[tuple[str, int]]) -> None:
    """Raise HostMemoryError unless `needed` bytes on each of `ranks` ranks of this machine fit.

    `limit` is the user's, for all ranks; without it, what is free is. `held` bytes of the model that is given are part
    of what is needed. `remedies` are other settings, and what they would need.
    """
    room = host_room(ranks, limit, held)
    missing = needed * ranks - room
    if not needed or missing <= 0:
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
