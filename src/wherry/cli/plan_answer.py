"""The answer of `wherry plan MODEL` as people read it: on a terminal, and as a page that says the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from wherry.observe import page as observe
from wherry.observe.screen import Screen, table
from wherry.observe.timeline import STATES
from wherry.placement import place_name
from wherry.plan.machines import kept_free
from wherry.plan.quantities import amount, seconds, size

if TYPE_CHECKING:
    from wherry.plan.estimate import Estimate, Use

BAR = 40
# By category: its color on a terminal, and its meaning.
COLORS = {
    "parameters": ("cyan", "working weights"),
    "gradients": ("yellow", "of the working weights"),
    "optimizer": ("blue", "what the optimizer keeps"),
    "gathered": ("bright_blue", "whole layers while they compute"),
    "activations": ("red", "kept from forward for backward"),
    "buffers": ("green", "of sends, copies and updates"),
}


def show(screen: Screen, now: Estimate) -> None:
    for line in _headings(now):
        screen.print(line, markup=False)
    screen.print()
    rows = table("bytes of a rank", "rest on", ">", "", min_width=14)
    for category, place, nbytes, meaning in _rows(now):
        rows.add_row(f"[{COLORS[category][0]}]■[/] {category}", place, nbytes, f"[dim]{meaning}[/]")
    screen.print(rows)
    screen.print()
    for use in now.uses:
        if use.needed:
            screen.print(_bar(use))
            good = "green" if use.fits else "bold red"
            screen.print(f"{_needed(use, now)} [{good}]{_verdict(use)}[/]")
    screen.print(kept_free(now.machine), style="dim")
    screen.print()
    for line in _time(now):
        screen.print(line, markup=False)
    for name, value, _ in _terms(now):
        screen.print(f"  {name:<22}{seconds(value):>12}")
    for note in now.notes:
        screen.print(f"Note: {note}", style="dim", markup=False)


def _bar(use: Use) -> str:
    """The categories in a place; what is light is free, or, behind a line, too much."""
    bar, drawn, reached = "", 0, 0
    limit = round(BAR * min(1.0, use.usable / use.needed))
    for category, nbytes in use.parts.items():
        reached += nbytes
        end = max(1, round(BAR * reached / max(use.needed, use.usable)))
        inside = max(drawn, min(end, limit)) if not use.fits else end
        bar += f"[{COLORS[category][0]}]{'█' * (inside - drawn)}{'▒' * (end - inside)}[/]"
        drawn = end
    return f"{bar}[dim]{'░' * (BAR - drawn)}[/]"


# What is said, in lines.


def _headings(now: Estimate) -> Iterator[str]:
    tokens = f" of {now.sequence:,} tokens" if now.sequence > 1 else ""
    how = ", activations recomputed" if now.recompute else ""
    yield f"{now.model}: {now.parameters:,} parameters"
    yield f"{now.placement.name}, {now.precision}, {now.optimizer}{how}"
    grid = now.grid
    if grid.size > 1:
        stage = f"; bytes of stage {grid.stage}" if grid.pipe > 1 else ""
        stages = f"{grid.pipe} stage{'s' * (grid.pipe > 1)}"
        yield f"{grid.tensor} tensor-parallel x {stages} x {now.data_ranks:,} data-parallel ranks{stage}"
    ranks = f"{now.data_ranks:,} rank{'s' * (now.data_ranks > 1)}"
    yield (
        f"{ranks} x micro-batch {now.micro_batch} x accumulation {now.accumulation}"
        f" = {now.samples:,} sample{'s' * (now.samples > 1)}{tokens}"
    )
    machine = now.machine
    measured = " (measured)" if machine.measured else ""
    nodes = f"{machine.nodes} nodes, each " if machine.nodes > 1 else ""
    gpus = f"{machine.gpus} x {amount(machine.gpu_memory / 1e9)} GB GPU, " if machine.gpus else ""
    yield f"on {machine.name}{measured}: {nodes}{gpus}{amount(machine.host_memory / 1e9)} GB host memory"


def _rows(now: Estimate) -> Iterator[tuple[str, str, str, str]]:
    for row in now.rows:
        if row.bytes:
            place = place_name(row.tier, gpu=now.machine.gpus > 0)
            yield row.category, place, size(row.bytes), COLORS[row.category][1]


def _needed(use: Use, now: Estimate) -> str:
    whose = "each GPU" if use.place == "GPU" else f"the {use.place}" + (" of a node" if now.machine.nodes > 1 else "")
    return f"{whose}: {use.words},"


def _verdict(use: Use) -> str:
    between = size(abs(use.usable - use.needed), max(use.usable, use.needed))
    return f"fits, {between} to spare" if use.fits else f"{between} too much"


def _time(now: Estimate) -> Iterator[str]:
    if now.time is not None and now.fits:
        what = "tokens" if now.sequence > 1 else "samples"
        yield f"A step takes about {seconds(now.time.total)}: {amount(now.tokens_per_second or 0)} {what} a second."
        yield f"It is limited by {now.time.limited_by}. By itself each would take:"


def _terms(now: Estimate) -> Iterator[tuple[str, float, float]]:
    """What a step waits for, in words and seconds, and as a part of the longest."""
    from wherry.plan.roofline import WORDS

    terms = now.time.terms if now.time is not None and now.fits else {}
    for name, value in sorted(terms.items(), key=lambda item: -item[1]):
        if value > 0:
            yield WORDS[name], value, value / max(terms.values())


# The page.

_STYLE = """
p { margin: 4px 0; } table { width: 100%; max-width: 760px; }
.good { color: #2c8a43; } .bad { color: #d0403a; font-weight: bold; }
.bar { display: flex; position: relative; height: 22px; margin: 6px 0 16px; background: var(--shade); }
.bar b { position: absolute; top: -5px; bottom: -5px; border-left: 3px solid; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.term { height: 13px; min-width: 1px; margin-top: 6px; background: var(--c0); }
pre { padding: 12px; background: var(--shade); }
@media (max-width: 760px) {
  .states tr { display: grid; grid-template-columns: 1fr 5rem 6rem; } .states th { border: 0; }
  pre { white-space: pre-wrap; }
  .states .dim { grid-column: 1 / -1; padding-left: 1.2rem; font-size: 13px; }
}
"""


def page(now: Estimate, said: Sequence[str], config: str = "") -> str:
    """All that the terminal says: the answer, the lines that are `said` after it, and a chosen config."""
    return observe.page(f"{now.model}: wherry plan", *_body(now, said, config), style=_STYLE)


def _color(category: str) -> str:
    """As in the picture of memory over a step."""
    return f"var(--c{STATES.index(category)})"


def _body(now: Estimate, said: Sequence[str], config: str) -> Iterator[str]:
    title, *headings = _headings(now)
    yield f"<h1>{escape(title)}</h1>"
    yield from (f"<p>{escape(line)}</p>" for line in headings)
    yield "<h2>Memory</h2>"
    for use in now.uses:
        if use.needed:
            kind = "good" if use.fits else "bad"
            yield f'<p>{escape(_needed(use, now))} <span class="{kind}">{_verdict(use)}</span></p>'
            whole = max(use.needed, use.usable)
            parts = "".join(
                f'<div title="{category}: {size(nbytes)}" style="width: {100 * nbytes / whole:.2f}%; '
                f'background: {_color(category)}"></div>'
                for category, nbytes in use.parts.items()
            )
            limit = "" if use.fits else f'<b title="usable" style="left: {100 * use.usable / whole:.2f}%"></b>'
            yield f'<div class="bar">{parts}{limit}</div>'
    yield '<table class="states"><tr><th>bytes of a rank</th><th>rest on</th><th></th><th></th></tr>'
    for category, place, nbytes, meaning in _rows(now):
        swatch = f'<span class="swatch" style="background: {_color(category)}"></span>'
        yield (
            f'<tr><td>{swatch}{category}</td><td>{place}</td><td class="number">{nbytes}</td>'
            f'<td class="dim">{meaning}</td></tr>'
        )
    yield f'</table>\n<p class="dim">{escape(kept_free(now.machine))}</p>'
    if terms := list(_terms(now)):
        yield "<h2>Time</h2>"
        yield from (f"<p>{escape(line)}</p>" for line in _time(now))
        yield "<table>"
        for name, value, part in terms:
            yield (
                f'<tr><td>{name}</td><td class="number">{seconds(value)}</td>'
                f'<td style="width: 40%"><div class="term" style="width: {100 * part:.1f}%"></div></td></tr>'
            )
        yield "</table>"
    yield from (f'<p class="dim">Note: {escape(note)}</p>' for note in now.notes)
    if said or config:
        yield "<h2>What to change</h2>" if not config else "<h2>The config</h2>"
        for flags, lines in groupby(said, key=lambda line: line.startswith("  ")):
            told = ("\n" if flags else "<br>").join(escape(line.strip()) for line in lines)
            yield f"<pre>{told}</pre>" if flags else f"<p>{told}</p>"
    if config:
        yield f"<pre>{escape(config)}</pre>"
