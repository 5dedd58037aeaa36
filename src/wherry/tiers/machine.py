"""Which machine this is, and which processes this one can see: names of machines tell neither, as containers share
them and machines change them."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path


def machine() -> str:
    """The same for all processes on one machine, in whatever container, until it is started anew; and for no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a system that is not Linux
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def processes() -> str:
    """The same for all processes that know each other by their ids, and for no others."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # a system without containers
        space = 0
    return f"{machine()}-{space}"
