"""Bars and curves as SVG: small enough to be read in a diff, and the same for the same figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LETTER, ROW, TOP = 760, 6.5, 22, 40
# Of curves: the height of the field, and where it begins from the left.
FIELD, LEFT = 300, 80
OURS, OTHERS = "#1f6f8b", "#b8b8b8"


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    words: str
    ours: bool


@dataclass(frozen=True)
class Curve:
    label: str
    # What grows, and what it takes.
    points: Sequence[tuple[float, float]]
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


def curves(
    title: str, drawn: Sequence[Curve], across_words: Callable[[float], str], up_words: Callable[[float], str]
) -> str:
    """Lines through what was measured, both scales logarithmic, each with its name at its end and its last value."""
    acrosses = sorted({across for curve in drawn for across, _ in curve.points})
    ups = [up for curve in drawn for _, up in curve.points]
    decades = range(math.floor(math.log10(min(ups))), math.ceil(math.log10(max(ups))) + 1)
    low, high = decades[0], max(decades[-1], decades[0] + 1)
    names = [f"{curve.label}, {up_words(curve.points[-1][1])}" for curve in drawn]
    room = WIDTH - LEFT - round(20 + LETTER * max(map(len, names)))

    def x(across: float) -> float:
        first, last = acrosses[0], acrosses[-1]
        return LEFT + (room * math.log(across / first) / math.log(last / first) if last > first else 0)

    def y(up: float) -> float:
        return TOP + FIELD * (high - math.log10(up)) / (high - low)

    lines = _head(title, TOP + FIELD + 40)
    for decade in range(low, high + 1):
        level = y(10.0**decade)
        lines.append(f'<path d="M{LEFT} {level:.1f}H{LEFT + room}" stroke="#e4e4e4"/>')
        lines.append(
            f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{escape(up_words(10.0**decade))}</text>'
        )
    for across in acrosses:
        words = escape(across_words(across))
        lines.append(f'<text x="{x(across):.1f}" y="{TOP + FIELD + 22}" text-anchor="middle">{words}</text>')
    # Names stand below each other where lines end too near.
    below = 0.0
    for curve, name in sorted(zip(drawn, names, strict=True), key=lambda pair: y(pair[0].points[-1][1])):
        colour = OURS if curve.ours else OTHERS
        path = "L".join(f"{x(across):.1f} {y(up):.1f}" for across, up in curve.points)
        lines.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [
            f'<circle cx="{x(across):.1f}" cy="{y(up):.1f}" r="3" fill="{colour}"/>' for across, up in curve.points
        ]
        below = max(below + 14, y(curve.points[-1][1]) + 4)
        lines.append(f'<text x="{x(curve.points[-1][0]) + 8:.1f}" y="{below:.1f}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])
