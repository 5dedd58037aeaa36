"""Standard output that nobody reads any more, or that has no room: commands end as others do then."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

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


@contextlib.contextmanager
def kept_terminal() -> Iterator[None]:
    """While something is redrawn on the terminal, keys leave no mark there: the ^C of a Ctrl-C would move the lines.

    Afterwards it is as it was, and has its cursor, whatever has ended those that drew.
    """
    import termios

    def ours() -> bool:  # whoever is in the background would be stopped
        return sys.stdin.isatty() and sys.stdout.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()

    if sys.stdin is None or sys.stdout is None or not ours():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        if ours():
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
            print("\x1b[?25h", end="", flush=True)


def give_up() -> None:
    """Nothing more is written, at exit either."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)
