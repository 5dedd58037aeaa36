"""Figures in the documentation are those of files: the page is generated, and other pages name the file they quote."""

import json
import re

import pytest

from benchmarks import plots, report
from wherry.observe import bench

ROOT = bench.ROOT
# What others claim, what was tried and is not claimed, and what is generated from elsewhere.
EXEMPT = {"benchmarks.md", "decisions.md", "config.md"}
PAGES = sorted([ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.name not in EXEMPT)])
# A measured speed, or a comparison of speeds.
FIGURE = re.compile(
    r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)\s?"
    r"(?:ms|µs|us|ns|GB/s|MB/s|TB/s|tokens/s|tokens a second|TFLOPS|TFLOP/s|times as fast|times faster|×|x faster)"
    r"(?![\w/])"
)
FILE = re.compile(r"benchmarks/results/([\w.-]+\.json)")


def test_the_page_and_its_plots_are_those_of_the_files(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def numbers_in(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def unsupported(text, folder=bench.RESULTS):
    """The figures of a text that no file named in their paragraph holds, in any of the usual units."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        files = FILE.findall(paragraph)
        missing = [name for name in files if not (folder / name).is_file()]
        found += [f"{name} is not there" for name in missing]
        held = [n for name in files if name not in missing for n in numbers_in(json.loads((folder / name).read_text()))]
        for match in FIGURE.finditer(paragraph):
            word = match.group(1).replace(",", "")
            digits = len(word.partition(".")[2])
            scaled = (n * unit for n in held for unit in (1, 1e3, 1e6, 1e-3, 1e-6, 1e-9, 1e-12))
            if not any(f"{n:.{digits}f}" == word for n in scaled):
                found.append(match.group(0))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_figure_names_the_file_that_holds_it(path):
    assert unsupported(path.read_text()) == []


def test_a_figure_without_its_file_is_found(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"rows": [{"value": 0.01234}, {"ratio": {"b": 1.708}}]}))
    assert unsupported("It takes 12.3 ms, see benchmarks/results/a.json.", tmp_path) == []
    assert unsupported("It is 1.71 times as fast (`benchmarks/results/a.json`).", tmp_path) == []
    assert unsupported("It takes 12.4 ms, see benchmarks/results/a.json.", tmp_path) == ["12.4 ms"]
    assert unsupported("It takes 12.3 ms.\n\nSee benchmarks/results/a.json.", tmp_path) == ["12.3 ms"]
    assert unsupported("See benchmarks/results/b.json.", tmp_path) == ["b.json is not there"]


def test_a_page_from_a_file():
    case = {"model": "10m", "ranks": 2}
    rows = [
        bench.row(case, "wherry-2", "s", [0.1, 0.11, 0.12]),
        bench.row(case, "deepspeed-2", "s", [0.2, 0.22, 0.24]),
        bench.row(case, "ddp", "s", [0.05, 0.055, 0.06]),
        bench.row(case, "fsdp2", "s", reason="it is not here"),
    ]
    bench.compare(rows)
    result = {
        "benchmark": "steps", "file": "steps-x.json", "date": "2026-11-20T10:00:00+00:00", "complete": True,
        "quick": False, "load": {"idle": False}, "settings": {},
        "versions": {"torch": "2", "deepspeed": "not installed"},
        "machine": {"cpu": "A CPU", "cores": 2, "memory_bytes": 2**34, "gpu": None}, "rows": rows,
    }  # fmt: skip
    text, drawn = report.page([result])
    assert "| 10m, ranks 2 | wherry-2 | 110.0 ms | 9% |  |  |" in text
    assert "|  | deepspeed-2 | 220.0 ms | 9% |  | 2.00× |" in text
    assert "|  | ddp | 55.0 ms | 9% |  | 0.50× |" in text  # worse is shown as such
    assert "- `fsdp2` could not run: it is not here" in text
    assert "Others were at work" in text and "A CPU, 2 cores, 16 GiB; torch 2." in text
    (plot,) = drawn.values()
    assert plot.count("<rect") == 1 + 3 and "220.0 ms" in plot
    assert list(drawn) == ["steps-x.svg"]


def test_bars_are_as_long_as_their_values():
    drawn = plots.bars("a & b", [plots.Bar("one", 1.0, "1", True), plots.Bar("two", 2.0, "2", False)])
    widths = [float(width) for width in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', drawn)]
    assert widths[1] == 2 * widths[0] and "a &amp; b" in drawn


def test_every_file_of_results_has_the_common_form():
    for path in sorted(bench.RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        assert {"benchmark", "date", "machine", "versions", "settings", "load", "complete", "rows"} <= set(result), path
        assert result["benchmark"] in report.SECTIONS, path
        for row in result["rows"]:
            assert {"case", "system", "unit", "value", "spread", "ratio", "of_limit", "reason"} <= set(row), path
            assert (row["value"] is None) == (row["reason"] is not None), (path, row)
        text = path.read_text()
        assert not re.search(r'"/(?!s")\w+/', text), f"{path.name}: a path of a machine"
