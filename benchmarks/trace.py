"""What a profiler's trace says about overlap: how much of the copying ran while the GPU computed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Span = tuple[float, float]


def overlap(path: Path) -> dict[str, Any]:
    """Seconds of kernels and of copies by direction, each as a union, and of copies beside kernels.

    `hidden` is the part of the copying that kernels ran beside; None where nothing was copied.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        events = json.load(file)["traceEvents"]
    spans: dict[str, list[Span]] = {"kernel": [], "up": [], "down": []}
    for event in events:
        if event.get("ph") != "X":
            continue
        kind = _kind(event.get("cat", ""), event.get("name", ""))
        if kind is not None:
            spans[kind].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    merged = {kind: union(found) for kind, found in spans.items()}
    copies = union(merged["up"] + merged["down"])
    beside = length(both(copies, merged["kernel"]))
    found = {f"{kind}_s": length(parts) / 1e6 for kind, parts in merged.items()}
    hidden = beside / length(copies) if copies else None
    return found | {"copies_beside_kernels_s": beside / 1e6, "hidden": hidden}


def _kind(category: str, name: str) -> str | None:
    if category == "kernel":
        return "kernel"
    if category == "gpu_memcpy":
        return "up" if "HtoD" in name else "down" if "DtoH" in name else None
    return None


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time without counting any of it twice.

    >>> union([(3, 5), (0, 2), (1, 3)])
    [(0, 5)]
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def both(one: list[Span], other: list[Span]) -> list[Span]:
    """The time that is in both; each is a union."""
    found, j = [], 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            found.append((max(begin, other[k][0]), min(end, other[k][1])))
            k += 1
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
