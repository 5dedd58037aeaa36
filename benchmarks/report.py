"""docs/benchmarks.md and its two pictures, from the files in benchmarks/results: python benchmarks/report.py [--check].

Every figure of the page is from these files: how many times as good Wherry is as a peer that has states in the same
place, over all cases that were measured on a machine. The cases themselves are in the files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, plots, systems
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A section of the page: the files that it is from, and what they say in words."""

    title: str
    benchmarks: tuple[str, ...]
    text: str
    # Measures of these files that are left out: what is nobody's claim.
    without: tuple[str, ...] = ()


CLAIMS = (
    Claim(
        "Training steps, states on the device",
        ("steps",),
        "GPT-2 with 10 and 125 million parameters on the CPU, the same batch, seed and cores for all, losses equal to "
        "plain PyTorch's. DDP is compared with stage 0, FSDP2 with stage 3. Peak memory is that of all processes.",
    ),
    Claim(
        "Training steps, states on host and disk",
        ("offload_step",),
        "The same steps with the optimizer, or optimizer and parameters, on host or disk. Wherry's update policy is "
        "before_use, which it chooses by itself.",
    ),
    Claim(
        "Windows of several micro-batches",
        ("accumulation",),
        "Stage 3 with states on host or disk, 1 to 16 micro-batches a step. Wherry's update policy was in_backward.",
        without=("read",),
    ),
    Claim(
        "Steps of Muon",
        ("muon_step",),
        "The same models by Muon and AdamW, in one process, on a processor without units for products in bf16.",
    ),
    Claim(
        "What an engine adds to a step",
        ("overhead",),
        "Four layers of width 64 on one core for each rank: what a system adds to plain PyTorch is its own time.",
        without=("over plain",),
    ),
    Claim(
        "Host optimizers",
        ("cpu_adam",),
        "AdamW on 10 to 300 million parameters; of several instruction sets the best. A bf16 update of Wherry's is one "
        "pass; the usual way takes three.",
    ),
    Claim(
        "Memory of the states",
        ("memory",),
        "Above an empty process, all ranks together, with a batch that hardly counts.",
    ),
    Claim(
        "Building and loading",
        ("construction",),
        "Until an engine can step, and until it has taken a step. Within `Init` Wherry's ranks draw the numbers that "
        "one process would draw, which others leave out: there they are sooner.",
    ),
    Claim(
        "Checkpoints",
        ("checkpoint",),
        "`save` lasts until all is on the disk, `stall` is how long training stood still. torch.save and DeepSpeed "
        "return while their files are in the system's cache.",
    ),
    Claim("The disk", ("disk",), "Reads and writes of the same file with the same block size and depth."),
)
_HEAD = """# Benchmarks

How many times as good Wherry is as others, measured: above 1, Wherry is better. `python benchmarks/report.py` makes
this page from the files in [benchmarks/results](../benchmarks/results), where every case, repeat, spread, machine and
version is; a test compares the two. Values are medians of repeats that were interleaved with those of the other
systems. A cell is the median over all cases that were measured, and the range of them.

All ratios were measured on machines with two cores and no GPU: there the host is the device, and a figure shows what an
engine costs and what its way to the disk gives, not how it overlaps copies with computing.
"""
_TAIL = """## Measure it yourself

`wherry bench adam` and `wherry bench disk --path FOLDER` tell what a machine gives, and which settings suit its disk.
Beside others, from a clone of the sources:

| command | what it measures |
|---|---|
| `make bench` | a quick look at all of it, in about ten minutes |
| `python benchmarks/steps.py resident` | steps beside plain PyTorch, DDP, FSDP2 and DeepSpeed |
| `python benchmarks/steps.py offload --path FOLDER` | the same with states on host and disk |
| `python benchmarks/steps.py window --path FOLDER` | windows, layer by layer and step by step |
| `python benchmarks/overhead.py` | what an engine adds to a step; `--profile` names its calls |
| `python benchmarks/memory.py` | peaks beside the published formulas |
| `python benchmarks/construction.py` | building and loading |
| `python benchmarks/checkpoint.py` | saving and loading |
| `python benchmarks/cpu_adam.py`, `disk.py`, `import_time.py` | optimizers, disk, imports beside others' |
| `python benchmarks/gpu.py` | all that needs a GPU, as below |

`steps.py --before PYTHON` measures another Wherry beside this one, in the same turns.

### A GPU in twelve minutes

`python benchmarks/gpu.py [PART ...]` has six parts of about two minutes (`--deadline`), the most telling first. Each
writes `build/gpu/PART.json` (`--json FOLDER`) as rows come. A request that fails or exceeds its limit leaves a row with
the reason, a part that raises or hangs costs only itself, and rates and steps that another part has measured of the
same sources within the hour are taken over. The losses of every system are compared with ours. The exit status is 1 if
bits, losses or tests are wrong, or a row is empty for another reason than time or what is not installed. `--toy` runs
everything on the emulated device of `tests/accelerator`, at a size that only shows that it works.

| part | what it measures |
|---|---|
| `smoke` | host memory, native kernels, pinning, copies, disk; 40 variants of the Triton kernel |
| `bits` | 20 steps of each update policy beside `at_step`; `tests/gpu` |
| `steps` | 1.1B parameters, 8k tokens: compute alone, each policy, streamed updates, everything on the device |
| `peers` | the same beside the offload of FSDP2 and DeepSpeed |
| `large` | 7B with everything on the host |
| `tokens` | 1.1B at 1k, 4k, 16k and 64k tokens; Qwen3-4B at 4k, 8k and 16k; state on disk |

Each step is compared with two lower bounds. Both use the forward and backward time of the same model without offload,
and the rates of memory and bus, all measured in the same run. An update moves 26 bytes of host memory a parameter, and
copies read or write host memory too. The first bound is the longest of compute, update, and the bus up or down, as if
all of them overlapped. The second is what the order of a step allows: under exact clipping no update starts before the
backward has ended, so it is the backward, and then the longer of forward and update.

Some virtual machines report more memory only after it has been used. There the `smoke` part touches memory first and
passes the amount to the engines; `--host-memory BYTES` sets it. `make gpu` prepares a machine that has torch and no
network: it collects what is missing there in `.whl` and `.native`, 64 MiB at most with the sources, and prints two
commands for it. `make gpu FOR=3.13` is for another Python than 3.12. Files of a GPU go to `benchmarks/results` as
`gpu-PART.json`.
"""


