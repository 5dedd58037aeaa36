"""Bars as SVG: small enough to be read in a diff, and the same for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LETTER, ROW, TOP = 760, 6.5, 22, 40
OURS, OTHERS = "#1f6f8b", "#b8b8b8"


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    words: str
    ours: bool


def _head(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="14">{escape(title)}</text>',
    ]


def bars(title: str, entries: Sequence[Bar]) -> str:
    """Horizontal bars, in the order given, each with its value in words."""
    longest = max(entry.value for entry in entries)
    labels = round(20 + LETTER * max(len(entry.label) for entry in entries))
    room = WIDTH - labels - 110
    height = TOP + ROW * len(entries) + 10
    lines = _head(title, height)
    for index, entry in enumerate(entries):
        y = TOP + ROW * index
        length = max(1.0, room * entry.value / longest)
        lines += [
            f'<text x="{labels - 8}" y="{y + 14}" text-anchor="end">{escape(entry.label)}</text>',
            f'<rect x="{labels}" y="{y + 3}" width="{length:.1f}" height="{ROW - 8}" '
            f'fill="{OURS if entry.ours else OTHERS}"/>',
            f'<text x="{labels + length + 6:.1f}" y="{y + 14}">{escape(entry.words)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
