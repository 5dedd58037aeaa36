"""What people read on standard output."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wherry.errors import printable
from wherry.observe import stdout


class Screen(Console):
    """rich's own ends a program whose pipe is closed with status 1, which tells of other things here; and it prints
    what moves a terminal's cursor as it is."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        stdout.give_up()
        raise SystemExit(stdout.CUT_OFF)


def table(*headers: str, title: str | None = None, min_width: int | None = None) -> Table:
    """Columns under these headers; one that begins with > is of numbers."""
    found = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, header_style="dim")
    for header in headers:
        name = header.removeprefix(">")
        place = "left" if name == header else "right"
        found.add_column(name, justify=place, vertical="bottom", min_width=min_width, no_wrap=True)  # type: ignore[arg-type]
    return found
