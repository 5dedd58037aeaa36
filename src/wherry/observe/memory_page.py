"""The picture of memory over a step, as `timeline.py` has recorded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from wherry.observe.memory import format_bytes
from wherry.observe.page import WIDE, Chart, bytes_shown, page, stacked, table
from wherry.observe.timeline import STATES

_MEANT = {"gathered": "gathered weights"}


def memory_page(told: Mapping[str, Any]) -> str:
    title = f"Memory over step {told['step']}, rank {told['rank']}"
    return page(title, f"<h1>{escape(title)}</h1>", *memory_parts(told))


def memory_parts(told: Mapping[str, Any]) -> list[str]:
    """What is shown of it on any page: a chart of each memory, and a table of the highest."""
    tiers = list(dict.fromkeys(tier for _, tier in told["series"]))
    charts = [chart.html() for tier in tiers if tier != "disk" and (chart := memory_chart(told, tier)) is not None]
    intro = (
        "<p class=dim>Where the pointer is, the unit at work is named. Gradients are shown with the buffers that they "
        "are reduced in. Times are those of a step that is slowed by being recorded.</p>"
    )
    return [intro, *charts, peak_table(told)]


def memory_chart(told: Mapping[str, Any], tier: str) -> Chart | None:
    """Stacked areas of one tier's states."""
    columns = [i for i, (_, other) in enumerate(told["series"]) if other == tier]
    samples = told["samples"]
    names = [(_name(told["series"][i][0]), STATES.index(told["series"][i][0])) for i in columns]
    rows = [(seconds, [found[i] for i in columns]) for seconds, _, _, found in samples]
    if not rows:
        return None
    hovers, marks = [], []
    for (phase, unit), run in groupby(enumerate(samples), key=lambda numbered: (numbered[1][1], numbered[1][2])):
        places = [index for index, _ in run]
        begin, end = samples[places[0]][0], samples[min(places[-1] + 1, len(samples) - 1)][0]
        most = max((rows[index][1] for index in places), key=sum)
        parts = [f"{name} {format_bytes(nbytes)}" for (name, _), nbytes in zip(names, most, strict=True) if nbytes]
        hovers.append((begin, end, "\n".join([f"{phase} {unit}: {format_bytes(sum(most))}", *reversed(parts)])))
        if unit not in ("", "root"):
            marks.append(((begin + end) / 2, unit))
    return Chart(
        f"Memory of the {tier}{', which is the host' * (told['device'] == 'cpu')}",
        stacked(names, rows),
        x_label="seconds",
        show=bytes_shown,
        base=2,
        from_zero=True,
        bands=[(begin, end, phase) for phase, begin, end in told["phases"]],
        marks=marks,
        hovers=hovers,
        height=300,
        size=WIDE,
    )


def peak_table(told: Mapping[str, Any]) -> str:
    """On each tier, what was there when it was fullest."""
    rows: list[Sequence[str]] = []
    for tier, peak in told["peaks"].items():
        found = zip([state for state, other in told["series"] if other == tier], peak["bytes"], strict=True)
        where = f"{peak['phase']} {peak['unit']}".strip() if tier != "disk" else ""
        rows.append((tier, "at its highest" + f", {where}" * bool(where), format_bytes(sum(peak["bytes"]))))
        rows += [("", _name(state), format_bytes(nbytes)) for state, nbytes in reversed(list(found)) if nbytes]
    return table(("tier", "", ">bytes"), rows)


def _name(state: str) -> str:
    return _MEANT.get(state, state)
