"""What every benchmark shares: interleaved repeats, rows with medians, spread and ratios, the JSON file, the table.

A row is what one system did in one case. Its value is the median of repeats; `ratio` says, for each other system of
the same case, how many times as good it is as that one (above 1: better), and `of_limit` which part of the measured
limit it reaches. A system that could not run has a `reason` instead of a value.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from wherry.errors import WherryError
from wherry.observe import machine
from wherry.observe.progress import Progress
from wherry.observe.screen import Screen

T = TypeVar("T")
Row = dict[str, Any]

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 80
# Of the path of a file, what comes before its name.
_FOLDERS = re.compile(r"(?<![\w.~:/])(?:/[\w.~@+-]+)+/(?=[\w.~@+-])")


# Measuring.


def interleave(subjects: Mapping[str, Callable[[], T]], rounds: int, what: str) -> dict[str, list[T]]:
    """Measure every subject once a round, A B C A B C: what disturbs the machine for a while disturbs all alike.

    Each round begins with another subject, so none is always measured after the same one.
    """
    names = list(subjects)
    found: dict[str, list[T]] = {name: [] for name in names}
    with Progress(what, total=rounds * len(names), unit="measures") as progress:
        for turn in range(rounds):
            start = turn % max(len(names), 1)
            for name in names[start:] + names[:start]:
                found[name].append(subjects[name]())
                progress.advance()
    return found


@dataclass(frozen=True)
class Summary:
    """A measure's median, and its interquartile range as a fraction of the median."""

    median: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        values = list(values)
        median = statistics.median(values)
        if len(values) < 2 or median == 0:
            return cls(median, 0.0, len(values))
        low, high = quartiles(values)
        return cls(median, (high - low) / abs(median), len(values))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def paired_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The median of round-by-round ratios: a slow round slows both, and cancels."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


# Rows.


def row(
    case: Mapping[str, Any],
    system: str,
    unit: str,
    values: Sequence[float] = (),
    *,
    more_is_better: bool = False,
    reason: str | None = None,
    **facts: Any,
) -> Row:
    """What `system` did in `case`: `values` are the repeats. Without any there is a reason."""
    assert bool(values) != bool(reason), (system, values, reason)
    made: Row = {"case": dict(case), "system": system, "unit": unit, "more_is_better": more_is_better}
    reason = reason and without_folders(reason)
    made |= {"reason": reason, "value": None, "spread": None, "rounds": 0, "ratio": {}, "of_limit": None}
    if values:
        summary = Summary.of(values)
        made |= {"value": summary.median, "spread": summary.spread, "rounds": summary.count, "values": list(values)}
    return made | facts


def without_folders(text: str) -> str:
    """A text as it may be published: folders of a machine are nobody's business.

    >>> without_folders("No space left on device: '/home/somebody/disk/swap.bin'")
    "No space left on device: 'swap.bin'"
    """
    return _FOLDERS.sub("", text)


def compare(rows: Sequence[Row], limit: str | None = None) -> None:
    """Fill in `ratio` and `of_limit`, among the rows of each case. `limit` is the system that is the yardstick."""
    cases: dict[str, list[Row]] = {}
    for one in rows:
        cases.setdefault(json.dumps(one["case"]), []).append(one)
    for same in cases.values():
        there = [one for one in same if one["reason"] is None]
        for one in there:
            others = {other["system"]: times_as_good(one, other) for other in there if other is not one}
            one["of_limit"] = others.pop(limit, None) if limit is not None else one["of_limit"]
            one["ratio"] = {} if one["system"] == limit else others


def times_as_good(one: Row, other: Row) -> float | None:
    """How many times as good `one` is as `other`; None where the sign or a zero leaves no sense in it."""
    mine, its = one.get("values") or [one["value"]], other.get("values") or [other["value"]]
    if min(*mine, *its) <= 0:
        mine, its = [one["value"]], [other["value"]]
        if min(mine[0], its[0]) <= 0:
            return None
    if len(mine) != len(its):
        mine, its = [one["value"]], [other["value"]]
    return paired_ratio(mine, its) if one["more_is_better"] else paired_ratio(its, mine)


