"""The first minute of the page: every aim beside what was reached, and where Wherry is behind, from the files alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import systems
from wherry.observe import bench

Row = Mapping[str, Any]
Result = Mapping[str, Any]

# What a peer without a placement in its name stands beside.
_BESIDE = {"plain": "0", "ddp": "0", **systems.FSDP2}
# On one device their weights are whole there.
_BESIDE |= {f"deepspeed-3-{mode}": "2-cpu" for mode in ("super", "reflow")}
# In other pieces than by default, with what is read and written beside the updates.
_BESIDE["deepspeed-3-nvme-groups"] = "3-nvme"
# Other work than the peers': gradients one step old, and the system's cache in the place of the disk.
_OTHER_WORK = ("delayed", "buffered")
# An import that puts off its work is not one beside those that do it.
_WHOLE_IMPORT = "wherry, engine"
# Why Wherry is behind where no noise and no limit tells: by benchmark, measure and peer.
_CAUSES = {
    ("checkpoint", "stall", "deepspeed"): "it returns while its files are in the system's cache, and Wherry, unless it "
    "saves behind training, when they are on the disk",
    (
        "imports",
        "size",
        "deepspeed",
    ): "what pip brings with Wherry, most of it rich with pygments, and greenlet, is more "
    "than what it brings with DeepSpeed, and the parts that DeepSpeed compiles at its first use are not in this row",
}


def is_wherry(system: str) -> bool:
    return "wherry" in system.lower()


def is_peer(system: str) -> bool:
    """DeepSpeed or FSDP2; dcp keeps the states of FSDP2."""
    return system.lower().startswith(("deepspeed", "fsdp2", "dcp")) or "DeepSpeed" in system


def same_work(row: Row, rows: Sequence[Row]) -> bool:
    """DeepSpeed's bf16 host optimizer keeps no master; and what it reads is counted behind the system's cache."""
    other = "DeepSpeedCPUAdam bf16" in row["system"] or row["case"].get("measure") == "read"
    return not other and same_training(row, rows)


def same_training(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the run of a row had plain PyTorch's losses, if they are known."""
    difference = _off(row, rows)
    # Files of a GPU do not name their dtype, which is bf16.
    return difference is None or systems.same_losses(difference, row["case"].get("dtype", "bf16"))


def _off(row: Row, rows: Sequence[Row]) -> float | None:
    """How far a run's losses are from plain PyTorch's. Its step has them, and what else was measured of it has not."""
    of_step = row["case"] | {"measure": "step"}
    same = [row, *(other for other in rows if other["system"] == row["system"] and other["case"] == of_step)]
    return next((one["loss_difference"] for one in same if one.get("loss_difference") is not None), None)


