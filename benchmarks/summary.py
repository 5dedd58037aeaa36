"""The first minute of the page: every aim beside what was reached, and where Wherry is behind, from the files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Result = Mapping[str, Any]

# What a peer without a placement in its name stands beside.
_BESIDE = {"plain": "0", "ddp": "0", "fsdp2": "3", "fsdp2-cpu": "3-cpu"}
_BESIDE |= {f"deepspeed-3-{mode}": "3-cpu" for mode in ("super", "reflow")}
# Other work than the peers': gradients one step old, and the system's cache in the place of the disk.
_OTHER_WORK = ("delayed", "buffered")
# An import that puts off its work is not one beside those that do it.
_WHOLE_IMPORT = "wherry, engine"


def is_wherry(system: str) -> bool:
    return "wherry" in system.lower()


def is_peer(system: str) -> bool:
    """DeepSpeed or FSDP2; dcp keeps the states of FSDP2."""
    return system.lower().startswith(("deepspeed", "fsdp2", "dcp")) or "DeepSpeed" in system


def same_work(row: Row) -> bool:
    """DeepSpeed's bf16 host optimizer keeps no master; and what it reads is counted behind the system's cache."""
    return "DeepSpeedCPUAdam bf16" not in row["system"] and row["case"].get("measure") != "read"


def times(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times as good as this peer Wherry is at the same: with the same placement, or at its best.

    Infinity where Wherry has added nothing that could be measured, and the peer has.
    """
    if is_wherry(row["system"]) or row["reason"] is not None or not same_work(row):
        return None
    found = [_ratio(ours, row) for ours in _ours_beside(row, rows)]
    ratios = [ratio for ratio in found if ratio is not None]
    return max(ratios, default=None)


def _ours_beside(row: Row, rows: Sequence[Row]) -> list[Row]:
    ours = [
        other
        for other in rows
        if other["case"] == row["case"]
        and is_wherry(other["system"])
        and other["reason"] is None
        and not other["system"].endswith(_OTHER_WORK)
    ]
    whole = [other for other in ours if other["system"] == _WHOLE_IMPORT]
    first = row["system"].split(" ")[0]
    beside = _BESIDE.get(first, first.partition("-")[2])
    same = [other for other in ours if beside and other["system"].split(" ")[0].partition("-")[2] == beside]
    named = [other for other in same if other["system"].partition("-")[2] == row["system"].partition("-")[2]]
    return whole or named or same or [other for other in ours if other["system"] == "wherry"] or ours


def _ratio(ours: Row, peer: Row) -> float | None:
    if not ours["more_is_better"] and ours["value"] <= 0 < peer["value"]:
        return math.inf
    found: float | None = ours["ratio"].get(peer["system"])
    return found


def times_words(ratio: float, least: float = 1.0) -> str:
    return "∞" if math.isinf(ratio) else f"{_digits(ratio, least)}×"


def _digits(figure: float, least: float) -> str:
    """In as many digits as tell on which side of `least` it is."""
    return next(
        words
        for words in (f"{figure:.{digits}f}" for digits in range(2, 20))
        if (float(words) < least) is (figure < least)
    )


@dataclass(frozen=True)
class Aim:
    """A figure to reach in every row of a benchmark for which it is meant."""

    words: str
    benchmark: str
    least: float
    # A row's figure, or None for a row that the aim is not about.
    figure: Callable[[Row, Sequence[Row]], float | None]
    unit: str = "×"

    def shown(self, figure: float) -> str:
        return times_words(figure, self.least) if self.unit else _digits(figure, self.least)


def _beside_deepspeed(**wanted: Any) -> Callable[[Row, Sequence[Row]], float | None]:
    """The ratio to DeepSpeed in rows of these cases; `system` is what its name must hold."""
    within = wanted.pop("system", "")

    def figure(row: Row, rows: Sequence[Row]) -> float | None:
        named = "deepspeed" in row["system"].lower() and within in row["system"]
        return times(row, rows) if named and wanted.items() <= row["case"].items() else None

    return figure


def _of_bound(row: Row, rows: Sequence[Row]) -> float | None:
    """Of offloaded steps of 8k tokens and more."""
    offloaded = is_wherry(row["system"]) and "-cpu" in row["system"] and not row["system"].endswith(_OTHER_WORK)
    if not offloaded or row["case"].get("tokens", 0) < 8192 or row["reason"] is not None:
        return None
    found: float | None = row["of_limit"]
    return found


