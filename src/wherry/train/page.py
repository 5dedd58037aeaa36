"""The page of a run, `report.html`: what its own files tell, for a browser without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from wherry.observe.memory import format_bytes
from wherry.observe.memory_page import memory_parts
from wherry.observe.page import WIDE, Chart, Point, Series, page, table

# More points than so many are a smoothed line over dots, and of dots so many are drawn.
_FEW, _DOTS = 80, 1200
# What the model said to some prompts, and when.
SAMPLES = "samples.jsonl"
_ENDINGS = {"diverged": "the loss was lost", "failed": "stopped by an error"}


def write_page(run_dir: Path) -> None:
    run, summary, config = (_read(run_dir / f"{name}.json") or {} for name in ("run", "summary", "config"))
    title = run["title"]
    ending = _ENDINGS.get(summary["ending"], summary["ending"])
    profile = config.get("wherry", {}).get("profile", {}).get("folder") or run_dir / "profile"
    memory = _read(Path(profile) / "memory-rank0.json")
    records = _records(run_dir)
    parts = [
        f"<h1>{escape(title)}</h1><p class=dim>{escape(ending)} after {summary['steps']:,} steps</p>",
        table(("", ""), _facts(run, summary)),
        "<h2>Training</h2>",
        _curve("Loss", records, {"loss": "training", "validation_loss": "validation"}, size=WIDE),
        '<div class="row">',
        _curve("Tokens a second", _timed(records, memory), {"tokens_per_second": ""}, from_zero=True),
        _curve("Learning rate", records, {"lr": ""}, from_zero=True),
        _curve("Norm of the gradients", records, {"gradient_norm": ""}, from_zero=True),
        "</div><h2>Memory of rank 0</h2>",
        *_memory(memory),
        *_samples(run_dir),
        "<h2>Config</h2>",
        f"<p class=dim>{escape(' '.join(map(str, run['command'])))}</p>",
        f"<details><summary>as it was resolved</summary><pre>{escape(json.dumps(config, indent=2))}</pre></details>",
    ]
    (run_dir / "report.html").write_text(page(title, *parts), encoding="utf-8")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _records(run_dir: Path) -> list[Mapping[str, Any]]:
    """By step, of all parts of a run that was resumed: the last to come to a step has it."""
    found: dict[int, Mapping[str, Any]] = {}
    asides = [path for path in run_dir.glob("metrics.*.jsonl") if path.suffixes[0][1:].isdigit()]
    for path in (*sorted(asides, key=lambda path: int(path.suffixes[0][1:])), run_dir / "metrics.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with suppress(ValueError):  # a line that a full disk has cut off
                record = json.loads(line)
                found[record["step"]] = record
    return [found[step] for step in sorted(found)]


def _facts(run: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds = summary["seconds"]
    facts = [
        *map(tuple, run["facts"]),
        ("placement", "; ".join(f"{state} {how}, {tier}" for state, how, tier in run["placement"])),
        ("time", f"{timedelta(seconds=round(seconds))} from {run['started'].replace('T', ' ')} on"),
        (
            "tokens",
            f"{summary['tokens']:,}" + (f", {summary['tokens_here'] / seconds:,.0f} a second" if seconds else ""),
        ),
    ]
    for name, key in (
        ("loss at first", "first_loss"),
        ("loss at last", "last_loss"),
        ("validation", "validation_loss"),
    ):
        if summary.get(key) is not None:
            facts.append((name, f"{summary[key]:.4f}"))
    versions = f"Wherry {run['wherry']}, torch {run['torch']}, Python {run['python']}"
    return [*facts, ("with", versions)]


# Curves.


def _timed(records: Sequence[Mapping[str, Any]], memory: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Those whose time is that of steps alone: no validation, no recording, and not what the first step makes once."""
    slowed = memory["step"] if memory is not None else 0
    return [each for each in records[1:] if "validation_loss" not in each and each["step"] != slowed]


def _curve(title: str, records: Sequence[Mapping[str, Any]], keys: Mapping[str, str], **how: Any) -> str:
    series: list[Series] = []
    for color, (key, name) in zip((0, 4), keys.items(), strict=False):
        points = [(float(each["step"]), float(each[key])) for each in records if each.get(key) is not None]
        points = [point for point in points if math.isfinite(point[1])]
        if not points:
            continue
        if len(points) > _FEW:
            series.append(Series("", points[:: len(points) // _DOTS + 1], color, dots=True))
        elif len(points) < 4:
            series.append(Series("", points, color, dots=True))
        series.append(Series(name, _smooth(points), color))
    return Chart(title, series, x_label="step", **how).html()


def _smooth(points: Sequence[Point]) -> list[Point]:
    """The mean of what is around each of at most 200 points."""
    if len(points) <= _FEW:
        return list(points)
    half, found = max(2, len(points) // 60), []
    for index in range(0, len(points), max(1, len(points) // 200)):
        reach = min(half, index, len(points) - 1 - index)  # as far on either side, or its ends would bend
        around = points[index - reach : index + reach + 1]
        found.append((points[index][0], sum(y for _, y in around) / len(around)))
    return found


# Samples, where a run has written some.


def _samples(run_dir: Path) -> list[str]:
    file = run_dir / SAMPLES
    if not file.exists():
        return []
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    parts = ["<h2>Samples</h2>"]
    for prompt in dict.fromkeys(each["prompt"] for each in found):
        mine = [each for each in found if each["prompt"] == prompt]
        rows = [(f"step {each['step']:,}", each["answer"]) for each in mine]
        rows += [("expected", mine[-1]["expected"])] if mine[-1].get("expected") else []
        parts += [f"<h3>{escape(prompt)}</h3>", table(("", ""), rows)]
    return parts


# Memory.


def _memory(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return ["<p class=dim>It was not recorded in this run.</p>"]
    rows = [(state, tier, format_bytes(expected), format_bytes(now)) for state, tier, expected, now in told["states"]]
    return [
        f"<p>Over step {escape(str(told['step']))}.</p>",
        *memory_parts(told),
        "<h2>Expected and actual</h2><p class=dim>What comes and goes within a step has the most that may be there as "
        "what is expected, and was looked at when the step had ended.</p>",
        table(("state", "tier", ">expected", ">at the end of the step"), rows),
    ]