def ours(peer: str, rows: Mapping[str, Row]) -> Row | None:
    """Wherry's row in the place of a peer's, of those of the same case."""
    system, _, rest = peer.partition(" ")
    if system.startswith(("fsdp2", "ddp", "deepspeed-")) and _has_place(system):
        name = f"wherry-{systems.FSDP2.get(system, '0' if system == 'ddp' else system.partition('-')[2])}"
        names = [f"{name} {rest}".strip(), f"{name}:before_use", f"{name} before_use"]
    elif peer.startswith(
        ("DeepSpeedCPUAdam fp32", "DeepSpeedCPUAdam bf16, without", "torch AdamW fused", "three passes, with DeepSpeed")
    ):
        mine = [row for name, row in rows.items() if name.startswith("Wherry")]
        return min(mine, key=lambda row: float(row["value"]), default=None)
    elif peer == "plain" and any("optimizer" in row["case"] for row in rows.values()):
        names = ["wherry-2"]
    else:
        names = {
            "fsdp2-meta": ["wherry-meta"],
            "deepspeed-init": ["wherry-init"],
            "deepspeed": ["wherry"],
            "fsdp2-load": ["wherry-load"],
            "deepspeed-load": ["wherry-load"],
            "torch-save": ["wherry"],
            "dcp": ["wherry"],
            "dcp-async": ["wherry-async"],
            "fio": ["wherry"],
            "deepspeed aio": ["wherry"],
        }.get(peer, [])
    return next((rows[name] for name in names if name in rows), None)


def _has_place(system: str) -> bool:
    return system in systems.FSDP2 or system == "ddp" or system.partition("-")[2] in systems.PLACES