def times(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times as good as this peer Wherry is at the same: with the same placement, or at its best.

    Of update policies it is the one that Wherry chooses by itself for states that are offloaded; of instruction sets
    and passes the first, which is what it takes by itself.
    """
    if is_wherry(row["system"]) or row["reason"] is not None or not same_work(row, rows):
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
        and same_training(other, rows)
    ]
    whole = [other for other in ours if other["system"] == _WHOLE_IMPORT]
    first = row["system"].split(" ")[0]
    beside = _BESIDE.get(first, first.partition("-")[2])
    same = [other for other in ours if beside and other["system"].split(" ")[0].partition("-")[2] == beside]
    name = beside + row["system"].removeprefix(first)
    named = [other for other in same if other["system"].partition("-")[2] == name]
    chosen = " before_use" if row["case"].get("clip") else " in_backward"
    by_default = [other for other in same if other["system"].endswith(chosen)]
    best_isa = [other for other in ours if other.get("isa")][:1]
    plain = [other for other in ours if other["system"] == "wherry"]
    found = whole or named or by_default or same
    elsewhere = beside in systems.PLACES and is_peer(row["system"])
    return found if found or elsewhere else plain or best_isa or ours


class AtLeast(float):
    """A ratio that is no lower than this; how much higher cannot be told."""


def _ratio(ours: Row, peer: Row) -> float | None:
    """By ours, or, where rounds of ours are at zero and below, by the quarter that is worst.

    What is added to a limit may be nothing that can be measured, and a ratio to that would be any number.
    """
    values = ours.get("values") or [ours["value"]]
    if ours["more_is_better"] or min(values) > 0:
        found: float | None = ours["ratio"].get(peer["system"])
        return found
    _, worst = bench.quartiles(values)
    return AtLeast(peer["value"] / worst) if worst > 0 and peer["value"] > 0 else None


def times_words(ratio: float, least: float = 1.0) -> str:
    return f"{'≥ ' if isinstance(ratio, AtLeast) else ''}{_digits(ratio, least)}×"


def _digits(figure: float, least: float) -> str:
    """In as many digits as tell on which side of `least` it is."""
    return next(
        words
        for words in (f"{figure:.{digits}f}" for digits in range(2, 20))
        if (float(words) < least) is (figure < least)
    )


@dataclass(frozen=True)
class Aim:
    """A figure to reach in every row of some benchmarks for which it is meant."""

    words: str
    benchmarks: tuple[str, ...]
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


def _processor(row: Row, rows: Sequence[Row]) -> float | None:
    """Of what engines add to a step, which of the wall's time is less than a machine's own unrest."""
    if row["case"].get("measure") != "over plain" or not row["system"].startswith("deepspeed") or row["reason"]:
        return None
    ours = [one["cpu_us"] for one in _ours_beside(row, rows) if one["cpu_us"] > 0]
    return float(row["cpu_us"]) / min(ours) if ours else None


def _of_bound(row: Row, rows: Sequence[Row]) -> float | None:
    """Of offloaded steps of 8k tokens and more."""
    offloaded = is_wherry(row["system"]) and "-cpu" in row["system"] and not row["system"].endswith(_OTHER_WORK)
    if not offloaded or row["case"].get("tokens", 0) < 8192 or row["reason"] is not None:
        return None
    found: float | None = row["of_limit"]
    return found


AIMS = (
    Aim("fp32 host optimizer, beside DeepSpeed's", ("cpu_adam",), 1.1, _beside_deepspeed(family="fp32")),
    Aim("whole bf16 host update, beside DeepSpeed's", ("cpu_adam",), 1.7, _beside_deepspeed(family="host update")),
    Aim(
        "step with optimizer and parameters on disk, beside DeepSpeed's",
        ("offload_step",),
        2.0,
        _beside_deepspeed(measure="step", system="deepspeed-3-nvme"),  # by default, and in groups
    ),
    Aim(
        "eight micro-batches with parameters on disk, beside DeepSpeed's",
        ("accumulation",),
        2.0,
        _beside_deepspeed(measure="step", window=8, system="deepspeed-3-nvme"),
    ),
    Aim("processor time that DeepSpeed's engine adds to a step, beside ours", ("overhead",), 2.0, _processor),
    Aim(
        "part of the bound of offloaded steps of 8k tokens and more on a GPU",
        ("gpu", "gpu_offload"),
        0.85,
        _of_bound,
        "",
    ),
)


def latest(results: Sequence[Result]) -> list[Result]:
    """Of every benchmark and part of it the last file of each machine; one of a quiet machine leaves out noisy ones.

    A run that was ended before it was complete is none of them.
    """
    found: dict[tuple[str, str], dict[tuple[Any, ...], Result]] = {}
    complete = [result for result in results if result["complete"]]
    for result in sorted(complete, key=lambda result: str(result["date"])):
        machine = tuple(result["machine"].get(key) for key in ("cpu", "cpu_model", "cores", "gpu"))
        found.setdefault((result["benchmark"], result.get("part", "")), {})[machine] = result
    kept: list[Result] = []
    for files in found.values():
        quiet = [result for result in files.values() if result["load"].get("idle")]
        kept += quiet or list(files.values())[-1:]
    return [result for result in results if any(result is other for other in kept)]


_MEANING = """Figures are those of the latest complete file of every measure on every machine, whose tables are below.
*noisy*: others were at work there, or it is not known that they were not; it counts where there is no other."""


def text(results: Sequence[Result], titles: Mapping[str, str]) -> str:
    """The tables of aims and of rows ahead, and the rows behind."""
    newest = latest(results)
    parts = ["## In a minute", _MEANING, _aims(newest)]
    parts.append(_ahead(newest, titles))
    return "\n\n".join(parts) + "\n"


def _aims(results: Sequence[Result]) -> str:
    lines = ["| aim | at least | reached | rows that reach it | file |", "|---|--:|--:|--:|---|"]
    notes: list[str] = []
    for aim in AIMS:
        least = f"{aim.least:g}{aim.unit}"
        files = [result for result in results if result["benchmark"] in aim.benchmarks]
        by_file = [(result, list(_figures(aim, result))) for result in files]
        files, reached_by = [result for result, rows in by_file if rows], [one for _, rows in by_file for one in rows]
        found = [figure for _, figure in reached_by]
        if not found:
            lines.append(f"| {aim.words} | {least} | not measured | | |")
            continue
        low, high = aim.shown(min(found)), aim.shown(max(found))
        reached = low if low == high else f"{low} to {high}"
        count = sum(figure >= aim.least for figure in found)
        named = ", ".join(_link(result) for result in files)
        lines.append(f"| {aim.words} | {least} | {reached} | {count} of {len(found)} | {named} |")
        notes += _no_room(aim, [(row, figure) for row, figure in reached_by if figure < aim.least])
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _figures(aim: Aim, result: Result) -> Iterator[tuple[Row, float]]:
    """The rows of a file that the aim is about."""
    for row in result["rows"]:
        figure = aim.figure(row, result["rows"])
        if figure is not None:
            yield row, figure


# What is measured beside its limit may pass it by so much.
_NOISE = 1.05


def _no_room(aim: Aim, short: Sequence[tuple[Row, float]]) -> list[str]:
    """Of rows that fall short, those in which the peer is so near to the limit that nobody can be ahead by so much.

    A limit that Wherry has passed by more than noise is none.
    """
    near = [
        row["of_limit"]
        for row, figure in short
        if aim.unit and row["of_limit"] and figure / _NOISE <= 1 / row["of_limit"] < aim.least
    ]
    if not near:
        return []
    parts, left = _range(min(near), max(near)), _range(1 / max(near), 1 / min(near), "×")
    rows = "the row that falls" if len(short) == 1 else f"{len(near)} of the {len(short)} rows that fall"
    rows = "all rows that fall" if len(near) == len(short) > 1 else rows
    return [f"- {aim.words}: in {rows} short DeepSpeed is at {parts} of the limit itself, which leaves {left} at most."]


def _range(low: float, high: float, unit: str = "") -> str:
    first, last = f"{low:.2f}{unit}", f"{high:.2f}{unit}"
    return first if first == last else f"{first} to {last}"


def _ahead(results: Sequence[Result], titles: Mapping[str, str]) -> str:
    lines = ["| beside DeepSpeed and FSDP2 | rows | Wherry is ahead in | median | file |", "|---|--:|--:|--:|---|"]
    behind: list[str] = []
    absent: dict[str, None] = {}
    strayed: list[str] = []
    for result in results:
        strayed += _strayed(result, titles[result["benchmark"]])
        found = list(_comparisons(result))
        absent |= dict.fromkeys(_absent(result))
        if not found:
            continue
        ratios = [ratio for _, ratio in found]
        count = sum(ratio >= 1 for ratio in ratios)
        title = titles[result["benchmark"]]
        middle = times_words(statistics.median(ratios))
        lines.append(f"| {title} | {len(ratios)} | {count} | {middle} | {_link(result)} |")
        others = [other for other in results if other["benchmark"] == result["benchmark"]]
        several = len({cpu_words(other["machine"]) for other in others}) > 1
        behind += _behind(
            title + (f" on {cpu_words(result['machine'])}" if several else ""), result["benchmark"], found
        )
    shown = ["\n".join(lines)]
    shown.append("Behind in:\n\n" + "\n".join(behind) if behind else "Behind in none of them.")
    beside_ddp = [ratio for result in results for ratio in _of_ddp(result)]
    if beside_ddp:
        count, middle = sum(ratio >= 1 for ratio in beside_ddp), times_words(statistics.median(beside_ddp))
        shown.append(
            "DDP has everything on every rank and partitions nothing. Beside it stage 0, which does the same, is ahead "
            f"in {count} of {len(beside_ddp)} rows, with a median of {middle}."
        )
    if strayed:
        words = "Rows of peers that trained something else, by losses that are not plain PyTorch's, and count nowhere:"
        shown.append(f"{words}\n\n" + "\n".join(strayed))
    if absent:
        shown.append("Rows that peers do not have:\n\n" + "\n".join(f"- {words}" for words in absent))
    return "\n\n".join(shown)


def _strayed(result: Result, title: str) -> Iterator[str]:
    """A line for each peer that trained something else, with the cases and how far off it was."""
    cases: dict[str, list[str]] = {}
    for row in result["rows"]:
        if is_peer(row["system"]) and row["reason"] is None and not same_training(row, result["rows"]):
            off = _off(row, result["rows"])
            cases.setdefault(row["system"], []).append(f"{case_words(row['case'])} ({off:.0e} off)")
    for system, words in cases.items():
        yield f"- {title} in {_link(result)}, `{system}`: {'; '.join(words)}"


# Cases in which a peer that ran in others could not are named, if they are so few.
_FEW = 3


def _absent(result: Result) -> Iterator[str]:
    """Peers that could not run, and why; with the cases where they could in others."""
    cases: dict[tuple[str, str], list[str]] = {}
    ran = {systems.without_window(row["system"]) for row in result["rows"] if row["reason"] is None}
    for row in result["rows"]:
        if row["reason"] is not None and is_peer(row["system"]):
            name = systems.without_window(row["system"])
            cases.setdefault((name, row["reason"]), []).append(case_words(row["case"]))
    for (system, reason), names in cases.items():
        where = f" in {'; '.join(names)}" if system in ran and len(names) <= _FEW else ""
        yield f"`{system}`{where}: {reason}"


def _comparisons(result: Result) -> Iterator[tuple[Row, float]]:
    for row in result["rows"]:
        ratio = times(row, result["rows"]) if is_peer(row["system"]) else None
        if ratio is not None:
            yield row, ratio


def _of_ddp(result: Result) -> Iterator[float]:
    for row in result["rows"]:
        ratio = times(row, result["rows"]) if row["system"].split(" ")[0] == "ddp" else None
        if ratio is not None:
            yield ratio


def _behind(title: str, benchmark: str, found: Sequence[tuple[Row, float]]) -> list[str]:
    """A line for each peer, with the cases in which it is better, and whether that is more than its own spread."""
    cases: dict[str, list[str]] = {}
    causes: dict[str, dict[str, None]] = {}
    for row, ratio in found:
        if ratio < 1:
            spread = row["spread"] if row["rounds"] > 1 else 0
            words = (
                f", {'within its' if 1 - ratio <= spread else 'its'} spread of {100 * spread:.0f}%" if spread else ""
            )
            cases.setdefault(row["system"], []).append(f"{case_words(row['case'])} ({times_words(ratio)}{words})")
            cause = _CAUSES.get((benchmark, row["case"].get("measure", ""), row["system"]))
            if cause:
                causes.setdefault(row["system"], {})[cause] = None
    return [
        f"- {title}, `{system}`: {'; '.join(words)}" + "".join(f": {cause}" for cause in causes.get(system, ()))
        for system, words in cases.items()
    ]


def _link(result: Result) -> str:
    noisy = "" if result["load"].get("idle") else ", noisy"
    return f"[{result['file'].removesuffix('.json')}](../benchmarks/results/{result['file']}){noisy}"


def cpu_words(machine: Mapping[str, Any]) -> str:
    """A processor's name, which many have, and its model where the file tells it."""
    model = machine.get("cpu_model")
    return machine["cpu"] + (f" ({model})" if model else "")


def case_words(case: Mapping[str, Any]) -> str:
    return ", ".join(_word(key, value) for key, value in case.items() if value not in (None, ""))


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1e5:
        return f"{key} {value:.0e}" if key == "numel" else f"{key} {value:,.0f}"
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
