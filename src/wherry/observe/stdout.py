"""Standard output that nobody reads any more, or that has no room: commands end as others do then."""

from __future__ import annotations

import os
import sys

CUT_OFF = 141
"""The exit status of what a closed pipe has ended, as a shell tells it."""


def flush() -> None:
    if sys.stdout is not None:  # as it is where a process starts without one
        sys.stdout.flush()


def is_lost() -> bool:
    """Whether standard output is what could not be written: then the end of a line cannot be either."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def give_up() -> None:
    """Nothing more is written, at exit either."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)
