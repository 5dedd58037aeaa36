"""Pages that need no network: a frame, tables, and charts as SVG, in light and dark, on a desk and on a phone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from wherry.observe.memory import format_bytes

Point = tuple[float, float]
# Of a chart: across the page; and one of three beside each other, or on a phone.
WIDE, NARROW = 1080, 344

STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --dim: #667085; --line: #d9dde5; --page: #fff; --shade: #8a94a624;
  --c0: #4c78a8; --c1: #72b7b2; --c2: #b5a642; --c3: #9aa0a8; --c4: #f2983e; --c5: #9ecae9; --c6: #e4605e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --line: #363c48; --page: #14171d; } }
text { font: 12px system-ui, sans-serif; fill: var(--dim); } .grid { stroke: var(--line); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.dots { fill: none; stroke-width: 3; stroke-linecap: round; opacity: .35; }
.hover { fill: transparent; } .hover:hover, .shade { fill: var(--shade); }
"""
PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 1080px; padding: 24px 20px 60px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 8px; }
p { margin: 4px 0 12px; max-width: 76ch; } .dim, th { color: var(--dim); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; }
td, th { text-align: left; padding: 3px 18px 3px 0; font-weight: normal; vertical-align: top; }
th { border-bottom: 1px solid var(--line); } .number { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; font-size: 13px; } summary { cursor: pointer; } td { overflow-wrap: break-word; }
figure { margin: 12px 0 20px; } figcaption { font-weight: 600; } svg { display: block; max-width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; margin: 2px 0 4px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.row { display: grid; grid-template-columns: repeat(3, 1fr); gap: 0 24px; } .narrow { display: none; }
@media (max-width: 760px) { .narrow, .row { display: block; } .wide { display: none; }
  body { padding: 16px 16px 40px; } td, th { padding-right: 12px; } }
"""


def page(title: str, *parts: str, style: str = "") -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{STYLE}{PAGE_STYLE}{style}</style>"
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """As on a screen: a column whose header begins with > is of numbers."""
    kinds = [' class="number"' if header.startswith(">") else "" for header in headers]

    def row(cells: Iterable[object], tag: str) -> str:
        found = zip(cells, kinds, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(str(cell))}</{tag}>" for cell, kind in found) + "</tr>"

    names = [header.removeprefix(">") for header in headers]
    head = row(names, "th") if any(names) else ""
    return f'<div class="scroll"><table>{head}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def ticks(low: float, high: float, most: int, base: float = 10) -> list[float]:
    """Round numbers from `low` to `high`, at most so many: of bytes with a `base` of 2."""
    if not high > low:
        return [low]
    steps = (1, 2, 5, 10) if base == 10 else (1, 2)
    rough = (high - low) / most
    power = base ** math.floor(math.log(rough, base))
    step = next((s * power for s in steps if s * power >= rough * 0.999), power * base)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Series:
    """Points in the order of x; `color` is the number of one of the page's."""

    name: str
    points: Sequence[Point]
    color: int = 0
    # Faint dots, without a line; or an area down to `base`, of values that stay until the next.
    dots: bool = False
    base: Sequence[Point] = ()


@dataclass(frozen=True)
class Chart:
    """Lines or stacked areas over an x axis."""

    title: str
    series: Sequence[Series]
    x_label: str = ""
    show: Callable[[float], str] = lambda value: f"{value:,.6g}"
    # Of y: powers of 2 for bytes; and whether it begins at 0.
    base: float = 10
    from_zero: bool = False
    # Stretches of x with a name: shaded ones, sparse marks below the axis, and what is told where a pointer is.
    bands: Sequence[tuple[float, float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()
    hovers: Sequence[tuple[float, float, str]] = ()
    height: int = 250
    size: int = NARROW

    def html(self) -> str:
        named = [one for one in self.series if one.name]
        keys = [f'<span><i style="background: var(--c{one.color})"></i>{escape(one.name)}</span>' for one in named]
        legend = f'<div class="legend">{"".join(keys)}</div>' if len(named) > 1 else ""
        drawn = self.svg(NARROW)
        if self.size != NARROW:
            drawn = f'<div class="wide">{self.svg(self.size)}</div><div class="narrow">{drawn}</div>'
        return f"<figure><figcaption>{escape(self.title)}</figcaption>{legend}{drawn}</figure>"

    def svg(self, width: int) -> str:
        points = [point for one in self.series for point in (*one.points, *one.base)]
        if not points:
            return '<p class="dim">nothing was recorded</p>'
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low_x, high_x, low, high = min(xs), max(xs), 0.0 if self.from_zero else min(ys), max(ys)
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = low if self.from_zero else low - room, high + room
        shown = ticks(low, high, 6, self.base)
        left = 14 + 7 * max(len(self.show(y)) for y in shown)
        top, right = 18 if self.bands else 8, 12
        marks = self._marks(width - left - right, low_x, high_x)
        floor = top + self.height
        below = floor + (18 if marks else 0)

        def x_of(x: float) -> float:
            return left + (x - low_x) / ((high_x - low_x) or 1.0) * (width - left - right)

        def y_of(y: float) -> float:
            return top + (high - y) / (high - low) * self.height

        def rect(begin: float, end: float, kind: str, inside: str = "") -> str:
            place = f'x="{x_of(begin):.1f}" width="{max(1.0, x_of(end) - x_of(begin)):.1f}"'
            return f'<rect class="{kind}" {place} y="{top}" height="{self.height}">{inside}</rect>'

        out = []
        for index, (begin, end, name) in enumerate(self.bands):
            out += [rect(begin, end, "shade")] if index % 2 == 0 else []
            if x_of(end) - x_of(begin) > 6.5 * len(name):
                out.append(_text(x_of((begin + end) / 2), top - 5, name))
        for y in shown:
            out.append(f'<path class="grid" d="M{left} {y_of(y):.1f}H{width - right}"/>')
            out.append(_text(left - 6, y_of(y) + 4, self.show(y), "end"))
        out += [_drawn(one, x_of, y_of) for one in self.series if one.points]
        for x, name in marks:
            out.append(f'<path class="grid" d="M{x_of(x):.1f} {floor}v5"/>' + _text(x_of(x), floor + 17, name))
        out += [_text(x_of(x), below + 16, f"{x:,.6g}") for x in ticks(low_x, high_x, max(5, width // 110))]
        out.append(_text((left + width - right) / 2, below + 33, self.x_label))
        out += [rect(begin, end, "hover", f"<title>{escape(told)}</title>") for begin, end, told in self.hovers]
        size = f'viewBox="0 0 {width} {below + 38}" width="{width}"'
        return f'<svg {size} role="img"><title>{escape(self.title)}</title>{"".join(out)}</svg>'

    def _marks(self, room: float, low: float, high: float) -> list[tuple[float, str]]:
        """As many as have room beside each other."""
        kept: list[tuple[float, str]] = []
        free = -math.inf
        for x, name in self.marks:
            place, half = (x - low) / ((high - low) or 1.0) * room, 3.5 * len(name) + 4
            if place - half >= max(free, -12) and place + half <= room + 12:
                kept.append((x, name))
                free = place + half
        return kept


def _drawn(one: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    def at(points: Iterable[Point]) -> list[str]:
        return [f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in points]

    color = f'="stroke: var(--c{one.color})"'
    if one.dots:
        return f'<path class="dots" d="{"".join(f"M{place}h0" for place in at(one.points))}" style{color}/>'
    if not one.base:
        return f'<path class="line" d="M{"L".join(at(one.points))}" style{color}/>'
    edges = at(_steps(one.points)) + at(_steps(one.base))[::-1]
    return f'<path d="M{"L".join(edges)}Z" style="fill: var(--c{one.color})"/>'


def _steps(points: Sequence[Point]) -> list[Point]:
    """Each value stays until the next."""
    corners = (((after[0], before[1]), after) for before, after in pairwise(points))
    return [points[0], *(corner for two in corners for corner in two)]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def stacked(names: Sequence[tuple[str, int]], rows: Sequence[tuple[float, Sequence[float]]]) -> list[Series]:
    """Areas on top of each other: of each name, with its color, one value in a row."""
    found, base = [], [(x, 0.0) for x, _ in rows]
    for index, (name, color) in enumerate(names):
        top = [(x, y + values[index]) for (x, y), (_, values) in zip(base, rows, strict=True)]
        found.append(Series(name, top, color, base=base))
        base = top
    return found


def bytes_shown(nbytes: float) -> str:
    """For an axis: a round number without a fraction."""
    return format_bytes(nbytes).replace(".0 ", " ") if nbytes else "0"
