"""Tables and plots from the files in benchmarks/results: python benchmarks/report.py [--check].

Writes docs/benchmarks.md and the plots beside it. Every number there is from a file named above it; nothing is typed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, plots, summary, systems
from benchmarks.summary import case_words, is_wherry
from wherry.errors import WherryError
from wherry.observe import bench
from wherry.observe.bench import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A figure that a benchmark has beside those that all have; empty where a row has none."""

    title: str
    words: Callable[[Row], str]


def _of(key: str, words: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else words(row[key])


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"


def _seconds(value: float) -> str:
    return f"{1e3 * value:,.1f} ms" if abs(value) < 1 else f"{value:,.2f} s"


def _per_parameter(row: Row) -> str:
    value = row.get("per_parameter")
    if value is None:
        return ""
    return f"{1e9 * value:.2f} ns" if row["unit"] == "s" else f"{value:.1f} B"


def _processor(row: Row) -> str:
    """What is added of processor time."""
    if row.get("cpu_us") is None:
        return ""
    spread = row.get("cpu_spread")
    return f"{row['cpu_us']:,.0f} µs" + ("" if spread is None else f", spread {100 * spread:.0f}%")


def _states_a_second(row: Row) -> str:
    if row["case"]["measure"] == "stall" or "states_bytes" not in row:
        return ""
    return f"{row['states_bytes'] / row['value'] / 1e9:.2f} GB/s"


_TOKENS = Column("tokens/s", _of("tokens_per_s", _count))


def _losses(row: Row) -> str:
    difference = row.get("loss_difference")
    return "" if difference is None else systems.loss_words(difference, row["case"].get("dtype", "fp32"))


_LOSSES = Column("losses", _losses)
_BOUND = Column("bound by", _of("bound_by", str))
_GPU = (
    _TOKENS,
    Column("TFLOPS", _of("tflops", lambda value: f"{value:.1f}")),
    _BOUND,
    Column("device", _of("peak_device_bytes", _gigabytes)),
    Column("device by formula", _of("formula_device_bytes", _gigabytes)),
    Column("host", _of("host_bytes", _gigabytes)),
    Column("host by formula", _of("formula_host_bytes", _gigabytes)),
    Column("host B/param", _of("host_bytes_per_parameter", lambda value: f"{value:.1f}")),
    Column("by its own account", _of("own_host_bytes_per_parameter", lambda value: f"{value:.1f}")),
    Column("layers", _of("layers", str)),
    Column("limited by", _of("limited_by", str)),
)
_PLAIN = (
    "plain PyTorch on one rank with all cores, which computes, clips and updates and no more; a step is above 1 "
    "where Wherry's clipping and update, one pass where torch makes several, save more than its engine costs"
)

_BUFFERS = (
    "DeepSpeed with parameters on disk locks five buffers of 1e8 elements in the memory of each rank, its default, "
    "which are most of what it takes for a small model."
)

_EMPTY = (
    "An empty process has imported all that its system does, and made an optimizer. In files of 22 November 2026 and "
    "before it had not: torch's compiler, which its first optimizer imports, 76 MB a rank, is in the memory of all "
    "but Wherry there."
)


@dataclass(frozen=True)
class Growth:
    """A plot of how the rows of a measure grow, a line for each system."""

    name: str
    title: str
    measure: str
    # What they grow with, of a row, and how that is written.
    across: Callable[[Row], float]
    words: Callable[[float], str]


@dataclass(frozen=True)
class Section:
    """A benchmark's place in the page."""

    title: str
    meaning: str
    # What the limit is of which a row reaches a part.
    limit: str = "the measured limit"
    columns: tuple[Column, ...] = ()
    # In the place of bars, where what is measured grows with something.
    growths: tuple[Growth, ...] = ()


SECTIONS: dict[str, Section] = {
    "cpu_adam": Section(
        "Host optimizers",
        "Time of one update for each parameter. Within a family the rows do the same work; DeepSpeed's bf16 rows "
        "alone keep no master, and so move fewer bytes.",
        "an update of the same streams without arithmetic, on the same threads in the same run: it does less than any "
        "row, and one is above 1 where the machine was slower in the limit's own rounds, as the spreads tell",
        (Column("moves", _of("gbps", lambda value: f"{value:.1f} GB/s")),),
    ),
    "disk": Section(
        "Disk",
        "Bytes a second of reading, writing and both at once. Wherry goes through one pinned buffer of 64 MiB for what "
        "it reads, and one for what it writes, again and again; DeepSpeed's aio moves the whole, 1 GiB, by one pinned "
        "buffer of that size, on one thread, as more would each have a queue of that depth; fio has a buffer of a "
        "block for each of its depth. All move the same file; before 2026-11-23 DeepSpeed's aio had one of its own.",
        "fio's speed on the same file, with its buffers on small pages where no huge ones are reserved: a drive splits "
        "its blocks there, and Wherry's, which lie on huge ones, are above 1; what is buffered is above any drive",
    ),
    "overhead": Section(
        "Overhead of an engine",
        "Four layers of width 64 on one core for each rank. `over plain` is what a system adds to a step of plain "
        "PyTorch with fused AdamW: what is above the limit. Wherry updates with kernels of its own and the others with "
        "torch's, so what it adds is its engine's time less what these save, and may be below zero. On one rank it is "
        "less than a machine's unrest within seconds, as its spread tells: `processor` is the same in processor time, "
        "which others' work disturbs less, and by which the aim is counted. On several ranks waiting for each other is "
        "in the one and not in the other. At stage 3 all are told to leave nothing whole (persistence 0): by default "
        "the weights of a model this small would stay whole, and nothing would be gathered.",
        "plain PyTorch with fused AdamW on the same core",
        (
            _LOSSES,
            Column("processor", _processor),
            Column("calls of Python above plain", _of("python_calls_over_plain", _count)),
        ),
    ),
    "steps": Section(
        "Training steps",
        f"GPT-2 in fp32 on the CPU, the same batch and cores for all. {_EMPTY}",
        f"{_PLAIN}; of memory, an empty process and the states by the published formula",
        (_TOKENS, _LOSSES),
    ),
    "offload_step": Section(
        "Steps with states on host and disk",
        "The same steps with optimizer, or optimizer and parameters, further away. Rows named delayed update with "
        "gradients one step old, which no other system here does: another result, not the same work sooner. Peers "
        "are compared with the policy that Wherry chooses by itself: before_use where gradients are clipped, and else "
        "in_backward. With states on disk Wherry and DeepSpeed have their defaults: both keep up to 1e9 elements of "
        "weights in host memory, so that of a small model the optimizer's states alone are read, and DeepSpeed reads, "
        f"updates and writes up to 1e9 elements as one group, which is all of such a model. {_BUFFERS}",
        "the bound max(compute + host update, disk), each measured in the same run, as the host is the device here; "
        "of memory, an empty process and the states by the published formula",
        (_BOUND, _LOSSES),
    ),
    "forecast": Section(
        "Predicted and measured",
        "What `wherry plan` says a step takes, and what it takes.",
        f"of steps, {_PLAIN}; of memory, an empty process and the states by the published formula",
        columns=(
            Column("predicted", _of("predicted_s", _seconds)),
            Column("off", _of("off", lambda value: f"{100 * value:+.0f}%")),
            Column("limited by", _of("limited_by", str)),
        ),
    ),
    "accumulation": Section(
        "Accumulation",
        "A step of k micro-batches. Where parameters are on disk, both Wherry and DeepSpeed keep by default up to 1e9 "
        "elements of them in host memory, which is all of such a model: optimizer states alone are read. Rows named "
        "weights on disk keep no weights but those in use: of Wherry five units, its default, and with one buffer one; "
        "of DeepSpeed, which ends with its default of buffers, four matrices of every block and some more. Of Wherry "
        "the bytes are those it asks the disk for, of DeepSpeed those the system has counted, which its cache lessens: "
        "they are not compared.",
        "plain PyTorch's speed with everything in memory, which clips and updates too; of bytes with one buffer, "
        "weights twice and states once; with more buffers weights stay in memory, as many as there is room for, and no "
        "limit is told, nor of the bytes that the system counts for DeepSpeed",
        (_LOSSES,),
    ),
    "memory": Section(
        "Memory",
        f"Peak above an empty process, all ranks together. {_EMPTY} {_BUFFERS}",
        "the published formula for the states",
        (
            Column("formula", _of("formula_bytes", _megabytes)),
            Column("a parameter", _of("bytes_per_parameter", lambda value: f"{value:.1f} B")),
            _LOSSES,
        ),
    ),
    "construction": Section(
        "Building and loading",
        "Until an engine could step, and until it has made a step of a few tokens. `build within Init` is a model that "
        "is built in shards, each of two ranks its own, without an optimizer: within Wherry's Init or DeepSpeed's, or "
        "from the meta device. Of these `wherry-init` alone has the values that plain PyTorch has: DeepSpeed's Init "
        "leaves out what a model does with its children's weights, as the meta device does, where FSDP2's ranks draw "
        "numbers of their own besides, for their own shards alone, and Wherry's those of one process. First losses of "
        "`wherry-meta` and `fsdp2-meta` differ from the others', as from the meta device only modules' own "
        "`reset_parameters` run; that of `deepspeed-init` does too. Where a file has the column `first use`, each has "
        "built and stepped a model of next to nothing before, and this is what that took, with all imports; without "
        "it, what a system loads at first use is in its figures: torch's first optimizer imports 800 modules, for "
        "more than a second and 76 MB, and only Wherry does without. Each is told to leave nothing whole (persistence "
        "0), as in a model that needs stage 3; by default DeepSpeed leaves whole what has 1e5 elements and less.",
        "of time, the model alone without an engine; of memory, the states that stay, and of a model in shards these "
        "and one module. Without `first use` plain PyTorch's time has torch's imports in it, which Wherry does "
        "without: hence its shares above 1; plain PyTorch maps a file and reads it while it computes, so its load "
        "holds less",
        (Column("first use", _of("first_use_s", _seconds)),),
    ),
    "tiling": Section(
        "A layer beyond the budget",
        "One linear layer in tiles, its states on disk. A step and its peak of memory have no limit of their own: "
        "nothing else here trains such a layer.",
        "the parameters that may be live",
        (Column("tiles", _of("tiles", str)),),
    ),
    "checkpoint": Section(
        "Checkpoints",
        "Saving and loading. `save` lasts until all is on the disk; `stall` is how long training stood still for it. "
        "torch.save and DeepSpeed return while their files are in the system's cache; Wherry's save and DCP's return "
        "when they are on the disk, or, behind training, at once.",
        "the same bytes written to a file of each rank and read from it, in the same run; a stall is above 1 where "
        "training goes on before they are on the disk",
        (Column("states", _states_a_second),),
    ),
    "activations": Section(
        "Activations",
        "What activations take, and what it costs to have less of them.",
        "the step that keeps them all, on as many ranks; of what an allocator holds, what is used of it at once",
        (
            Column("activations", _of("peak_bytes", _megabytes)),
            Column("held", _of("reserved_bytes", _megabytes)),
            Column("never used", _of("excess_bytes", _megabytes)),
        ),
    ),
    "scaling": Section(
        "Scaling",
        "How cost grows with the model, and with the number of ranks, of which one is run dry.",
        f"{_PLAIN}; of memory, the states by the published formula, and an empty process where there is one; of "
        "collectives, the bytes that the stage must exchange. A dry peak is above 1 where Wherry holds 14 bytes of a "
        "parameter, as its bf16 weight is half of its master, and the formula has 16",
        (Column("a parameter", _per_parameter),),
        (
            Growth("size", "a step by parameters", "step", lambda row: row["parameters"], lambda n: f"{n / 1e6:,.0f}M"),
            Growth("ranks", "peak of a rank by ranks", "peak of a rank", lambda row: row["case"]["ranks"], _count),
        ),
    ),
    "imports": Section(
        "Imports and size",
        "Seconds to import above torch, to the command's help, and bytes on disk. Wherry imports its engine at first "
        "use, and it is this import that is compared. `size` is what pip installs; DeepSpeed's host optimizer and aio, "
        "which it compiles at first use, are counted in `size, compiled`.",
        "a Python that does nothing",
        (Column("modules", _of("modules", _count)),),
    ),
    "gpu": Section(
        "On a GPU",
        "GPT-2 in bf16 with activations recomputed. Sizes are those of the published table of ZeRO-Offload. `compute` "
        "is forward and backward alone, with weights on the device: no step can be sooner, wherever states rest. "
        "`host` is of all systems what their process holds or the machine has lost, whichever is more; what Wherry's "
        "engine says of its states is beside it.",
        "the bound max(compute, down, up, host update, disk), each measured in the same run",
        _GPU,
    ),
    "gpu_offload": Section(
        "GPT-2 10B within 32 GB",
        "",
        "the bound of this machine, measured in the same run",
        (*_GPU, Column("copies beside kernels", _of("trace", lambda seen: _part(seen.get("hidden"))))),
    ),
}
# Where a measure is asked for by another name than that of its files.
_COMMANDS = {"cpu_adam": "adam"}
_HEAD = """# Benchmarks

Measured, never typed: `wherry bench report` makes this page from the files in
[benchmarks/results](../benchmarks/results), and a test compares the two. `wherry bench` names the measures.

Every value is the median of repeats that were interleaved with those of the other systems; the spread is the range of
the middle half, as a part of the median. Of what was measured once the repeats are the steps of that measure, which
follow each other; *once* stands where it had no steps. *Wherry is* says how many times as good Wherry is as that system
in the same case and place: above 1, Wherry is better; ≥ where rounds of Wherry's are at zero and below, and it is told
by their upper quartile, or not at all. *of limit* is the part that is reached of what bounds it, as far as that is
known: a limit is measured or reckoned for the plain way to do the same, and each section says where a row may pass it.
It is empty where nothing is known to bound a row: an import, a size on disk, the seconds of a dry run, what a system
adds to the limit, a forecast's steps, the other ways to a disk and an allocator's fragments in files from before these
had one, a tiled layer's step and peak, the seconds of a model built in shards, bytes read with several buffers or
counted by the system, a machine's own rates, and the limit itself.
"""


def _part(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Every file, in the page's order."""
    order = list(SECTIONS)
    found = []
    for path in sorted(folder.glob("*.json")):
        result = bench.read(path)
        if result["benchmark"] not in order:
            raise WherryError(
                f"{path}: the page has no place for the benchmark {result['benchmark']!r}; expected one of "
                f"{', '.join(order)}; take the file out of its folder, or give it a section in benchmarks/report.py"
            )
        found.append(result | {"file": path.name})
    return sorted(found, key=lambda result: (order.index(result["benchmark"]), result["file"]))


def page(results: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
    """The text, and the plots by name."""
    titles = {name: section.title for name, section in SECTIONS.items()}
    parts, drawn = [_HEAD, summary.text(results, titles)], {}
    there = {result["benchmark"] for result in results}
    absent = {title: _COMMANDS.get(name, name) for name, title in titles.items() if name not in there}
    if absent:
        words = ", ".join(f"{title} (`wherry bench {command}`)" for title, command in absent.items())
        parts.append(f"No file holds these yet: {words}.\n")
    before = None
    for result in results:
        section = SECTIONS[result["benchmark"]]
        if result["benchmark"] != before:
            parts.append(f"## {section.title}\n\n{section.meaning}".rstrip() + "\n")
            before = result["benchmark"]
        parts.append(_conditions(result, section))
        name = Path(result["file"]).stem
        for file, plot in _plots(name, result, section.growths).items():
            drawn[file] = plot
            parts.append(f"![{section.title}](plots/{file})\n")
        parts.append(_folded(_table(result["rows"], section.columns), len(result["rows"])))
    return "\n".join(parts), drawn


def _conditions(result: Mapping[str, Any], section: Section) -> str:
    machine, versions, load = result["machine"], result["versions"], result["load"]
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version != "not installed")
    lines = [
        f"[{result['file']}](../benchmarks/results/{result['file']}), {result['date'][:10]}: "
        f"{summary.cpu_words(machine)}, {machine['cores']} cores, {memory}{gpu}{named and f'; {named}'}."
    ]
    if load.get("idle") is False:
        lines.append("**Others were at work on the machine: the figures are noisy.**")
    elif load.get("idle") is None:
        lines.append("Whether others were at work on the machine was not recorded.")
    if result.get("seconds"):
        minutes = max(1, round(result["seconds"] / 60))
        lines.append(f"It took {minutes} minute{'s' * (minutes > 1)}.")
    if not result["complete"]:
        lines.append("**The run was ended before it was complete.**")
    if result["quick"]:
        lines.append("A quick run.")
    if "note" in result["settings"]:
        lines.append(f"{result['settings']['note'].capitalize()}.")
    if any(row.get("of_limit") is not None for row in result["rows"]):
        lines.append(f"The limit: {section.limit}.")
    return " ".join(lines) + "\n"


def _folded(table: str, count: int) -> str:
    """Behind a line that opens it: the page is read by its beginning and its plots."""
    return f"<details><summary>{count} rows</summary>\n\n{table}\n</details>\n"


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    own = [column for column in columns if any(column.words(row) for row in rows if row["reason"] is None)]
    heads = ["case", "system", "value", "spread", "of limit", "Wherry is", *(column.title for column in own)]
    lines = [_line(heads), "|---|---|" + "--:|" * (len(heads) - 2)]
    reasons: dict[tuple[str, str], None] = {}
    for case, same in _by_case(rows).items():
        for index, row in enumerate(same):
            words = ["" if index else case, row["system"]]
            if row["reason"] is not None:
                reasons[systems.without_window(row["system"]), row["reason"]] = None
                lines.append(_line([*words, "-", *[""] * (len(heads) - 3)]))
                continue
            limit = "" if row.get("of_limit") is None else f"{row['of_limit']:.2f}"
            words += [quantity(row), spread(row), limit, wherry_is(row, rows), *(column.words(row) for column in own)]
            lines.append(_line(words))
    text = "\n".join(lines) + "\n"
    for system, reason in reasons:
        text += f"\n- `{system}` could not run: {reason}"
    return text + ("\n" if reasons else "")


def _line(words: Iterable[str]) -> str:
    return "| " + " | ".join(words) + " |"


def _by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of a case together, cases in the order in which they were measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(case_words(row["case"]), []).append(row)
    return found


def spread(row: Row) -> str:
    if row["spread"] is None:  # of a form of the file that had none
        return ""
    return f"{100 * row['spread']:.0f}%" if row["rounds"] > 1 else "once"


def quantity(row: Row) -> str:
    """A value with its unit, in digits that a reader can compare."""
    value, unit = row["value"], row["unit"]
    if unit == "s":
        return _seconds(value)
    if unit == "us":
        return f"{value:,.0f} µs"
    if unit in ("B", "bytes"):
        return f"{value / 1e6:,.1f} MB" if value < 1e10 else f"{value / 1e9:,.1f} GB"
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "flop/s":
        return f"{value / 1e12:.2f} TFLOPS"
    return f"{value:#.3g} {unit}"


def wherry_is(row: Row, rows: Sequence[Row]) -> str:
    """For a peer's row: how many times as good Wherry is at the same work."""
    ratio = summary.times(row, rows)
    return "" if ratio is None else summary.times_words(ratio)


def _plots(name: str, result: Mapping[str, Any], growths: Sequence[Growth]) -> dict[str, str]:
    """The plots of a file by their own files' names."""
    curves = {f"{name}-{growth.name}.svg": _curves(result["rows"], growth) for growth in growths}
    found = curves if any(curves.values()) else {f"{name}.svg": _plot(result)}
    return {file: plot for file, plot in found.items() if plot is not None}


def _curves(rows: Sequence[Row], growth: Growth) -> str | None:
    """None where nothing was measured at two places at least."""
    points: dict[str, list[tuple[float, float]]] = {}
    shown = [row for row in rows if row["case"].get("measure") == growth.measure and row["reason"] is None]
    for row in sorted(shown, key=growth.across):
        points.setdefault(row["system"], []).append((growth.across(row), row["value"]))
    drawn = [plots.Curve(system, path, is_wherry(system)) for system, path in points.items() if len(path) > 1]
    if not drawn:
        return None
    unit = shown[0]["unit"]
    return plots.curves(
        f"{growth.title} (less is better)", drawn, growth.words, lambda value: quantity({"value": value, "unit": unit})
    )


def _plot(result: Mapping[str, Any]) -> str | None:
    """Bars of the case with most systems that ran; of several the last one, a time rather than bytes."""
    cases = _by_case(row for row in result["rows"] if row["reason"] is None and row["value"] > 0)
    if not cases:
        return None
    most = max(len(rows) for rows in cases.values())
    if most < 2:
        return None
    full = [name for name, rows in cases.items() if len(rows) == most]
    case = ([name for name in full if cases[name][0]["unit"] != "B"] or full)[-1]
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
    alone(main)
