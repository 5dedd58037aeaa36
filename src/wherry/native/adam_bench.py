"""`wherry bench adam`: the host optimizers against the limit that this machine's memory sets, and against others.

The limit is measured in the same run, on the same threads and over the same streams: an update without arithmetic.
Within a family of forms the repeats are interleaved, in random order, so that a disturbance and what is left in the
caches meet all of them, and medians are shown.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import random
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from wherry import native
from wherry.errors import WherryError
from wherry.native.loading import ISA_CODES, engine
from wherry.observe import bench

_READ, _COPY, _TRIAD, _FP32, _SPLIT, _WHOLE, _BF16_STATE, _8BIT_STATE = range(8)
_RULE = native.Adam(1e-4, weight_decay=0.1, step=100)
_MULTIPLIER = 0.5


LIMIT = "limit: the same streams"


@dataclass
class Form:
    """One thing to time: `bytes` are those that one element needs moved."""

    name: str
    bytes: int
    run: Callable[[], object]
    isa: str = ""

    @property
    def system(self) -> str:
        return f"{self.name}, {self.isa}" if self.isa and self.name != LIMIT else self.name


class Setting:
    """A size, a pool and the instruction sets to measure."""

    def __init__(self, numel: int, pool: native.Pool, isas: Sequence[str]) -> None:
        self.numel, self.pool, self.isas = numel, pool, isas

    def floats(self, scale: float) -> Tensor:
        tile = torch.randn(min(self.numel, 1 << 16)) * scale
        made = torch.empty(self.numel)
        for i in range(0, self.numel, tile.numel()):
            made[i : i + tile.numel()] = tile[: self.numel - i]
        return made

    def limit(self, kind: int, name: str, size: int, tensors: list[Tensor]) -> list[Form]:
        isa = self.isas[0]
        use = engine(isa)
        assert use.library is not None
        streams = (ctypes.c_void_p * 8)(*[t.data_ptr() for t in tensors])
        handle = self.pool.handle(use.library)
        # `tensors` is bound so that the memory lives as long as the form.
        run = lambda _keep=tensors: use.library.wherry_limit(use.code, handle, kind, streams, self.numel)  # noqa: E731
        return [Form(name, size, run, isa)]

    def wherry(self, name: str, size: int, segment: native.Segment) -> list[Form]:
        forms = []
        for isa in self.isas:
            plan = native.Plan([segment], isa=isa)
            run = lambda plan=plan: plan.submit(_RULE, _MULTIPLIER, self.pool).wait()  # noqa: E731
            forms.append(Form(name, size, run, isa))
        return forms


# The families: forms whose numbers are compared with each other ----------------------------------------------------


def _streams(s: Setting) -> Iterator[Form]:
    a, b, c = s.floats(1.0), s.floats(1.0), s.floats(1.0)
    yield from s.limit(_READ, "read", 4, [a])
    yield from s.limit(_COPY, "copy", 8, [a, c])
    yield from s.limit(_TRIAD, "triad", 12, [a, b, c])


def _fp32(s: Setting) -> Iterator[Form]:
    w, g, m, v = s.floats(0.02), s.floats(0.01), s.floats(0.001), s.floats(0.01).square_()
    yield from s.limit(_FP32, LIMIT, 28, [w, m, v, g])
    yield from s.wherry("Wherry AdamW", 28, native.Segment(g, w, state=(m, v)))
    for name, fused, foreach in (
        ("torch AdamW fused", True, False),
        ("torch AdamW foreach", False, True),
        ("torch AdamW loop", False, False),
    ):
        parameter = torch.nn.Parameter(w)
        parameter.grad = g
        optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.1, fused=fused, foreach=foreach)
        optimizer.state[parameter].update(step=torch.tensor(100.0), exp_avg=m, exp_avg_sq=v)
        yield Form(name, 28, optimizer.step)
    yield from _deepspeed("DeepSpeedCPUAdam fp32", 28, w, g)


def _split(s: Setting) -> Iterator[Form]:
    w = s.floats(0.02)
    hi, low = torch.empty(s.numel, dtype=torch.bfloat16), torch.empty(s.numel, dtype=torch.int16)
    native.split(w, hi, low)
    del w
    g, m, v = s.floats(0.01).bfloat16(), s.floats(0.001), s.floats(0.01).square_()
    yield from s.limit(_SPLIT, LIMIT, 26, [m, v, hi, low, g])
    yield from s.wherry("Wherry AdamW, bf16 with split master", 26, native.Segment(g, hi, low=low, state=(m, v)))
    # It keeps no master at all: fewer bytes, and updates below a bf16 step of the weight are lost.
    yield from _deepspeed("DeepSpeedCPUAdam bf16, without a master", 22, hi, g)


def _whole(s: Setting) -> Iterator[Form]:
    w, m, v = s.floats(0.02), s.floats(0.001), s.floats(0.01).square_()
    working, g = w.bfloat16(), s.floats(0.01).bfloat16()
    yield from s.limit(_WHOLE, LIMIT, 28, [w, m, v, g, working])
    yield from s.wherry("Wherry AdamW, bf16 with whole master", 28, native.Segment(g, working, w, state=(m, v)))


def _lossy(
    s: Setting, kind: int, name: str, size: int, states: tuple[Any, Any], streams: list[Tensor]
) -> Iterator[Form]:
    w = s.floats(0.02)
    hi, low = torch.empty(s.numel, dtype=torch.bfloat16), torch.empty(s.numel, dtype=torch.int16)
    native.split(w, hi, low)
    del w
    g = s.floats(0.01).bfloat16()
    yield from s.limit(kind, LIMIT, size, [hi, low, *streams, g])
    yield from s.wherry(name, size, native.Segment(g, hi, low=low, state=states))


def _bf16_state(s: Setting) -> Iterator[Form]:
    m, v = s.floats(0.001).bfloat16(), s.floats(0.01).square_().bfloat16()
    yield from _lossy(s, _BF16_STATE, "Wherry AdamW, split master, bf16 moments", 18, (m, v), [m, v])
    # Its moments are of the weights' type then, rounded to nearest: what a step adds to them is often lost.
    w, g = s.floats(0.02).bfloat16(), s.floats(0.01).bfloat16()
    yield from _deepspeed("DeepSpeedCPUAdam bf16, bf16 moments, without a master", 14, w, g, fp32_states=False)


def _8bit_state(s: Setting) -> Iterator[Form]:
    m, v = native.Blocks8.zeros(s.numel, signed=True), native.Blocks8.zeros(s.numel, signed=False)
    native.quantize(s.floats(0.001), m)
    native.quantize(s.floats(0.01).square_(), v)
    return _lossy(s, _8BIT_STATE, "Wherry AdamW, split master, 8-bit moments", 14, (m, v), [m.codes, v.codes])


def _host_update(s: Setting) -> Iterator[Form]:
    """The whole update of bf16 training: in one pass, and in the three that the usual way takes."""
    yield from _split(s)
    w, g, m, v = s.floats(0.02), s.floats(0.01), s.floats(0.001), s.floats(0.01).square_()
    working = w.bfloat16()
    for isa in s.isas:
        plan = native.Plan([native.Segment(g, w, state=(m, v))], isa=isa)

        def passes(plan: native.Plan = plan, isa: str = isa) -> None:
            g.mul_(1.0)
            plan.submit(_RULE, 1.0, s.pool).wait()
            native.cast_copy(working, w, pool=s.pool, isa=isa)

        yield Form("three passes, with Wherry's fp32 AdamW", 42, passes, isa)
    for form in _deepspeed("three passes, with DeepSpeedCPUAdam", 42, w, g):

        def deepspeed_passes(step: Callable[[], object] = form.run) -> None:
            g.mul_(1.0)
            step()
            working.copy_(w)

        yield Form(form.name, 42, deepspeed_passes)


def _deepspeed(name: str, size: int, weight: Tensor, grad: Tensor, *, fp32_states: bool = True) -> Iterator[Form]:
    if _without_deepspeed():
        return
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    adam = importlib.import_module("deepspeed.ops.adam")
    optimizer = adam.DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.1, fp32_optimizer_states=fp32_states)
    yield Form(name, size, optimizer.step)


_TRIAL = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
DeepSpeedCPUAdam([parameter]).step()
"""
# Seconds for a compiler, at most.
_PATIENCE = 900.0