def ratios(result: Mapping[str, Any], claim: Claim) -> Iterator[tuple[tuple[str, str], float]]:
    """By what is measured and the peer: how many times as good Wherry is, for each case in which both ran alike."""
    cases: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        if row["reason"] is None and row["case"].get("measure") not in claim.without:
            cases.setdefault(str(row["case"]), {})[row["system"]] = row
    for rows in cases.values():
        for peer, row in rows.items():
            off = row.get("loss_difference")
            if off is not None and not systems.same_losses(off, row["case"].get("dtype", "fp32")):
                continue  # it trained something else
            mine = ours(peer, rows)
            times = mine and mine["ratio"].get(peer)
            if mine and times:
                case = mine["case"]
                what = case.get("measure") or case.get("work") or case.get("family") or ""
                if "work" in case and "measure" in case:
                    what = f"{case['work']}, {case['measure']}"
                yield (what, peer.partition(" k=")[0]), times


def section(claim: Claim, results: Sequence[Mapping[str, Any]]) -> str:
    found: dict[tuple[str, str], list[float]] = {}
    mine = [result for result in results if _name(result) in claim.benchmarks]
    for result in mine:
        for key, times in ratios(result, claim):
            found.setdefault(key, []).append(times)
    measures = sorted({what for what, _ in found})
    lines = ["| beside | " + " | ".join(measures) + " |", "|---|" + "--:|" * len(measures)]
    for peer in sorted({peer for _, peer in found}):
        cells = [_words(found.get((what, peer), [])) for what in measures]
        lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return f"## {claim.title}\n\n{claim.text}\n\n" + "\n".join(lines) + "\n"