AIMS = (
    Aim("fp32 host optimizer, beside DeepSpeed's", "cpu_adam", 1.1, _beside_deepspeed(family="fp32")),
    Aim("whole bf16 host update, beside DeepSpeed's", "cpu_adam", 1.7, _beside_deepspeed(family="host update")),
    Aim(
        "step with optimizer and parameters on disk, beside DeepSpeed's",
        "offload_step",
        2.0,
        _beside_deepspeed(measure="step", system="deepspeed-3-nvme"),
    ),
    Aim(
        "eight micro-batches with parameters on disk, beside DeepSpeed's",
        "accumulation",
        2.0,
        _beside_deepspeed(measure="step", window=8),
    ),
    Aim("overhead of DeepSpeed's engine, beside ours", "overhead", 2.0, _beside_deepspeed(measure="over plain")),
    Aim("part of the bound of offloaded steps of 8k tokens and more on a GPU", "gpu", 0.85, _of_bound, ""),
)


def latest(results: Sequence[Result]) -> list[Result]:
    """Of every benchmark and part of it, the file that was measured last."""
    found: dict[tuple[str, str], Result] = {}
    for result in sorted(results, key=lambda result: str(result["date"])):
        found[result["benchmark"], result.get("part", "")] = result
    return [result for result in results if any(result is kept for kept in found.values())]


_MEANING = """Figures are those of the latest file of every measure, whose tables are below. *noisy*: others were at
work on the machine, or it is not known that they were not."""


def text(results: Sequence[Result], titles: Mapping[str, str]) -> str:
    """The tables of aims and of rows ahead, and the rows behind."""
    newest = latest(results)
    parts = ["## In a minute", _MEANING, _aims(newest)]
    parts.append(_ahead(newest, titles))
    return "\n\n".join(parts) + "\n"


def _aims(results: Sequence[Result]) -> str:
    lines = ["| aim | at least | reached | rows that reach it | file |", "|---|--:|--:|--:|---|"]
    for aim in AIMS:
        least = f"{aim.least:g}{aim.unit}"
        files = [result for result in results if result["benchmark"] == aim.benchmark]
        found = [f for result in files for row in result["rows"] if (f := aim.figure(row, result["rows"])) is not None]
        if not found:
            lines.append(f"| {aim.words} | {least} | not measured | | |")
            continue
        low, high = aim.shown(min(found)), aim.shown(max(found))
        reached = low if low == high else f"{low} to {high}"
        count = sum(figure >= aim.least for figure in found)
        named = ", ".join(_link(result) for result in files)
        lines.append(f"| {aim.words} | {least} | {reached} | {count} of {len(found)} | {named} |")
    return "\n".join(lines)


def _ahead(results: Sequence[Result], titles: Mapping[str, str]) -> str:
    lines = ["| beside DeepSpeed and FSDP2 | rows | Wherry is ahead in | median | file |", "|---|--:|--:|--:|---|"]
    behind: list[str] = []
    absent: dict[str, None] = {}
    for result in results:
        found = list(_comparisons(result))
        absent |= dict.fromkeys(
            f"`{row['system']}`: {row['reason']}"
            for row in result["rows"]
            if row["reason"] is not None and is_peer(row["system"])
        )
        if not found:
            continue
        ratios = sorted(ratio for _, ratio in found)
        count = sum(ratio >= 1 for ratio in ratios)
        title = titles[result["benchmark"]]
        middle = times_words(ratios[len(ratios) // 2])
        lines.append(f"| {title} | {len(ratios)} | {count} | {middle} | {_link(result)} |")
        behind += _behind(title, found)
    shown = ["\n".join(lines)]
    shown.append("Behind in:\n\n" + "\n".join(behind) if behind else "Behind in none of them.")
    if absent:
        shown.append("Rows that peers do not have:\n\n" + "\n".join(f"- {words}" for words in absent))
    return "\n\n".join(shown)


def _comparisons(result: Result) -> Iterator[tuple[Row, float]]:
    for row in result["rows"]:
        ratio = times(row, result["rows"]) if is_peer(row["system"]) else None
        if ratio is not None:
            yield row, ratio


def _behind(title: str, found: Sequence[tuple[Row, float]]) -> list[str]:
    """A line for each peer, with the cases in which it is better, and the widest spread of its own there."""
    cases: dict[str, list[str]] = {}
    for row, ratio in found:
        if ratio < 1:
            spread = f", spread {100 * row['spread']:.0f}%" if row["rounds"] > 1 and row["spread"] else ""
            cases.setdefault(row["system"], []).append(f"{case_words(row['case'])} ({times_words(ratio)}{spread})")
    return [f"- {title}, `{system}`: {'; '.join(words)}" for system, words in cases.items()]


def _link(result: Result) -> str:
    noisy = "" if result["load"].get("idle") else ", noisy"
    return f"[{result['file'].removesuffix('.json')}](../benchmarks/results/{result['file']}){noisy}"


def case_words(case: Mapping[str, Any]) -> str:
    return ", ".join(_word(key, value) for key, value in case.items() if value not in (None, ""))


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1e5:
        return f"{key} {value:.0e}" if key == "numel" else f"{key} {value:,.0f}"
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
