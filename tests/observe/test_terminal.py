import fcntl
import os
import pty
import subprocess
import sys
import termios

DRAWS = """
import sys, termios
from wherry.observe.stdout import kept_terminal

def echoes():
    return bool(termios.tcgetattr(sys.stdin)[3] & termios.ECHO)

try:
    with kept_terminal():
        print("\\x1b[?25l", "inside", echoes())
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("after", echoes())
"""


def test_keys_are_not_echoed_while_the_screen_is_redrawn_and_the_terminal_is_restored(launched):
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", DRAWS],
        stdin=theirs,
        stdout=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    assert run.wait(60) == 0
    shown = os.read(ours, 1000).decode().replace("\r\n", "\n")
    os.close(ours), os.close(theirs)
    assert shown == "\x1b[?25l inside False\n\x1b[?25hafter True\n"