# The command line.


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    paragraphs = [textwrap.fill(" ".join(part.split()), WIDTH) for part in description.split("\n\n")]
    found = argparse.ArgumentParser(
        prog=f"wherry bench {name}",
        description="\n\n".join(paragraphs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--quick", action="store_true", help="fewer repeats, for a first look; leaves no file behind")
    found.add_argument("--json", metavar="PATH", type=_file, help="where the figures go (default: benchmarks/results)")
    return found


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, and among them the watch over the machine's load, which begins here."""
    options = parser.parse_args(argv)
    _find_own_programs()
    options.arguments = [_harmless(word) for word in (sys.argv[1:] if argv is None else argv)]
    options.load = machine.Load()
    if options.load.before > machine.QUIET:
        print(
            f"this machine is busy: others keep {options.load.before:.1f} cores at work, and the figures will be noisy",
            file=sys.stderr,
        )
    return options


def _find_own_programs() -> None:
    """Peers compile with the ninja beside this Python, though its environment may not be the one of the shell."""
    own, paths = os.path.dirname(sys.executable), os.environ.get("PATH", "").split(os.pathsep)
    if own not in paths:
        os.environ["PATH"] = os.pathsep.join([own, *paths])


def _harmless(word: str) -> str:
    """An argument as it may be published, as reasons are."""
    return os.path.basename(word.rstrip("/")) if os.sep in word else word


def folder(text: str) -> str:
    """An argparse type: a folder to write in. Without it a run would end in the middle."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    if not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"nothing can be written in {text!r}")
    return text


def _file(text: str) -> Path:
    """An argparse type: the name of a file, which need not be there."""
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected the name of a file")
    reason = _cannot_write(Path(text))
    if reason is not None:
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def _cannot_write(path: Path) -> str | None:
    """Why a file cannot be made there, with the folders that it lacks; None where it can."""
    absolute = Path(os.path.abspath(path))
    nearest = next(folder for folder in absolute.parents if os.path.lexists(folder))
    if not nearest.is_dir():
        return f"'{path}' cannot be written: {nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"'{path}' cannot be written: nothing can be written in {nearest}"
    return None


def listed(choices: Sequence[str], *, or_none: bool = False) -> Callable[[str], list[str]]:
    """An argparse type: some of `choices`, with commas between them; "none" of them where that is of use."""

    def parse(text: str) -> list[str]:
        if or_none and text.strip() == "none":
            return []
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in choices]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"got {', '.join(unknown) or 'nothing'}; expected some of {', '.join(choices)}" + ", or none" * or_none
            )
        return names

    return parse


def positive(text: str) -> int:
    """An argparse type: 3, or 1e8."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not math.isfinite(number) or number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(number)


def positives(text: str) -> list[int]:
    """An argparse type: whole numbers with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


# The file.

_NUMBER = (int, float)
_MAYBE = (*_NUMBER, type(None))
# What every one has, and the types that it may be of.
_HEAD = {"benchmark": str, "date": str, "quick": bool, "machine": dict, "versions": dict, "settings": dict}
_HEAD |= {"load": dict, "complete": bool, "rows": list}
_MACHINE = {"cpu": str, "cores": int, "memory_bytes": _NUMBER}
_ROW = {"case": dict, "system": str, "unit": str, "more_is_better": bool, "value": _MAYBE, "spread": _MAYBE}
_ROW |= {"rounds": int, "ratio": dict, "of_limit": _MAYBE, "reason": (str, type(None))}
# Relative: figures are written with ten digits.
_SAME = 1e-8


def read(path: Path) -> dict[str, Any]:
    """A run's file, with all that every one has."""

    def wrong(what: str) -> WherryError:
        return WherryError(f"{path}: {what}; take the file out of its folder, and measure it again")

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"cannot be read ({error.strerror})") from None
    except ValueError as error:  # neither text nor JSON
        raise wrong(f"is not a whole JSON file ({error})") from None
    _check_keys(found, _HEAD, "of a benchmark's file", wrong)
    _check_keys(found["machine"], _MACHINE, "of machine", wrong)
    for number, one in enumerate(found["rows"]):
        _check_keys(one, _ROW, f"of row {number}", wrong)
        if (one["value"] is None) == (one["reason"] is None):
            raise wrong(f"row {number} has value {one['value']} and reason {one['reason']!r}; expected one of the two")
        values = one.get("values", [])
        if not isinstance(values, list) or not all(isinstance(value, _NUMBER) for value in values):
            raise wrong(f"values of row {number} is {values!r}; expected a list of numbers")
        median = statistics.median(values) if values else one["value"]
        if one["value"] is not None and not math.isclose(one["value"], median, rel_tol=_SAME):
            raise wrong(f"row {number} has value {one['value']:.10g}; expected the median of its values, {median:.10g}")
    return dict(found)


def _check_keys(found: Any, expected: Mapping[str, Any], where: str, wrong: Callable[[str], WherryError]) -> None:
    if not isinstance(found, dict):
        raise wrong(f"got {type(found).__name__} in the place {where}; expected an object")
    missing = [key for key in expected if key not in found]
    if missing:
        raise wrong(f"the keys {', '.join(missing)} {where} are missing")
    for key, kinds in expected.items():
        if not isinstance(found[key], kinds):
            kinds = kinds if isinstance(kinds, tuple) else (kinds,)
            named = " or ".join(kind.__name__ for kind in kinds)
            raise wrong(f"{key} {where} is {type(found[key]).__name__}; expected {named}")


class Results:
    """The file of one run. It is written anew as rows come, so that a run which is ended keeps what it has measured.

    Those of a quick run are kept only where `--json` says. Where there is a file already, a run is written beside it
    until it is complete, and takes its place: at once where `--json` names it, and in the folder of results if it has
    measured everything that the old one has, as a part does not replace the whole.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, settings: Mapping[str, Any], *, part: str = "", limit: str = ""
    ) -> None:
        self.rows: list[Row] = []
        self._begun = time.monotonic()
        self._load: machine.Load = options.load
        self._limit = limit or None
        described = machine.describe()
        self.path: Path | None = options.json
        self._replaces: Path | None = None
        self._before: list[Row] = []
        if self.path is None and not options.quick:
            if RESULTS.parent.is_dir():
                self.path = _kept(name, part, described)
            else:
                print(
                    "this Wherry is installed without its sources, where results are kept: the figures are shown, and "
                    "go to no file (--json PATH says where)",
                    file=sys.stderr,
                )
        if self.path is not None:
            reason = _cannot_write(self.path)
            if reason is not None:
                raise WherryError(f"bench {name}: {reason}; make it writable, or say --json PATH")
            if self.path.exists():
                self._before = read(self.path)["rows"] if options.json is None else []
                self._replaces, self.path = self.path, self.path.with_name(self.path.name + ".new")
        self._head = {
            "benchmark": name,
            "part": part,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "quick": options.quick,
            "arguments": options.arguments,
            "machine": described,
            "versions": machine.versions(ROOT),
            "settings": dict(settings),
        }

    def add(self, *rows: Row) -> None:
        """Keep rows, compare them with those of the same cases, and write what there is so far."""
        self.rows += rows
        cases = [one["case"] for one in rows]
        compare([one for one in self.rows if one["case"] in cases], self._limit)
        self._write(complete=False, load={"others_before": self._load.before, "idle": None})

    def put(self, *rows: Row) -> None:
        """Keep rows in the place of those of the same systems in the same cases, which have been measured further."""
        anew = [(one["case"], one["system"]) for one in rows]
        self.rows = [one for one in self.rows if (one["case"], one["system"]) not in anew]
        self.add(*rows)

    def close(self) -> None:
        """Write the whole, with ratios, and how busy others kept the machine."""
        compare(self.rows, self._limit)
        self._head["seconds"] = time.monotonic() - self._begun
        load = self._load.end()
        if not load["idle"]:
            print("others were at work on this machine meanwhile: the file says so", file=sys.stderr)
        self._write(complete=True, load=load)
        if self._replaces is not None and self.path is not None:
            lacking = _lacking(self.rows, self._before)
            if lacking:
                print(f"{self._replaces.name} stays: this run has not measured {', '.join(lacking)}, which it has")
            else:
                self.path = self.path.replace(self._replaces)
        if self.path is not None:
            print(f"written: {self.path}")

    def _write(self, *, complete: bool, load: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._head | {"complete": complete, "load": load, "rows": self.rows}
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(_rounded(whole), indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


def _kept(name: str, part: str, described: Mapping[str, Any]) -> Path:
    """The file of a measure on this machine: by its short name, unless that is of a machine which is another one."""

    def file(slug: str) -> Path:
        return RESULTS / ("-".join(filter(None, (name, part, slug))) + ".json")

    path = file(machine.slug(described))
    if path.exists() and not machine.may_be_the_same(read(path)["machine"], described):
        return file(machine.full_slug(described))
    return path


def _lacking(rows: Iterable[Row], before: Iterable[Row]) -> list[str]:
    """The systems, and values of cases, that have been measured before and are not among these rows."""

    def measured(rows: Iterable[Row]) -> dict[str, None]:
        there = [{"system": one["system"], **one["case"]} for one in rows if one["reason"] is None]
        return {f"{key} {value}": None for one in there for key, value in one.items()}

    found = measured(_rounded(list(rows)))
    return [words for words in measured(before) if words not in found]


def _rounded(value: Any) -> Any:
    """To ten digits, which is more than any measure has."""
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


# The table.


def spread_words(row: Mapping[str, Any]) -> str:
    """A row's spread; one measure has none."""
    return f"{100 * row['spread']:.0f}%" if row["rounds"] > 1 else "-"


def ratio_words(row: Mapping[str, Any], peer: str) -> str:
    found = row["ratio"].get(peer)
    return "" if found is None else f"{found:.2f}"


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> None:
    """A table of 80 columns: the first column is a name, the others are figures; then notes, a paragraph each."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    for row in rows:
        table.add_row(*row)
    console = Screen(width=WIDTH, highlight=False, soft_wrap=False, file=sys.stdout)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
