"""Tables and plots from the files in benchmarks/results: python benchmarks/report.py [--check].

Writes docs/benchmarks.md and the plots beside it. Every number there is from a file named above it; nothing is typed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import plots
from wherry.observe.bench import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A benchmark's place in the page."""

    title: str
    meaning: str
    # What the limit is of which a row reaches a part.
    limit: str = "the measured limit"


SECTIONS: dict[str, Section] = {
    "cpu_adam": Section(
        "Host optimizers",
        "Time of one update for each parameter. Within a family the rows do the same work; DeepSpeed's bf16 row "
        "alone keeps no master, and so moves fewer bytes.",
        "an update of the same streams without arithmetic, on the same threads in the same run",
    ),
    "disk": Section("Disk", "Bytes a second of reading, writing and both at once.", "fio's speed on the same file"),
    "overhead": Section(
        "Overhead of an engine",
        "Four layers of width 64 on one core for each rank. `over plain` is what a system adds to a step of plain "
        "PyTorch with fused AdamW.",
    ),
    "steps": Section("Training steps", "GPT-2 in fp32 on the CPU, the same batch and cores for all."),
    "offload_step": Section(
        "Steps with states on host and disk",
        "The same steps with optimizer, or optimizer and parameters, further away. Rows named delayed update with "
        "gradients one step old, which no other system here does: another result, not the same work sooner.",
        "the bound max(compute, down, up, host update, disk), each measured in the same run",
    ),
    "forecast": Section("Predicted and measured", "What `wherry plan` says a step takes, and what it takes."),
    "accumulation": Section(
        "Accumulation", "A step of k micro-batches.", "plain PyTorch's speed with everything in memory"
    ),
    "memory": Section(
        "Memory", "Peak above an empty process, all ranks together.", "the published formula for the states"
    ),
    "construction": Section("Building and loading", "Until an engine could step.", "the states that stay"),
    "tiling": Section(
        "A layer beyond the budget", "One linear layer in tiles, its states on disk.", "the parameters that may be live"
    ),
    "checkpoint": Section("Checkpoints", "Saving and loading."),
    "activations": Section("Activations", "What activations take, and what it costs to have less of them."),
    "scaling": Section("Scaling", "How cost grows with the model, and with the number of ranks."),
    "imports": Section("Imports and size", "Seconds to import above torch, to the command's help, and bytes on disk."),
    "gpu": Section(
        "On a GPU",
        "GPT-2 in bf16 with activations recomputed. Sizes are those of the published table of ZeRO-Offload.",
        "the bound max(compute, down, up, host update, disk), each measured in the same run",
    ),
    "gpu_offload": Section("GPT-2 10B within 32 GB", "", "the bound of this machine, measured in the same run"),
}
_HEAD = """# Benchmarks

Measured, never typed: `wherry bench report` makes this page from the files in
[benchmarks/results](../benchmarks/results), and a test compares the two. `wherry bench` names the measures.

Every value is the median of repeats that were interleaved with those of the other systems; the spread is the range of
the middle half, as a part of the median. *Wherry is* says how many times as good Wherry is as that system in the same
case: above 1, Wherry is better. *of limit* is the part that is reached of what bounds it.
"""


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Every finished file, in the page's order."""
    found = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if "benchmark" not in result or "rows" not in result:
            raise ValueError(f"{path.name}: not the file of a benchmark; expected benchmark and rows")
        found.append(result | {"file": path.name})
    order = list(SECTIONS)
    known = [result for result in found if result["benchmark"] in order]
    return sorted(known, key=lambda result: (order.index(result["benchmark"]), result["file"]))


