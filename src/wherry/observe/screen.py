"""What people read on standard output."""

from __future__ import annotations

from rich.console import Console

from wherry.observe import stdout


class Screen(Console):
    """rich's own ends a program whose pipe is closed with status 1, which tells of other things here."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        stdout.give_up()
        raise SystemExit(stdout.CUT_OFF)