@functools.cache
def _without_deepspeed() -> str:
    """Why DeepSpeed's optimizer cannot be measured here; empty when it can. It is built at its first use.

    In a process of its own: one that crashes, or waits for ever, takes no other's rows with it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    try:
        done = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"installed, but its optimizer had not been built after {_PATIENCE:g} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    return f"installed, but its optimizer does not build here: {said[-1]}"


# Family: what makes it, and the bytes that an element of it occupies, others' temporaries included.
FAMILIES: dict[str, tuple[Callable[[Setting], Iterator[Form]], int]] = {
    "memory": (_streams, 12),
    "fp32": (_fp32, 32),
    "split": (_split, 18),
    "whole": (_whole, 24),
    "bf16 state": (_bf16_state, 22),
    "8-bit state": (_8bit_state, 14),
    "host update": (_host_update, 36),
}


def _measure(forms: list[Form], repeats: int) -> dict[str, list[float]]:
    for form in forms:
        form.run()
    seconds: dict[str, list[float]] = {form.system: [] for form in forms}
    # In another order each time: what the form before has left in the caches is the luck of none.
    order = random.Random(0)
    for _ in range(repeats):
        for form in order.sample(forms, len(forms)):
            begin = time.perf_counter()
            form.run()
            seconds[form.system].append(time.perf_counter() - begin)
    return seconds


def _family_rows(name: str, setting: Setting, repeats: int) -> list[bench.Row]:
    make, resident = FAMILIES[name]
    numel = setting.numel
    case = {"family": name, "numel": numel, "threads": setting.pool.threads}
    need, free = resident * numel, psutil.virtual_memory().available
    if need > 0.8 * free:
        note = f"left out: needs {need / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB are free"
        return [bench.row(case, "all", "ns/param", reason=note)]
    forms = list(make(setting))
    seconds = _measure(forms, repeats)
    rows = []
    for form in forms:
        values = [1e9 * value / numel for value in seconds[form.system]]
        gbps = form.bytes / statistics.median(values)
        rows.append(
            bench.row(case, form.system, "ns/param", values, name=form.name, isa=form.isa, bytes=form.bytes, gbps=gbps)
        )
    if name in ("fp32", "split", "bf16 state", "host update") and (why := _without_deepspeed()):
        rows.append(bench.row(case, "DeepSpeedCPUAdam", "ns/param", reason=why))
    bench.compare(rows, LIMIT)
    return rows


def run_bench(
    sizes: Sequence[int],
    threads: Sequence[int],
    isas: Sequence[str],
    families: Sequence[str],
    repeats: int,
    show: Callable[[bench.Row], None] = lambda row: None,
) -> list[bench.Row]:
    """Measure every family at every size and number of threads."""
    rows: list[bench.Row] = []
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            with native.Pool(threads=count) as pool, torch.no_grad():
                for numel in sizes:
                    for family in families:
                        for row in _family_rows(family, Setting(numel, pool, isas), repeats):
                            rows.append(row)
                            show(row)
    finally:
        torch.set_num_threads(before)
    return rows


# A table of 80 columns; the longest name that has its figures beside it.
_NAME = 41
_COLUMNS = f"{'':{_NAME}} {'isa':<8}{'ns/param':>8}{'spread':>7}{'B':>3}{'GB/s':>6}{'limit':>6}"
_LEGEND = "B: bytes that a parameter needs moved. limit: the part reached of the same streams without arithmetic."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, bench.WIDTH, subsequent_indent="  ")


def _sizes(case: dict[str, Any]) -> str:
    return f"{case['numel']:g} parameters, {case['threads']} thread{'s' * (case['threads'] > 1)}"


def _line(row: bench.Row) -> str:
    if row["reason"] is not None:
        return _wrapped(f"{row['system']}: {row['reason']}")
    name, limit = row["name"], "" if row["of_limit"] is None else f"{row['of_limit']:.2f}"
    lead = name.ljust(_NAME) if len(name) <= _NAME else f"{name}\n{'':{_NAME}}"
    figures = f"{row['value']:8.3f}{bench.spread_words(row):>7}{row['bytes']:3d}{row['gbps']:6.1f}{limit:>6}"
    return f"{lead} {row['isa']:<8}{figures}"


def main(argv: list[str] | None = None) -> int:
    """The command. Prints a table; the same goes to a file, with the machine it is of."""
    parser = bench.parser("adam", (__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=bench.positives, help="numbers of parameters (default 1e6,1e7,1e8,3e8)")
    parser.add_argument("--threads", type=bench.positives, help="numbers of threads (default 1 and all)")
    parser.add_argument("--isa", help="instruction sets, comma-separated (default: all faster than portable)")
    parser.add_argument("--families", type=bench.listed(tuple(FAMILIES)), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--repeats", type=bench.positive, help="interleaved repeats of each (default 9)")
    options = bench.parse(parser, argv)
    if native.library() is None:
        raise WherryError(f"bench adam measures the native library, which is not active: {native.why_not()}")
    every = native.default_pool().threads
    fast = [name for name in native.available_isas() if name in ISA_CODES and name != "portable"] or ["portable"]
    isas = options.isa.split(",") if options.isa else fast
    for name in isas:
        if engine(name).library is None:
            raise WherryError(f"bench adam: --isa {name} is not a native instruction set; this machine has {fast}")
    sizes = options.sizes or ([10**6, 10**7] if options.quick else [10**6, 10**7, 10**8, 3 * 10**8])
    threads = options.threads or ([every] if options.quick else sorted({1, every}))
    repeats = options.repeats or (3 if options.quick else 9)
    settings = {"sizes": sizes, "threads": threads, "isas": isas, "repeats": repeats}
    results = bench.Results("cpu_adam", options, settings, limit=LIMIT)
    print(f"{_wrapped(_LEGEND)}\n\n{_COLUMNS}")
    shown: list[dict[str, Any]] = []

    def show(row: bench.Row) -> None:
        if row["case"] not in shown:
            shown.append(row["case"])
            print(f"\n{row['case']['family']}, {_sizes(row['case'])}")
        print(_line(row), flush=True)
        results.add(row)

    run_bench(sizes, threads, isas, options.families or list(FAMILIES), repeats, show)
    _print_verdicts(results.rows)
    results.close()
    return 0


def _print_verdicts(rows: list[bench.Row]) -> None:
    """How much faster one pass is than three, where both were measured."""
    for row in rows:
        if row["case"]["family"] != "host update" or not row["system"].startswith("Wherry"):
            continue
        for other, times in row["ratio"].items():
            if other.startswith("three") and (row["isa"] in other or "DeepSpeed" in other):
                what = f"{_sizes(row['case'])}, {row['isa']}: one pass is {times:.2f} times as fast as {other}"
                print(_wrapped(what))