def page(results: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
    """The text, and the plots by name."""
    parts, drawn = [_HEAD], {}
    before = None
    for result in results:
        section = SECTIONS[result["benchmark"]]
        if result["benchmark"] != before:
            parts.append(f"## {section.title}\n\n{section.meaning}".rstrip() + "\n")
            before = result["benchmark"]
        parts.append(_conditions(result, section))
        name = Path(result["file"]).stem
        plot = _plot(result)
        if plot is not None:
            drawn[f"{name}.svg"] = plot
            parts.append(f"![{section.title}](plots/{name}.svg)\n")
        parts.append(_table(result["rows"]))
    return "\n".join(parts), drawn


def _conditions(result: Mapping[str, Any], section: Section) -> str:
    machine, versions, load = result["machine"], result["versions"], result["load"]
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version != "not installed")
    lines = [
        f"[{result['file']}](../benchmarks/results/{result['file']}), {result['date'][:10]}: {machine['cpu']}, "
        f"{machine['cores']} cores, {memory}{gpu}; {named}."
    ]
    if load.get("idle") is False:
        lines.append("**Others were at work on the machine: the figures are noisy.**")
    elif load.get("idle") is None:
        lines.append("Whether others were at work on the machine was not recorded.")
    if not result["complete"]:
        lines.append("**The run was ended before it was complete.**")
    if result["quick"]:
        lines.append("A quick run.")
    if "note" in result["settings"]:
        lines.append(f"{result['settings']['note'].capitalize()}.")
    if any(row.get("of_limit") is not None for row in result["rows"]):
        lines.append(f"The limit: {section.limit}.")
    return " ".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> str:
    lines = ["| case | system | value | spread | of limit | Wherry is |", "|---|---|--:|--:|--:|--:|"]
    reasons = []
    before = None
    for row in rows:
        case = case_words(row["case"])
        shown = case if case != before else ""
        before = case
        if row["reason"] is not None:
            lines.append(f"| {shown} | {row['system']} | - | | | |")
            reasons.append((row["system"], row["reason"]))
            continue
        spread = f"{100 * row['spread']:.0f}%" if row["rounds"] > 1 and row["spread"] is not None else ""
        limit = "" if row.get("of_limit") is None else f"{row['of_limit']:.2f}"
        lines.append(f"| {shown} | {row['system']} | {quantity(row)} | {spread} | {limit} | {wherry_is(row, rows)} |")
    text = "\n".join(lines) + "\n"
    for system, reason in dict.fromkeys(reasons):
        text += f"\n- `{system}` could not run: {reason}"
    return text + ("\n" if reasons else "")


def case_words(case: Mapping[str, Any]) -> str:
    return ", ".join(_word(key, value) for key, value in case.items() if value not in (None, ""))


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1e5:
        return f"{key} {value:.0e}" if key == "numel" else f"{key} {value:,.0f}"
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"


def quantity(row: Row) -> str:
    """A value with its unit, in digits that a reader can compare."""
    value, unit = row["value"], row["unit"]
    if unit == "s":
        return f"{1e3 * value:,.1f} ms" if abs(value) < 1 else f"{value:,.2f} s"
    if unit == "us":
        return f"{value:,.0f} µs"
    if unit == "B":
        return f"{value / 1e6:,.1f} MB" if value < 1e10 else f"{value / 1e9:,.1f} GB"
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "flop/s":
        return f"{value / 1e12:.2f} TFLOPS"
    return f"{value:#.3g} {unit}"


def wherry_is(row: Row, rows: Iterable[Row]) -> str:
    """For a peer's row: the ratio of the Wherry row that does the same, or of the best one."""
    if is_wherry(row["system"]) or row["ratio"] is None:
        return ""
    ours = {
        other["system"]: other["ratio"].get(row["system"])
        for other in rows
        if other["case"] == row["case"] and is_wherry(other["system"]) and other["reason"] is None
    }
    ours = {name: ratio for name, ratio in ours.items() if ratio is not None}
    if not ours:
        return ""
    suffix = row["system"].partition("-")[2]
    same = [ratio for name, ratio in ours.items() if suffix and name.partition("-")[2].split(" ")[0] == suffix]
    return f"{max(same or ours.values()):.2f}×"


def is_wherry(system: str) -> bool:
    return "wherry" in system.lower()


def _plot(result: Mapping[str, Any]) -> str | None:
    """Bars of the case with most systems that ran, the last of them where several have as many."""
    cases: dict[str, list[Row]] = {}
    for row in result["rows"]:
        if row["reason"] is None and row["value"] is not None and row["value"] > 0:
            cases.setdefault(case_words(row["case"]), []).append(row)
    if not cases:
        return None
    most = max(len(rows) for rows in cases.values())
    if most < 2:
        return None
    case = [name for name, rows in cases.items() if len(rows) == most][-1]
    rows = cases[case]
    better = "more" if rows[0]["more_is_better"] else "less"
    bars = [plots.Bar(row["system"], row["value"], quantity(row), is_wherry(row["system"])) for row in rows]
    return plots.bars(f"{case} ({better} is better)", bars)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="wherry bench report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not that of the files")
    options = parser.parse_args(argv)
    text, drawn = page(load())
    wanted = {PAGE: text} | {PLOTS / name: plot for name, plot in drawn.items()}
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
    extra = [path for path in PLOTS.glob("*.svg") if path.name not in drawn]
    if options.check:
        for path in stale + extra:
            print(f"{path.relative_to(ROOT)} is not what benchmarks/results says; run `wherry bench report`")
        return 1 if stale or extra else 0
    PLOTS.mkdir(parents=True, exist_ok=True)
    for path in extra:
        path.unlink()
    for path, content in wanted.items():
        path.write_text(content, encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}, {len(drawn)} plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
