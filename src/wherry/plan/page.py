"""An estimate as a page: the memory of each place as a bar, the terms of a step below. It loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from wherry.placement import Tier
from wherry.plan.estimate import Estimate, Row, Use
from wherry.plan.quantities import seconds, size
from wherry.plan.roofline import WORDS

COLOURS = {
    "parameters": "#2f6db3",
    "gradients": "#5aa469",
    "optimizer": "#8c6bb1",
    "gathered": "#7fb3e0",
    "activations": "#e0a030",
    "buffers": "#b0a090",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d232b; background: #fff; max-width: 52rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p { margin: .2rem 0; } .dim { color: #5b6672; } .good { color: #1f7a3a; } .bad { color: #b3261e; font-weight: 600; }
.bar { position: relative; display: flex; height: 2rem; background: #edf0f3; border-radius: 3px; overflow: hidden; }
.bar span { display: block; height: 100%; } .usable { position: absolute; top: 0; bottom: 0; width: 2px;
  background: #1d232b; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .4rem 0 0; padding: 0; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem; }
table { border-collapse: collapse; width: 100%; } td { padding: .15rem .6rem .15rem 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; width: 7rem; }
td.wide { width: 60%; } td.wide span { display: block; height: .9rem; background: #7f8c9a; border-radius: 2px; }
td.wide span.limit { background: #b3261e; }
"""


def page(found: Estimate, headings: Sequence[str], change: str | None) -> str:
    """A whole HTML document, with nothing outside it."""
    title, *rest = headings
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="dim">{escape(line)}</p>' for line in rest),
        *(_place(use, found) for use in found.uses if use.needed),
        _step(found),
    ]
    if change:
        parts.append(f"<h2>Nearest change</h2><p>{escape(change)}</p>")
    parts += [f'<p class="dim">Note: {escape(note)}</p>' for note in found.notes]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def rows_of(use: Use, found: Estimate) -> list[tuple[Row, int]]:
    """The categories that a place holds, with their bytes there: of a GPU, or of all ranks of a node."""
    if use.place == "GPU":
        return [(row, row.bytes) for row in found.rows if row.tier == str(Tier.DEVICE) and row.bytes]
    tiers = {str(Tier.DISK)} if use.place == "disk" else {str(Tier.HOST)}
    if use.place == "host" and not found.machine.gpus:
        tiers.add(str(Tier.DEVICE))
    together = found.machine.ranks_per_node(found.ranks)
    return [(row, row.bytes * together) for row in found.rows if row.tier in tiers and row.bytes]


def _place(use: Use, found: Estimate) -> str:
    whole = max(use.needed, use.usable, 1)
    rows = rows_of(use, found)
    spans = "".join(
        f'<span style="width:{100 * nbytes / whole:.3f}%;background:{COLOURS[row.category]}" '
        f'title="{escape(row.category)}: {size(nbytes)}"></span>'
        for row, nbytes in rows
    )
    legend = "".join(
        f'<li><i style="background:{COLOURS[row.category]}"></i>{escape(row.category)} {size(nbytes)}</li>'
        for row, nbytes in rows
    )
    spare = use.usable - use.needed
    verdict = (
        f'<span class="good">fits, {size(spare)} to spare</span>'
        if use.fits
        else f'<span class="bad">{size(-spare)} too much</span>'
    )
    names = {"GPU": "Each GPU", "host": "Host memory of a node", "disk": "Disk of a node"}
    mark = f'<div class="usable" style="left:{min(99.8, 100 * use.usable / whole):.3f}%"></div>'
    return (
        f"<h2>{names[use.place]}</h2>"
        f"<p>{size(use.needed)} of {size(use.usable)} usable: {verdict}</p>"
        f'<div class="bar">{spans}{mark}</div><ul class="legend">{legend}</ul>'
    )


def _step(found: Estimate) -> str:
    if found.time is None:
        return ""
    longest = max(found.time.terms.values(), default=0.0) or 1.0
    rows = "".join(
        f'<tr><td>{escape(WORDS[name])}</td><td class="number">{seconds(value)}</td><td class="wide">'
        f'<span class="{"limit" if name == found.time.limit else "term"}" style="width:{100 * value / longest:.2f}%">'
        "</span></td></tr>"
        for name, value in sorted(found.time.terms.items(), key=lambda item: -item[1])
        if value > 0
    )
    rate = found.tokens_per_second or 0.0
    what = "tokens" if found.sequence > 1 else "samples"
    return (
        "<h2>A step</h2>"
        f"<p>About {seconds(found.time.total)}, {rate:,.0f} {what} a second, limited by "
        f"{escape(found.time.limited_by)}.</p><table>{rows}</table>"
    )
