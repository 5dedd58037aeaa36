"""Figures in the documentation are those of files: the page is generated, and other pages name the file they quote."""

import json
import re

import pytest

from benchmarks import plots, report, summary
from wherry.cli import main as wherry
from wherry.errors import WherryError
from wherry.observe import bench
from wherry.tiers import disk_bench

ROOT = bench.ROOT
# What others claim, what was tried and is not claimed, and what is generated from elsewhere.
EXEMPT = {"benchmarks.md", "decisions.md", "config.md"}
PAGES = sorted(
    path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
    if path.name not in EXEMPT
)  # fmt: skip
# Sizes that are promised and not measured: code and tests hold to them. What a flag is given is no figure either.
STATED = {"16 KiB", "8 MiB", "48 MiB", "100 MiB"}
FLAG = re.compile(r"--[\w-]+[ =]$")
# A measured time, speed or size, or a comparison: how it is written, its kind, and how many of it one of a file is.
_WRITTEN = {
    ("time", 1.0): "s, sec, secs, second, seconds, s a step, seconds a step, s per step",
    ("time", 1e3): "ms, msec, msecs, millisecond, milliseconds",
    ("time", 1e6): "µs, μs, us, usec, usecs, microsecond, microseconds",
    ("time", 1e9): "ns, nsec, nanosecond, nanoseconds",
    ("time", 1 / 60): "min, mins, minute, minutes",
    ("time", 1 / 3600): "h, hr, hrs, hour, hours",
    ("rate", 1e-3): "KB/s, kB/s", ("rate", 1e-6): "MB/s", ("rate", 1e-9): "GB/s", ("rate", 1e-12): "TB/s",
    ("rate", 1 / 2**20): "MiB/s", ("rate", 1 / 2**30): "GiB/s",
    ("rate", 8e-6): "Mbit/s, Mb/s, Mbps", ("rate", 8e-9): "Gbit/s, Gb/s, Gbps",
    ("bytes", 1e-3): "KB, kB", ("bytes", 1e-6): "MB", ("bytes", 1e-9): "GB", ("bytes", 1e-12): "TB",
    ("bytes", 1 / 2**10): "KiB", ("bytes", 1 / 2**20): "MiB", ("bytes", 1 / 2**30): "GiB", ("bytes", 1 / 2**40): "TiB",
    ("each", 1.0): "bytes a parameter, bytes per parameter, B/param, B/parameter",
    ("tokens", 1.0): "tokens/s, tok/s, tokens a second, tokens per second, tokens/sec, tokens per s",
    ("operations", 1e-9): "GFLOPS, GFLOP/s, GFLOPs, GFLOP",
    ("operations", 1e-12): "TFLOPS, TFLOP/s, TFLOPs, TFLOP, teraflop, teraflops",
    ("operations", 1e-15): "PFLOPS, PFLOP/s, PFLOPs, PFLOP",
    # Which no file has.
    ("turns", 1.0): "samples/s, samples/sec, samples a second, samples per second, sequences/s, steps/s, steps/sec, "
    "steps a second, steps per second, it/s, its/s, iterations/s, iterations a second, iterations per second, IOPS",
    ("ratio", 1.0): "x, X, ×, x faster, fold, times, "
    "times faster, times slower, times quicker, times less, times more, "
    "times fewer, times larger, times smaller, times higher, times lower, times better, times longer, times shorter, "
    "times cheaper, times as fast, times as slow, times as much, times as many, times as large, times as small, "
    "times as long, times as high, times as good, times the speed, times the time, times the throughput, "
    "times the memory, times the rate, times the bandwidth, times the cost",
    ("more", 100.0): "% faster, % quicker, % more, % higher, % better, % larger, % longer",
    ("less", 100.0): "% slower, % less, % lower, % fewer, % smaller, % shorter, % cheaper, % sooner",
    ("ratio", 100.0): "%, % of, percent",
}  # fmt: skip
UNITS = {unit: meaning for meaning, units in _WRITTEN.items() for unit in units.split(", ")}
_NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
# The first number of a range has the unit of the second.
FIGURE = re.compile(
    rf"(?<![\w.])(?:{_NUMBER}\s?(?:–|—|-|to|and)\s?)?(?<![\w.]){_NUMBER}(?:([xX])|(k)?[\s-]?("
    + "|".join(sorted((re.escape(unit) for unit in UNITS if unit not in ("x", "X")), key=len, reverse=True))
    + r"))(?!\w)"
)
# The same without a digit, or with it elsewhere: there must be a file at least.
CLAIM = re.compile(
    r"\b(?:(?:twice|thrice|half|double|triple|\w+ times|\w+-?fold|an order of magnitude|a (?:third|quarter|tenth) of) "
    r"(?:as (?:fast|slow|much|many|large|small|long)|faster|slower|quicker|less|more|fewer|larger|smaller|higher|lower|"
    r"longer|shorter|cheaper|better|the (?:speed|time|memory|throughput|rate|bandwidth|cost|overhead))"
    r"|(?:twice|thrice|half|double|triple|\w+ times) [A-Z]\w+'s"
    r"|(?:doubles|triples|halves) the (?:speed|time|memory|throughput|rate|cost|overhead)|factor of [\w.]+"
    r"|(?:two|three|four|five|six|seven|eight|nine|ten|hundred|thousand)-?fold)\b"
)
# A sentence of a decision that tells of other figures than those of the file that the decision names.
OTHERWISE = re.compile(r"\b(?:of before|a run|that run)\b", re.IGNORECASE)
FILE = re.compile(r"benchmarks/results/([\w.-]+\.json)")


