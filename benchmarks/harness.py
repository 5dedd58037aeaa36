"""What the benchmarks share: interleaved repeats, rows with medians, spread and ratios, the JSON file, the table.

A row is what one system did in one case. Its value is the median of repeats; `ratio` says, for each other system of
the same case, how many times as good it is as that one (above 1: better). A system that could not run has a `reason`
instead of a value.
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
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from wherry.errors import WherryError

T = TypeVar("T")
Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 100
# Of the path of a file, what comes before its name.
_FOLDERS = re.compile(r"(?<![\w.~:/])(?:/[\w.~@+-]+)+/(?=[\w.~@+-])")


def interleave(subjects: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure every subject once a round, A B C A B C: what disturbs the machine for a while disturbs all alike.

    Each round begins with another subject, so none is always measured after the same one.
    """
    names = list(subjects)
    found: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % max(len(names), 1)
        for name in names[start:] + names[:start]:
            print(f"round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(subjects[name]())
    return found


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
    made |= {"reason": reason and without_folders(reason), "value": None, "spread": None, "rounds": 0, "ratio": {}}
    if values:
        made |= {"value": statistics.median(values), "spread": spread(values), "rounds": len(values)}
        made["values"] = list(values)
    return made | facts


def key(row: Row) -> str:
    """What tells a row from others."""
    return json.dumps([row["case"], row["system"]])


def spread(values: Sequence[float]) -> float:
    """The range of the middle half, as a part of the median."""
    median = statistics.median(values)
    if len(values) < 2 or median == 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / abs(median)


def without_folders(text: str) -> str:
    """A text as it may be published: folders of a machine are nobody's business."""
    return _FOLDERS.sub("", text)


def compare(rows: Sequence[Row]) -> None:
    """Fill in `ratio` among the rows of each case: by rounds where both have as many, as a slow round slows both."""
    cases: dict[str, list[Row]] = {}
    for one in rows:
        if one["reason"] is None:
            cases.setdefault(json.dumps(one["case"]), []).append(one)
    for same in cases.values():
        for one in same:
            others = {other["system"]: times_as_good(one, other) for other in same if other is not one}
            one["ratio"] = {name: ratio for name, ratio in others.items() if ratio is not None}


def times_as_good(one: Row, other: Row) -> float | None:
    """How many times as good `one` is as `other`; None where a zero leaves no sense in it."""
    mine, its = one["values"], other["values"]
    if len(mine) != len(its) or min(*mine, *its) <= 0:
        mine, its = [one["value"]], [other["value"]]
    if min(*mine, *its) <= 0:
        return None
    return statistics.median((a / b if one["more_is_better"] else b / a) for a, b in zip(mine, its, strict=True))


# The command line.


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    paragraphs = [textwrap.fill(" ".join(part.split()), WIDTH) for part in description.split("\n\n")]
    found = argparse.ArgumentParser(
        description="\n\n".join(paragraphs), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--quick", action="store_true", help="fewer repeats, for a first look; leaves no file behind")
    found.add_argument("--json", metavar="PATH", type=Path, help="where the figures go (default: benchmarks/results)")
    found.add_argument("--rounds", type=positive, help="times that everything is measured, in turns")
    return found


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, and among them the watch over the machine's load, which begins here."""
    options = parser.parse_args(argv)
    # Peers compile with the ninja beside this Python, though its environment may not be the one of the shell.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    options.arguments = [
        os.path.basename(word.rstrip("/")) or word for word in (sys.argv[1:] if argv is None else argv)
    ]
    options.load = machine.Load()
    if options.load.before > machine.QUIET:
        print(f"others keep {options.load.before:.1f} cores at work: the figures will be noisy", file=sys.stderr)
    return options


def folder(text: str) -> str:
    """An argparse type: a folder to write in. Without it a run would end in the middle."""
    if not os.path.isdir(text) or not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder in which something can be written")
    return text


def listed(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of `choices`, with commas between them."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in choices]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"got {', '.join(unknown) or 'nothing'}; expected some of {', '.join(choices)}"
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


def alone(main: Callable[[], int]) -> NoReturn:
    """A script ends as a command of Wherry's does: a user's mistake is one line."""
    try:
        sys.exit(main())
    except WherryError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


# The file.

_HEAD = ("benchmark", "date", "quick", "machine", "versions", "settings", "load", "complete", "rows")
_ROW = ("case", "system", "unit", "more_is_better", "value", "spread", "rounds", "ratio", "reason")


def read(path: Path) -> dict[str, Any]:
    """A run's file, with all that every one has."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in _HEAD if key not in found]
        missing += [f"rows[{n}].{key}" for n, row in enumerate(found.get("rows", ())) for key in _ROW if key not in row]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise WherryError(f"{path} is not the file of a benchmark ({error}); measure it again") from None
    if missing:
        raise WherryError(f"{path} is not the file of a benchmark: {', '.join(missing[:5])} missing; measure it again")
    return found


class Results:
    """The file of one run. It is written anew as rows come, so that a run which is ended keeps what it has measured.

    Those of a quick run are kept only where `--json` says. An older file of the same measure on the same machine is
    replaced when a run is complete; one at a `path` at once.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        part: str = "",
        path: Path | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self._begun = time.monotonic()
        self._load: machine.Load = options.load
        described = machine.describe()
        words = "-".join(filter(None, (name, part, machine.slug(described))))
        self.path: Path | None = path or options.json or (None if options.quick else RESULTS / f"{words}.json")
        self._at_once = path is not None
        if self.path is not None and not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise WherryError(f"nothing can be written in {self.path.parent}; make the folder, or say --json PATH")
        self.head = {
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
        """Keep rows, in the place of those of the same systems in the same cases, and write what there is so far."""
        self.rows = list({key(one): one for one in (*self.rows, *rows)}.values())
        compare(self.rows)
        self._write(complete=False, load={"others_before": self._load.before, "idle": None})

    def close(self) -> None:
        """Write the whole, and how busy others kept the machine."""
        self.head["seconds"] = time.monotonic() - self._begun
        load = self._load.end()
        if not load["idle"]:
            print("others were at work on this machine meanwhile: the file says so", file=sys.stderr)
        self._write(complete=True, load=load)
        if self.path is not None:
            print(f"written: {self.path}")

    def _write(self, *, complete: bool, load: Mapping[str, Any]) -> None:
        if self.path is not None:
            text = json.dumps(_rounded(self.head | {"complete": complete, "load": load, "rows": self.rows}), indent=1)
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(text + "\n", encoding="utf-8")
            if complete or self._at_once:
                part.replace(self.path)


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


def quantity(value: float, unit: str) -> str:
    """A value with its unit, in digits that a reader can compare."""
    if unit == "s":
        return f"{1e3 * value:,.1f} ms" if abs(value) < 1 else f"{value:,.2f} s"
    if unit == "B":
        return f"{value / 1e6:,.1f} MB" if value < 1e10 else f"{value / 1e9:,.1f} GB"
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "flop/s":
        return f"{value / 1e12:.2f} TFLOPS"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def show(rows: Sequence[Row], facts: Mapping[str, Callable[[Row], str]] | None = None) -> None:
    """A table of each case: value, spread, how many times as good as the case's first row, and further facts."""
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    cases: dict[str, list[Row]] = {}
    for one in rows:
        cases.setdefault(", ".join(f"{key} {value}" for key, value in one["case"].items()), []).append(one)
    for title, same in cases.items():
        first = same[0]["system"]
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("", overflow="fold")
        for column in ("value", "spread", f"times {first}", *(facts or {})):
            table.add_column(column, justify="right", no_wrap=True)
        for one in same:
            if one["reason"] is not None:
                table.add_row(one["system"], "-")
                continue
            ratio = one["ratio"].get(first)
            figures = [quantity(one["value"], one["unit"]), f"{100 * one['spread']:.0f}%" if one["rounds"] > 1 else "-"]
            figures.append("" if ratio is None else f"{ratio:.2f}")
            table.add_row(one["system"], *figures, *(words(one) for words in (facts or {}).values()))
        console.print(table)
        for one in same:
            if one["reason"] is not None:
                console.print(f"{one['system']}: {one['reason']}", markup=False)
        console.print()
