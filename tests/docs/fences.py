"""Fenced blocks of pages, and how each kind is run. A page is read from top to bottom in one folder of its own.

Kinds: `console` (commands), `python` and `json` (with title="FILE" they are also written to that file), `text` (what is
shown, and not run). A comment <!-- not run: REASON --> in the line before a fence leaves it out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

KINDS = ("console", "python", "json", "text")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```\s*?$", re.M | re.S)
_TITLE = re.compile(r'title="([\w./-]+)"')
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")


@dataclass(frozen=True)
class Fence:
    line: int
    kind: str
    title: str | None
    text: str
    # Why it cannot be run here.
    not_run: str | None


def fences_of(page: Path) -> list[Fence]:
    whole, found = page.read_text(encoding="utf-8"), []
    for match in _FENCE.finditer(whole):
        before = whole[: match.start()]
        title, reason = _TITLE.search(match["info"]), _NOT_RUN.search(before)
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.M)
        line = before.count("\n") + 1
        found.append(Fence(line, match["kind"], title and title[1], text, reason and reason[1]))
    return found


def commands_of(text: str) -> list[str]:
    """The commands of a console, one of several lines in one piece."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]