def test_the_page_and_its_plots_are_those_of_the_files(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def measured(result):
    """What a file has measured: the kind of a figure, and the figure in its base unit."""
    of_unit = {"s": ("time", 1.0), "us": ("time", 1e-6), "ns/param": ("time", 1e-9), "B/s": ("rate", 1.0)}
    of_unit |= {"flop/s": ("operations", 1.0), "B": ("bytes", 1.0), "bytes": ("bytes", 1.0)}
    of_fact = {"tokens_per_s": ("tokens", 1.0), "gbps": ("rate", 1e9), "tflops": ("operations", 1e12)}
    of_fact |= dict.fromkeys(("bound_s", "predicted_s", "built_s", "first_use_s"), ("time", 1.0))
    of_fact["cpu_us"] = "time", 1e-6
    of_fact |= dict.fromkeys(("bytes_per_parameter", "host_bytes_per_parameter"), ("each", 1.0))
    of_fact |= {fact: ("bytes", 1.0) for row in result["rows"] for fact in row if fact.endswith("_bytes")}
    for row in result["rows"]:
        if row["value"] is not None and row["unit"] in of_unit:
            kind, unit = of_unit[row["unit"]]
            yield kind, unit * abs(row["value"])
        for fact, (kind, unit) in of_fact.items():
            if row.get(fact) is not None:
                yield kind, unit * row[fact]
        for ratio in (*row["ratio"].values(), row["of_limit"]):
            if ratio is not None:
                yield from (("ratio", ratio), ("more", ratio - 1), ("less", 1 - ratio))


def unsupported(text, folder=bench.RESULTS):
    """The figures of a text that no file named in their paragraph has measured."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        files = FILE.findall(paragraph)
        missing = [name for name in files if not (folder / name).is_file()]
        found += [f"{name} is not there" for name in missing]
        there = [json.loads((folder / name).read_text()) for name in files if name not in missing]
        held = [one for result in there for one in measured(result)]
        for match in FIGURE.finditer(paragraph):
            if match.group(0) in STATED or FLAG.search(paragraph, 0, match.start()):
                continue
            kind, scale = UNITS[match.group(3) or match.group(5)]
            scale /= 1000 if match.group(4) else 1
            words = [number.replace(",", "") for number in match.group(1, 2) if number]
            if not all(_is_held(word, kind, scale, held) for word in words):
                found.append(match.group(0))
        found += [match.group(0) for match in CLAIM.finditer(paragraph) if not files]
    return found


def _is_held(word, kind, scale, held):
    digits = len(word.partition(".")[2])
    return any(of == kind and f"{value * scale:.{digits}f}" == word for of, value in held)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_figure_names_the_file_that_holds_it(path):
    assert unsupported(path.read_text()) == []


def of_decisions(text, folder=bench.RESULTS):
    """The figures of decisions that name a file, and are neither there nor said to be of another run."""
    found = []
    for decision in re.split(r"\n(?=- |\n|#)", text):
        files = [f"benchmarks/results/{name}" for name in FILE.findall(decision)]
        sentences = re.split(r"(?<=[.;])\s+", " ".join(decision.split()))
        of_files = [sentence for sentence in sentences if not OTHERWISE.search(sentence)]
        found += unsupported(" ".join(of_files + files), folder) if files else []
    return found


def test_a_decision_that_names_a_file_has_its_figures_from_there(tmp_path):
    text = (ROOT / "docs" / "decisions.md").read_text()
    # The blocks of requests.
    assert [figure for figure in of_decisions(text) if figure not in ("1 MiB", "4 MiB")] == []
    rows = [{"value": value, "unit": "s", "ratio": {}, "of_limit": None} for value in (0.012, -0.003)]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    of_a = "- **It is so** (`benchmarks/results/a.json`): 12 ms, and -3 ms"
    for more, wrong in (
        ("", []), (" and 13 ms", ["13 ms"]), (". A run after it had 13 ms", []),
        (". It was 13 ms; of before 14 ms", ["13 ms"]),
        ("\n- **Another thing** took 13 ms", []), ("\n  in\n  14 ms.\n\n13 ms", ["14 ms"]),
    ):  # fmt: skip
        assert of_decisions(f"{of_a}{more}.\n", tmp_path) == wrong, more


def test_a_figure_without_its_file_is_found(tmp_path):
    rows = [{"value": 0.01234, "unit": "s", "ratio": {"b": 1.708}, "of_limit": 0.854, "tokens_per_s": 4310.0}]
    rows += [{"value": 3.2e9, "unit": "B", "ratio": {}, "of_limit": None, "bytes_per_parameter": 16.04}]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    for held in (
        "takes 12.3 ms", "is 1.71 times as fast", "is 71% faster", "has 1.7x", "makes 4,310 tokens/s", "is 1.7-fold",
        "makes 4.3k tokens/s", "takes 12.3 ms/step", "reaches 85 %", "has a peak of 3.2 GB", "16.0 bytes a parameter",
    ):  # fmt: skip
        assert unsupported(f"It {held}, see benchmarks/results/a.json.", tmp_path) == []
    for other in (
        "12.4 ms", "1.72 times as fast", "12.3 GB/s", "3x", "72% faster", "4,311 tok/s", "17 s a step", "12–13 ms",
        "12 to 13 ms", "4.4k tokens/s", "13 milliseconds", "12 seconds", "9 s", "3 minutes", "2 hours", "1.8-fold",
        "1.8 times higher", "1.8 times the throughput", "84%", "84 percent", "84 % of", "30% lower", "3.3 GB",
        "3.2 GiB", "2.0 GiB/s", "900 GFLOPS", "16.1 bytes per parameter", "1.8 times", "2.5X", "0.3 msec", "1.5 secs",
        "3.4 Gbps", "80 samples/s", "2,000 steps/s", "4.2 it/s", "50 TFLOP",
    ):  # fmt: skip
        assert unsupported(f"It is {other} there, see benchmarks/results/a.json.", tmp_path) == [other]
    assert unsupported("It takes 12.3 ms.\n\nSee benchmarks/results/a.json.", tmp_path) == ["12.3 ms"]
    assert unsupported("| step | 12.4 ms/step |") == ["12.4 ms"]
    assert unsupported("See benchmarks/results/b.json.", tmp_path) == ["b.json is not there"]
    for claim in (
        "twice as fast", "three times faster", "half the memory", "tenfold faster", "double the throughput",
        "halves the time", "an order of magnitude faster", "factor of two", "factor of 1.7", "a third of the time",
        "twice DeepSpeed's", "five-fold faster", "five-fold",
    ):  # fmt: skip
        assert unsupported(f"It is {claim} here.") == [claim]
    for other in (
        "It may be given twice, as it is.", "Rows of 16 KiB are read whole.", "A step of 8 ranks, 32 x 4.",
        "wherry plan --device-memory 32GB --host-memory=8GB",
    ):  # fmt: skip
        assert unsupported(other) == []


def test_the_page_says_which_files_have_imports_in_their_memory():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    told = "In files of 22 November 2026 and before"
    assert all(told in text[text.index(f"\n## {title}") :][:2000] for title in ("Memory", "Training steps"))
    # Which is said as long as there is such a file.
    assert any(result["date"][:10] <= "2026-11-22" for result in report.load() if result["benchmark"] == "memory")


def test_the_page_says_what_buffers_a_disk_is_measured_with():
    meaning = report.SECTIONS["disk"].meaning
    assert f"one pinned buffer of {disk_bench._PIECE >> 20} MiB" in meaning
    assert f"the whole, {disk_bench.Plan.of(quick=False).size >> 30} GiB" in meaning


def test_every_row_without_a_limit_is_of_a_kind_that_the_page_names():
    """As the head of the page says."""
    yardsticks = ("plain", "limit", "fio", "python", "keep", "this machine")

    def named(result, row):
        benchmark, measure = result["benchmark"], row["case"].get("measure")
        of_limit = row["system"].startswith(yardsticks) or row["case"].get("family") == "memory"
        before = result["date"] < "2026-11-22" and benchmark in ("overhead", "cpu_adam")
        more = {
            "imports": measure != "command", "scaling": measure == "dry run" or row["case"].get("ranks") == 1,
            "overhead": measure == "over plain", "forecast": measure == "step", "tiling": measure != "live",
            "disk": row["system"] in ("wherry threads", "wherry buffered"), "accumulation": measure == "read",
            "construction": row["case"].get("work") == "build within Init" and measure == "time",
            "activations": measure == "fragments" or row["case"].get("measure") is None,
        }  # fmt: skip
        return of_limit or before or more.get(benchmark, False)

    for result in report.load():
        for row in result["rows"]:
            limited = row["reason"] is not None or row["of_limit"] is not None
            assert limited or named(result, row), (result["file"], row["case"], row["system"])


def test_the_pages_that_quote_figures_are_looked_at():
    assert ROOT / "README.md" in PAGES and len(PAGES) > 3


def result_of(benchmark, rows, **more):
    bench.compare(rows)
    return {
        "benchmark": benchmark, "part": "", "file": f"{benchmark}-x.json", "date": "2026-11-20T10:00:00+00:00",
        "complete": True, "quick": False, "load": {"idle": False}, "settings": {}, "seconds": 240.0,
        "versions": {"torch": "2", "deepspeed": "not installed"},
        "machine": {"cpu": "A CPU", "cores": 2, "memory_bytes": 2**34, "gpu": None}, "rows": rows, **more,
    }  # fmt: skip


def test_a_page_from_a_file():
    case = {"model": "10m", "ranks": 2}
    rows = [
        bench.row(case, "wherry-2", "s", [0.1, 0.11, 0.12], tokens_per_s=4654.5),
        bench.row(case | {"measure": "peak memory"}, "wherry-2", "B", [1e9]),
        bench.row(case, "deepspeed-2", "s", [0.2, 0.22, 0.24]),
        bench.row(case, "ddp", "s", [0.05, 0.055, 0.06]),
        bench.row(case, "fsdp2", "s", reason="it is not here"),
    ]
    text, drawn = report.page([result_of("steps", rows)])
    assert "| case | system | value | spread | of limit | Wherry is | tokens/s |" in text
    assert "| 10m, ranks 2 | wherry-2 | 110.0 ms | 9% |  |  | 4,654 |" in text
    assert "|  | deepspeed-2 | 220.0 ms | 9% |  | 2.00× |  |" in text  # of the same case, though measured later
    assert "|  | ddp | 55.0 ms | 9% |  | 0.50× |  |" in text  # worse is shown as such
    assert "| 10m, ranks 2, peak memory | wherry-2 | 1,000.0 MB | once |" in text
    assert "- `fsdp2` could not run: it is not here" in text
    assert "No file holds these yet: Host optimizers (`wherry bench adam`), Disk (`wherry bench disk`), " in text
    assert "Training steps (`" not in text
    assert "Others were at work" in text and "A CPU, 2 cores, 16 GiB; torch 2." in text and "took 4 minutes." in text
    short, _ = report.page([result_of("steps", rows, versions={}, seconds=70.0)])
    assert "A CPU, 2 cores, 16 GiB. **Others" in short and "took 1 minute." in short
    (plot,) = drawn.values()
    assert plot.count("<rect") == 1 + 3 and "220.0 ms" in plot
    assert list(drawn) == ["steps-x.svg"]


def test_a_peer_stands_beside_what_does_the_same():
    def times(peer, *ours, measure="step", **more):
        case = {"measure": measure} | more
        rows = [bench.row(case, name, "s", [value], **dict(*facts)) for name, value, *facts in ours]
        rows.append(bench.row(case, peer, "s", [1.0]))
        bench.compare(rows)
        return summary.times(rows[-1], rows)

    assert times("deepspeed-3", ("wherry-0", 0.1), ("wherry-3", 0.5)) == 2.0
    assert times("fsdp2", ("wherry-0", 0.1), ("wherry-3", 0.5)) == times("ddp", ("wherry-0", 0.5), ("wherry-3", 0.1))
    assert times("fsdp2-cpu", ("wherry-2-cpu at_step", 0.1), ("wherry-3-cpu at_step", 0.5)) == 2.0
    offload = ("wherry-3-nvme at_step", 0.5), ("wherry-3-nvme before_use", 0.25), ("wherry-3-nvme delayed", 0.1)
    assert times("deepspeed-3-nvme", *offload) == 4.0  # late updates are not the same work
    # What Wherry does when nobody chooses: an update that clips waits for the norm.
    offload += (("wherry-3-nvme in_backward", 0.2),)
    assert times("deepspeed-3-nvme", *offload, ("wherry-3-nvme at_step", 0.1), clip=1.0) == 4.0
    assert times("deepspeed-3-nvme", *offload, ("wherry-3-nvme before_use", 0.1), clip=0.0) == 5.0
    assert times("deepspeed-3-nvme-groups", *offload, clip=1.0) == 4.0
    on_device = ("wherry-2-cpu before_use", 0.5), ("wherry-3-cpu before_use", 0.1)
    assert times("deepspeed-3-super", *on_device) == 2.0  # its weights stay on the device
    host = ("wherry-3-cpu k=8", 0.5), ("wherry-3-cpu layer_major k=8", 0.25)
    assert times("fsdp2-cpu k=8", *host) == times("deepspeed-3-cpu k=8", *host) == 2.0  # what nobody chooses
    # In another place is other work.
    assert times("deepspeed-2-cpu", ("wherry-3-cpu before_use", 0.5), clip=1.0) is None
    assert times("fsdp2", ("wherry-3-cpu", 0.5)) is times("fsdp2-cpu", ("wherry-3", 0.5)) is None
    assert times("deepspeed-3-nvme k=8", ("wherry-3-nvme layer_major k=8", 0.5), ("wherry-2 k=8", 0.1)) == 2.0
    isas = [(f"Wherry AdamW, {isa}", value, {"isa": isa}) for isa, value in (("avx512", 0.5), ("avx2", 0.25))]
    assert times("DeepSpeedCPUAdam fp32", *isas) == 2.0  # what Wherry takes there is measured first
    assert times("fio", ("wherry", 0.5), ("wherry threads", 0.25), ("wherry buffered", 0.1)) == 2.0
    assert times("deepspeed", ("wherry", 0.001), ("wherry, engine", 0.5), measure="import") == 2.0
    assert times("deepspeed-3", ("wherry-3", 0.5), measure="read") is None


def test_what_is_lost_in_noise_is_told_as_the_least_that_it_can_be():
    def over(ours, theirs=(6.0, 6.0, 6.0, 6.0, 6.0), cpu=0.5):
        case = {"measure": "over plain", "ranks": 1}
        rows = [bench.row(case, "wherry-3", "us", list(ours), cpu_us=cpu)]
        rows.append(bench.row(case, "deepspeed-3", "us", list(theirs), cpu_us=4.0))
        bench.compare(rows)
        return rows

    def words(rows):
        return report.wherry_is(rows[1], rows)

    assert words(over((1.0, 1.0, 2.0, 2.0, 3.0))) == "3.00×"
    assert words(over((-4.0, -1.0, 0.1, 2.0, 4.0))) == "≥ 3.00×"  # and neither 60, nor what a quarter of rounds are
    assert words(over((-4.0, -1.0, -0.1, 2.0, 4.0))) == "≥ 3.00×"
    assert words(over((-4.0, -1.0, -0.1, -0.1, 4.0))) == ""  # what nothing was, nobody is a multiple of
    assert words(over((1.0,) * 5, (-1.0,) * 5)) == ""
    # The aim goes by the processor's time, which is told of every engine.
    rows = over((-4.0, -1.0, -0.1, -0.1, 4.0))
    text = summary.text([result_of("overhead", rows)], {"overhead": "O"})
    assert "adds to a step, beside ours | 2× | 8.00× | 1 of 1 |" in text
    assert "not measured" in summary._aims([result_of("overhead", over((1.0,) * 5, cpu=-0.5))])


def test_the_first_minute_tells_what_is_reached_and_what_is_not(tmp_path):
    def steps(value, **case):
        names = {f"wherry-3-{place} before_use": value for place in ("nvme", "cpu")}
        names |= {"deepspeed-3-nvme": 1.0, "fsdp2-cpu": 0.2}
        return [bench.row({"measure": "step"} | case, name, "s", [seconds]) for name, seconds in names.items()]

    old = result_of("offload_step", steps(0.1), date="2026-11-19T10:00:00+00:00", file="old.json")
    new = result_of("offload_step", [*steps(0.4, model="10m"), *steps(0.8, model="125m")])
    absent = [bench.row({}, "wherry-3", "s", [1.0]), bench.row({}, "deepspeed-3", "s", reason="not here")]
    text, _ = report.page([old, new, result_of("steps", absent)])
    text = text[: text.index("## Steps with states")]
    link = "[offload_step-x](../benchmarks/results/offload_step-x.json), noisy"
    assert f"beside DeepSpeed's | 2× | 1.25× to 2.50× | 1 of 2 | {link} |" in text and "old.json" not in text
    assert "| fp32 host optimizer, beside DeepSpeed's | 1.1× | not measured | | |" in text
    assert f"| Steps with states on host and disk | 4 | 2 | 0.88× | {link} |" in text
    assert "`fsdp2-cpu`: step, 10m (0.50×); step, 125m (0.25×)" in text
    assert "- `deepspeed-3`: not here" in text


def test_a_peer_that_trained_something_else_counts_nowhere():
    def rows(dtype, **off):
        case = {"dtype": dtype, "measure": "step", "clip": 1.0}
        found = [bench.row(case, "wherry-3-nvme before_use", "s", [0.4], loss_difference=off.get("ours", 0.0))]
        return [*found, bench.row(case, "deepspeed-3-nvme", "s", [1.0], loss_difference=off.get("theirs", 0.0))]

    def shown(*rows):
        text, _ = report.page([result_of("offload_step", list(rows))])
        return text[: text.index("## Steps with states")], text[text.index("## Steps with states") :]

    summarized, table = shown(*rows("fp32", theirs=0.002), *rows("bf16", theirs=0.002))
    assert "| 2× | 2.50× | 1 of 1 |" in summarized
    assert "`deepspeed-3-nvme`: fp32, step, clip 1 (2e-03 off)\n" in summarized
    assert "| 1.00 s | once |  |  | 2e-03 off |" in table and "| 1.00 s | once |  | 2.50× | same |" in table
    summarized, _ = shown(*rows("bf16", theirs=0.02), *rows("fp32", ours=0.02))
    assert "step with optimizer and parameters on disk, beside DeepSpeed's | 2× | not measured |" in summarized
    assert "trained something else" not in shown(*rows("fp32"))[0]
    # Nor does the memory of such a run, though its losses are those of its step.
    strayed = rows("fp32", theirs=0.002)
    of_memory = strayed[0]["case"] | {"measure": "peak memory"}
    systems = ("wherry-3-nvme before_use", "deepspeed-3-nvme")
    memory = [bench.row(of_memory, name, "B", [value]) for name, value in zip(systems, (1e6, 2e6), strict=True)]
    summarized, table = shown(*strayed, *memory)
    assert "`deepspeed-3-nvme`: fp32, step, clip 1 (2e-03 off); fp32, peak memory, clip 1 (2e-03 off)\n" in summarized
    assert "Behind in none of them" in summarized and "| 2.0 MB | once |  |  |" in table
    summarized, table = shown(*rows("fp32"), *memory)
    assert "| 2 | 2 | 2.25× |" in summarized and "| 2.0 MB | once |  | 2.00× |" in table


def test_the_first_minute_has_every_machine_that_was_quiet():
    def file(cpu, seconds, idle):
        case = {"measure": "step"}
        rows = [bench.row(case, "wherry-3-nvme", "s", [seconds]), bench.row(case, "deepspeed-3-nvme", "s", [1.0])]
        machine = {"cpu": cpu, "cores": 2, "memory_bytes": 2**34, "gpu": None}
        return result_of("offload_step", rows, machine=machine, file=f"{cpu}.json", load={"idle": idle})

    text, _ = report.page([file("one", 0.4, True), file("two", 2.0, True), file("three", 0.1, False)])
    text = text[: text.index("## Steps with states")]
    links = ", ".join(f"[{cpu}](../benchmarks/results/{cpu}.json)" for cpu in ("one", "two"))
    assert f"| 2× | 0.50× to 2.50× | 1 of 2 | {links} |" in text and "three" not in text
    assert "- Steps with states on host and disk on two, `deepspeed-3-nvme`: step (0.50×)" in text
    noisy, _ = report.page([file("one", 0.4, False), file("two", 2.0, False)])
    assert "| 2× | 0.50× | 0 of 1 | [two](../benchmarks/results/two.json), noisy |" in noisy


def test_a_run_that_was_ended_tells_nothing_of_the_aims():
    whole = result_of("steps", [bench.row({}, "wherry-3", "s", [1.0])], file="whole.json")
    torso = result_of("steps", whole["rows"], file="torso.json", complete=False, date="2026-11-21T10:00:00+00:00")
    assert summary.latest([whole, torso]) == [whole]


def test_a_file_without_a_place_on_the_page_is_refused_and_no_plot_is_lost(tmp_path, monkeypatch, capsys):
    (tmp_path / "plot.svg").touch()
    monkeypatch.setattr(report, "PLOTS", tmp_path)
    monkeypatch.setattr(report.load, "__defaults__", (tmp_path,))
    (tmp_path / "x.json").write_text(json.dumps(result_of("tea", [])))
    with pytest.raises(WherryError, match=r"x\.json: the page has no place for the benchmark 'tea'; expected one of"):
        report.main([])
    (tmp_path / "x.json").write_text("{")
    assert wherry(["bench", "report"]) == 2
    assert "x.json: is not a whole JSON file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.svg", "x.json"]


def test_machines_of_one_name_are_two():
    def file(model, seconds):
        case = {"measure": "step"}
        rows = [bench.row(case, "wherry-3", "s", [seconds]), bench.row(case, "fsdp2", "s", [1.0])]
        found = {"cpu": "Xeon", "cpu_model": model, "cores": 2, "memory_bytes": 2**34, "gpu": None}
        return result_of("steps", rows, machine=found, file=f"{model}.json", load={"idle": True})

    text, _ = report.page([file("6-106-8", 0.5), file("6-143-8 amx", 2.0)])
    assert "- Training steps on Xeon (6-143-8 amx), `fsdp2`: step (0.50×)" in text
    assert "[6-106-8]" in text and "Xeon (6-106-8), 2 cores" in text


def test_an_aim_counts_every_part_of_a_measure():
    def file(model, seconds, part):
        case = {"model": model, "measure": "step", "clip": 1.0}
        rows = [bench.row(case, "wherry-3-nvme before_use", "s", [seconds])]
        rows.append(bench.row(case, "deepspeed-3-nvme", "s", [1.0]))
        return result_of("offload_step", rows, part=part, file=f"{model}.json", load={"idle": True})

    elsewhere = file("elsewhere", 0.4, "3-cpu")
    for row in elsewhere["rows"]:
        row["system"] = row["system"].replace("nvme", "cpu")
    text, _ = report.page([file("10m", 0.4, ""), file("125m", 0.8, "125m"), elsewhere])
    # A file without rows that it is about is not named.
    links = ", ".join(f"[{model}](../benchmarks/results/{model}.json)" for model in ("10m", "125m"))
    assert f"beside DeepSpeed's | 2× | 1.25× to 2.50× | 1 of 2 | {links} |" in text


def test_every_cause_is_that_of_rows_that_are_there():
    newest = summary.latest(report.load())
    for benchmark, measure, system in summary._CAUSES:
        files = [result for result in newest if result["benchmark"] == benchmark]
        rows = [row for result in files for row, _ in summary._comparisons(result)]
        there = [row for row in rows if (row["case"].get("measure"), row["system"]) == (measure, system)]
        assert there, (benchmark, measure, system)
    imports = [row for result in newest if result["benchmark"] == "imports" for row in result["rows"]]
    sizes = {row["system"]: row["beside_torch"] for row in imports if row["case"]["measure"] == "size"}
    ours, theirs = sizes["wherry"], sizes["deepspeed"]
    more = {name: size for name, size in ours.items() if name not in theirs}
    assert sum(more[name] for name in ("rich", "pygments", "greenlet")) > sum(more.values()) / 2
    assert sum(more.values()) > sum(size for name, size in theirs.items() if name not in ours)


def test_the_first_minute_tells_why_wherry_is_behind():
    def text_of(benchmark, case, ours, theirs, limit=None, peer="deepspeed"):
        rows = [bench.row(case, "wherry", "s", ours), bench.row(case, peer, "s", theirs)]
        if limit is not None:
            rows.append(bench.row(case, "limit", "s", limit))
        result = result_of(benchmark, rows)
        bench.compare(rows, "limit" if limit is not None else None)
        return summary.text([result], {benchmark: "A title"})

    # A peer that is itself at the limit leaves no room to be ahead by much.
    adam = text_of("cpu_adam", {"family": "fp32"}, [1.0], [1.05], [1.0])
    assert "- fp32 host optimizer, beside DeepSpeed's: in the row that falls short DeepSpeed is at 0.95 of" in adam
    assert "which leaves 1.05× at most." in adam
    assert "at most" not in text_of("cpu_adam", {"family": "fp32"}, [1.0], [1.08], [1.2])  # no limit: it was passed
    few = [bench.row({"model": "10m"}, "fsdp2", "s", [1.0])]
    few.append(bench.row({"model": "1b"}, "fsdp2", "s", reason="no memory"))
    assert "- `fsdp2` in 1b: no memory" in summary.text([result_of("scaling", few)], {"scaling": "Scaling"})
    windows = [bench.row({"window": k}, f"fsdp2-nvme k={k}", "s", reason="not on disk") for k in (1, 2, 4, 8)]
    assert summary.text([result_of("accumulation", windows)], {"accumulation": "A"}).count("`fsdp2-nvme`: not") == 1
    assert "of the limit itself" not in text_of("cpu_adam", {"family": "fp32"}, [1.0], [1.05], [0.5])
    assert "(0.91×, within its spread of 20%)" in text_of("steps", {}, [1.1] * 3, [0.8, 1.0, 1.2])
    assert "(0.50×, its spread of 20%)" in text_of("steps", {}, [2.0] * 3, [0.8, 1.0, 1.2])
    size = text_of("imports", {"measure": "size"}, [2.0], [1.0])
    assert "size (0.50×): what pip brings with Wherry" in size
    ddp = text_of("steps", {}, [2.0], [1.0], peer="ddp")
    assert "is ahead in 0 of 1 rows, with a median of 0.50×" in ddp and "Behind in none" in ddp


def test_every_aim_meets_rows_of_its_benchmark():
    """Names of systems and cases that change would leave an aim without rows: those on this machine have them."""
    newest = summary.latest(report.load())
    for aim in summary.AIMS:
        rows = [row for result in newest if result["benchmark"] in aim.benchmarks for row in result["rows"]]
        figures = [aim.figure(row, rows) for row in rows]
        assert "gpu" in aim.benchmarks or any(figure is not None for figure in figures), aim.words


def test_bars_are_as_long_as_their_values():
    drawn = plots.bars("a & b", [plots.Bar("one", 1.0, "1", True), plots.Bar("two", 2.0, "2", False)])
    widths = [float(width) for width in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', drawn)]
    assert widths[1] == 2 * widths[0] and "a &amp; b" in drawn


def test_what_grows_is_drawn_as_curves():
    def row(system, parameters, value):
        case = {"model": str(parameters), "measure": "step"}
        if value is None:
            return bench.row(case, system, "s", reason="no room", parameters=parameters)
        return bench.row(case, system, "s", [value], parameters=parameters)

    sizes = (10_000_000, 100_000_000, 1_000_000_000)
    rows = [row("wherry-3", size, size / 1e10) for size in reversed(sizes)]
    rows += [row("deepspeed-3", size, size / 1e8 if size < 1e9 else None) for size in sizes]
    text, drawn = report.page([result_of("scaling", rows)])
    assert list(drawn) == ["scaling-x-size.svg"] and "](plots/scaling-x-size.svg)" in text
    (plot,) = drawn.values()
    ours, theirs = (re.findall(rf'<circle cx="([\d.]+)" cy="([\d.]+)" r="3" fill="{colour}"', plot)
                    for colour in (plots.OURS, plots.OTHERS))  # fmt: skip
    assert len(ours) == 3 and len(theirs) == 2  # where it did not run there is no point
    across, up = zip(*((float(x), float(y)) for x, y in ours), strict=True)
    # Both scales are of powers: from size to size, and to ten times the value, it is as far.
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2)
    assert up[0] - up[1] == pytest.approx(up[1] - up[2], abs=0.2) and up[0] > up[2]
    assert "wherry-3, 100.0 ms" in plot and "deepspeed-3, 1.00 s" in plot and ">100M<" in plot
    _, few = report.page([result_of("scaling", [row(name, sizes[0], 1.0) for name in ("wherry-3", "deepspeed-3")])])
    assert list(few) == ["scaling-x.svg"]  # one size does not grow


def ratios_as_written(row, rows):
    """What the ratios of a row are by the repeats; rates that are measured twice in a run are a system once."""
    others = {other["system"]: other for other in rows if other["case"] == row["case"]}
    found = {name: bench.times_as_good(row, others[name]) for name in row["ratio"] if name != row["system"]}
    own = {name: ratio for name, ratio in row["ratio"].items() if name == row["system"]}
    return {name: ratio and pytest.approx(ratio, rel=1e-7) for name, ratio in found.items()} | own


def test_every_file_of_results_has_the_common_form():
    for path in sorted(bench.RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        assert {"benchmark", "date", "machine", "versions", "settings", "load", "complete", "rows"} <= set(result), path
        assert result["benchmark"] in report.SECTIONS, path
        for row in result["rows"]:
            assert {"case", "system", "unit", "value", "spread", "ratio", "of_limit", "reason"} <= set(row), path
            assert (row["value"] is None) == (row["reason"] is not None), (path, row)
            assert ratios_as_written(row, result["rows"]) == row["ratio"], (path, row["case"], row["system"])
        text = path.read_text()
        assert not re.search(r'"/(?!s")\w+/', text), f"{path.name}: a path of a machine"