def _words(times: Sequence[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(times):.2f}× ({min(times):.2f}–{max(times):.2f})" if times else ""


def _name(result: Mapping[str, Any]) -> str:
    """Steps with states on host and disk, and those of Muon, are claims of their own."""
    name, parts = str(result["benchmark"]), str(result.get("part", "")).split("-")
    if name != "steps":
        return name
    return "muon_step" if "muon" in parts else {"offload": "offload_step", "window": "accumulation"}.get(parts[0], name)


def pictures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of the latest file of a measure, the case with most systems."""
    found = {}
    for name, title in (("offload_step", "A step with states on host and disk"), ("cpu_adam", "A host update")):
        mine = [result for result in results if _name(result) == name]
        if not mine:
            continue
        cases: dict[str, list[Row]] = {}
        for row in max(mine, key=lambda result: str(result["date"]))["rows"]:
            if row["reason"] is None and row["unit"] != "B" and not row["more_is_better"]:
                words = ", ".join(f"{key} {value}" for key, value in row["case"].items() if key != "measure")
                cases.setdefault(words, []).append(row)
        words, rows = max(cases.items(), key=lambda item: len(item[1]))
        bars = [
            plots.Bar(
                row["system"], row["value"], harness.quantity(row["value"], row["unit"]), "herry" in row["system"]
            )
            for row in rows
        ]
        found[f"{name}.svg"] = plots.bars(f"{title}: {words} (less is better)", bars)
    return found


@dataclass(frozen=True)
class Published:
    """A figure that others have published, with the goal that follows from it here."""

    title: str
    elsewhere: str
    goal: str
    # The systems and the tokens of a step that it is computed from.
    systems: tuple[str, str]
    tokens: int
    compute: Callable[[float, float], str]


_QWEN, _HOST, _DEVICE = "qwen3-4b", "wherry-2-cpu:before_use", "wherry-2:at_step"
PUBLISHED = (
    Published(
        "update that compute does not hide, 2 x 2,048 tokens",
        "4.06 s (prime-rl, issue 3210)",
        "0.8 s at most",
        (_HOST, systems.COMPUTE),
        4096,
        lambda step, compute: f"{step - compute:.2f} s",
    ),
    *(
        Published(
            f"speed beside everything on the device, {tokens:,} tokens",
            f"{elsewhere} without clipping",
            f"{goal} at least",
            (_HOST, _DEVICE),
            tokens,
            lambda step, resident: f"{resident / step:.2f}",
        )
        for tokens, elsewhere, goal in ((8192, "0.44", "0.60"), (16384, "0.90", "0.95"))
    ),
)


def on_a_gpu(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the steps on GPUs, and what others have published of Qwen3-4B on one card beside them."""
    title = "## On a GPU\n\n"
    files = [result for result in results if result["benchmark"] == "gpu" and not result["settings"]["toy"]]
    # A row that several files have for one GPU is the newest that was measured, or the newest reason.
    pairs = [(result, row) for result in files for row in result["rows"]]
    pairs.sort(key=lambda pair: (pair[1]["reason"] is None, pair[0]["date"]))
    rows = {(result["machine"]["gpu"], harness.key(row)): (result, row) for result, row in pairs}
    steps = [(result, row) for result, row in rows.values() if row["case"].get("measure") == "step"]
    if not steps:
        return title + "Nothing has been measured on a GPU yet.\n"
    lines = ["| GPU | model | tokens | system | step | tokens/s | MFU | of all at once | of the bound |"]
    lines.append("|---|---|--:|---|--:|--:|--:|--:|--:|")
    for result, row in steps:
        case = row["case"]
        system = row["system"] + ", clipped" * bool(case["clip"])
        head = f"| {result['machine']['gpu']} | {case['model']} | {case['tokens']:,} | {system} |"
        if row["reason"] is not None:
            lines.append(f"{head} {row['reason']} | | | | |")
            continue
        parts = [f"{row[name]:.2f}" if name in row else "" for name in ("mfu", "of_overlapped", "of_bound")]
        figures = [harness.quantity(row["value"], "s"), f"{row['tokens_per_s']:,.0f}", *parts]
        lines.append(f"{head} {' | '.join(figures)} |")
    checks = [row for _, row in rows.values() if "check" in row["case"]]
    tests = [row for row in checks if "failed" in row]
    policies = [row for row in checks if row not in tests and not row["system"].endswith(":at_step")]
    right, wrong, missing = (sum(row.get("good") is good for row in policies) for good in (True, False, None))
    passed, failed = sum(int(row["value"] or 0) for row in tests), sum(len(row["failed"]) for row in tests)
    lines += [
        "",
        "Policies that have the bits of `at_step`, or whose losses fall if they are to train something else: ",
    ]
    lines[-1] += f"{right} right, {wrong} wrong, {missing} without a result. Tests: {passed} passed, {failed} failed."
    lines += ["", "| Qwen3-4B on one card | elsewhere | goal | here |", "|---|---|---|---|"]
    values = {
        (result["machine"]["gpu"], row["system"], row["case"]["tokens"]): row["value"]
        for result, row in steps
        if row["case"]["model"] == _QWEN and row["value"] is not None
    }
    cards = dict.fromkeys(card for card, *_ in values)
    for figure in PUBLISHED:
        steps_of = {card: [values.get((card, system, figure.tokens)) for system in figure.systems] for card in cards}
        here = [f"{figure.compute(*pair)} ({card})" for card, pair in steps_of.items() if None not in pair]
        lines.append(f"| {figure.title} | {figure.elsewhere} | {figure.goal} | {', '.join(here) or 'not measured'} |")
    return title + "\n".join(lines) + "\n"


def page(results: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
    """The text, and the pictures by name."""
    drawn = pictures(results)
    parts = [_HEAD, *(f"![{name}](plots/{name})\n" for name in drawn)]
    parts += [on_a_gpu(results), *(section(claim, results) for claim in CLAIMS)]
    return "\n".join([*parts, _TAIL]), drawn


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    return [harness.read(path) for path in sorted(folder.glob("*.json"))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not that of the files")
    options = parser.parse_args(argv)
    text, drawn = page(load())
    wanted = {PAGE: text} | {PLOTS / name: plot for name, plot in drawn.items()}
    if options.check:
        stale = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what benchmarks/results says; run python benchmarks/report.py")
        return 1 if stale else 0
    PLOTS.mkdir(parents=True, exist_ok=True)
    for path, content in wanted.items():
        path.write_text(content, encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}, {len(drawn)} pictures")
    return 0


if __name__ == "__main__":
    harness.alone(main)
