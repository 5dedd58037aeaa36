"""`wherry bench`: what this machine's memory and disk give to Wherry, and the settings that suit them.

How Wherry compares with other systems is measured by the scripts in `benchmarks`, which come with the sources.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherry import native
from wherry.config.problems import Parser, did_you_mean
from wherry.errors import WherryError
from wherry.native.loading import ISA_CODES, engine
from wherry.tiers.buffers import HostPool
from wherry.tiers.disk import DiskRecord, DiskStore, DiskUseError
from wherry.tiers.disk_errors import human

Row = dict[str, Any]


def main(argv: list[str]) -> int:
    parser = Parser(prog="wherry bench", description=(__doc__ or "").partition("\n\n")[0])
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    adam = commands.add_parser("adam", help="the host optimizers, against the limit of the memory's bandwidth")
    adam.add_argument("--sizes", type=_numbers, help="numbers of parameters (default 1e6,1e7,1e8)")
    adam.add_argument("--threads", type=_numbers, help="numbers of threads (default 1 and all)")
    adam.add_argument("--isa", help="instruction sets, comma-separated (default: all faster than portable)")
    adam.add_argument("--families", help=f"of {', '.join(FAMILIES)} (default: all)")
    adam.add_argument("--repeats", type=_number, help="repeats of each, in turns (default 9; 3 with --quick)")
    disk = commands.add_parser("disk", help="reads and writes of the disk tier, and the settings that suit it")
    disk.add_argument("--path", required=True, help="a folder on the drive to measure")
    disk.add_argument("--size", type=_number, help="bytes in each measure (1 GiB; 64 MiB with --quick)")
    for command, function in ((adam, bench_adam), (disk, bench_disk)):
        command.add_argument("--quick", action="store_true", help="fewer repeats and sizes, for a first look")
        command.add_argument("--json", type=Path, metavar="PATH", help="write the figures to a file too")
        command.set_defaults(function=function)
    if not argv:
        parser.print_help()
        return 0
    if argv[0].startswith("-"):
        parser.parse_args(argv)
    if argv[0] not in commands.choices:
        parser.error(
            f"there is no measure {argv[0]!r}{did_you_mean(argv[0], commands.choices)}; expected adam or disk. What "
            "compares Wherry with others comes with the sources: python benchmarks/steps.py, and the scripts beside it"
        )
    options = commands.choices[argv[0]].parse_args(argv[1:])
    if options.json is not None and (options.json.is_dir() or not os.access(options.json.parent, os.W_OK)):
        raise WherryError(f"bench: --json {options.json} is a folder, or in one that cannot be written; name a file")
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"this machine is at work already: a load of {busy:.1f} on {os.cpu_count()} CPUs lowers what follows")
    rows: list[Row] = options.function(options)
    if options.json is not None:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
        print(f"written: {options.json}")
    return 0


def _number(text: str) -> int:
    """An argparse type: 3, or 1e8."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(value)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


# The host optimizers: an update's time for each parameter, against an update of the same streams without arithmetic.

_RULE = native.Adam(1e-4, weight_decay=0.1, step=100)
LIMIT = "limit: the same streams"
# Of each family the bytes that one parameter needs moved, and the native library's number for its streams.
FAMILIES = {"fp32": (28, 3), "split": (26, 4), "whole": (28, 5), "bf16 state": (18, 6), "8-bit state": (14, 7)}


@dataclass
class Form:
    """One thing to time: `nbytes` are those that one parameter needs moved."""

    name: str
    nbytes: int
    run: Callable[[], object]


def forms_of(family: str, numel: int, pool: native.Pool, isas: Sequence[str]) -> list[Form]:
    """The limit, Wherry's update by instruction set, and torch's own where it has such a one."""
    nbytes, kind = FAMILIES[family]
    use = engine(isas[0])
    library = use.library
    assert library is not None
    segment, streams = _streams_of(family, numel)
    pointers = (ctypes.c_void_p * 8)(*[tensor.data_ptr() for tensor in streams])
    handle = pool.handle(library)

    def limit(streams: list[Tensor] = streams) -> None:  # whose memory lives as long as what moves it
        library.wherry_limit(use.code, handle, kind, pointers, numel)

    def update(segments: native.PackedSegments) -> None:
        segments.submit(_RULE, 0.5, pool).wait()

    forms = [Form(LIMIT, nbytes, limit)]
    packed = {isa: native.PackedSegments([segment], isa=isa) for isa in isas}
    forms += [Form(f"Wherry, {isa}", nbytes, partial(update, segments)) for isa, segments in packed.items()]
    if family == "fp32":
        w, m, v, g = streams
        parameter = torch.nn.Parameter(w)
        parameter.grad = g
        optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.1, fused=True)
        optimizer.state[parameter].update(step=torch.tensor(100.0), exp_avg=m, exp_avg_sq=v)
        forms.append(Form("torch AdamW fused", nbytes, optimizer.step))
    return forms


def _streams_of(family: str, numel: int) -> tuple[native.Segment, list[Tensor]]:
    """What an update of a family reads and writes, and those tensors in the native library's order."""
    w, g = floats(numel, 0.02), floats(numel, 0.01)
    m, v = floats(numel, 0.001), floats(numel, 0.01).square_()
    if family == "fp32":
        return native.Segment(g, w, state=(m, v)), [w, m, v, g]
    g = g.bfloat16()
    if family == "whole":
        working = w.bfloat16()
        return native.Segment(g, working, w, state=(m, v)), [w, m, v, g, working]
    high, low = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    native.split(w, high, low)
    if family == "split":
        return native.Segment(g, high, low=low, state=(m, v)), [m, v, high, low, g]
    if family == "bf16 state":
        m, v = m.bfloat16(), v.bfloat16()
        return native.Segment(g, high, low=low, state=(m, v)), [high, low, m, v, g]
    m8, v8 = native.Blocks8.zeros(numel, signed=True), native.Blocks8.zeros(numel, signed=False)
    native.quantize(m, m8)
    native.quantize(v, v8)
    return native.Segment(g, high, low=low, state=(m8, v8)), [high, low, m8.codes, v8.codes, g]


def floats(numel: int, scale: float) -> Tensor:
    tile = torch.randn(min(numel, 1 << 16)) * scale
    return tile.repeat(-(-numel // tile.numel()))[:numel].clone()


def time_forms(forms: Sequence[Form], repeats: int) -> dict[str, list[float]]:
    """Seconds of each form's repeats, in another order each time: what the form before leaves in caches meets all."""
    for form in forms:
        form.run()
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    order = random.Random(0)
    for _ in range(repeats):
        for form in order.sample(forms, len(forms)):
            begun = time.perf_counter()
            form.run()
            seconds[form.name].append(time.perf_counter() - begun)
    return seconds


def instruction_sets(wanted: str | None) -> list[str]:
    """Those to measure: as asked for, or all that are faster than portable C++."""
    if native.library() is None:
        raise WherryError(f"bench adam measures the native library, which is not active: {native.why_not()}")
    here = [name for name in native.available_isas() if name in ISA_CODES]
    for name in wanted.split(",") if wanted else ():
        if name not in here:
            raise WherryError(
                f"bench adam: --isa {name} is not a native instruction set of this machine; expected some of "
                f"{', '.join(here)}"
            )
    return wanted.split(",") if wanted else [name for name in here if name != "portable"] or ["portable"]


def bench_adam(options: argparse.Namespace) -> list[Row]:
    isas, every = instruction_sets(options.isa), native.default_pool().threads
    families = options.families.split(",") if options.families else list(FAMILIES)
    if unknown := [name for name in families if name not in FAMILIES]:
        raise WherryError(f"bench adam: --families has no {unknown[0]!r}; expected some of {', '.join(FAMILIES)}")
    sizes = options.sizes or ([10**6, 10**7] if options.quick else [10**6, 10**7, 10**8])
    rows: list[Row] = []
    before = torch.get_num_threads()
    print(f"{'':48}{'ns/param':>9}{'GB/s':>7}{'of limit':>10}")
    try:
        for threads in options.threads or ([every] if options.quick else sorted({1, every})):
            torch.set_num_threads(threads)
            with native.Pool(threads=threads) as pool, torch.no_grad():
                for numel in sizes:
                    for family in families:
                        print(f"{family}, {numel:g} parameters, threads: {threads}")
                        forms = forms_of(family, numel, pool, isas)
                        seconds = time_forms(forms, options.repeats or (3 if options.quick else 9))
                        limit = statistics.median(seconds[LIMIT])
                        for form in forms:
                            median = statistics.median(seconds[form.name])
                            gbps, of_limit = form.nbytes * numel / median / 1e9, limit / median
                            print(f"  {form.name:46}{1e9 * median / numel:9.3f}{gbps:7.1f}{of_limit:10.2f}", flush=True)
                            row = {"family": family, "numel": numel, "threads": threads, "name": form.name}
                            rows.append(row | {"seconds": seconds[form.name], "bytes": form.nbytes})
    finally:
        torch.set_num_threads(before)
    return rows


# The disk: reads, writes and both at once, by block size and depth, and the setting that serves them best.

WORK = ("read", "write", "both")
_PIECE = 64 << 20
# A setting this close to the best is as good as it; the smaller one wins then.
_AS_GOOD = 0.97


def bench_disk(options: argparse.Namespace) -> list[Row]:
    if not os.path.isdir(options.path):
        raise WherryError(f"bench disk: --path {options.path} is not a folder")
    size = options.size or (64 << 20 if options.quick else 1 << 30)
    if size < 8 << 20:
        raise WherryError(f"bench disk: --size {size}: expected {8 << 20} or more")
    blocks = (1 << 20,) if options.quick else (256 << 10, 1 << 20, 4 << 20)
    depths = (8, 32) if options.quick else (4, 8, 16, 32, 64)
    print(f"{'work':<8}{'block':>12}{'depth':>7}{'GB/s':>9}")
    rows: list[Row] = []
    try:
        for block in blocks:
            for depth in depths:
                rows += disk_rows(options.path, size, block, depth, 1 if options.quick else 5)
    except DiskUseError as error:
        raise WherryError(f"bench disk: {error}") from None
    print(f'best here, for the config:\n"aio": {json.dumps(best_settings(rows))}')
    return rows


def disk_rows(path: str, size: int, block: int, depth: int, repeats: int) -> list[Row]:
    """Bytes a second of each kind of work with one block size and depth."""
    seconds: dict[str, list[float]] = {work: [] for work in WORK}
    half = size // 2 // _PIECE * _PIECE or size // 2 // block * block
    with HostPool() as pool, DiskStore(path, name="bench", block_size=block, queue_depth=depth) as store:
        store.attach(pool)
        records = store.reserve("first half", half), store.reserve("second half", half)
        buffers = pool.take(min(half, _PIECE)), pool.take(min(half, _PIECE))
        for buffer in buffers:
            buffer.random_(0, 256)  # zeros, and pages never touched, are cheaper to move
        # Freshly reserved room is slower to write than room that was written before; a run's is, after its first step.
        move(store, (), records, buffers)
        for _ in range(repeats):
            seconds["read"].append(move(store, records, (), buffers))
            seconds["write"].append(move(store, (), records, buffers))
            seconds["both"].append(move(store, records[:1], records[1:], buffers))
        for buffer in buffers:
            pool.give(buffer)
        backend = store.backend
    rows: list[Row] = []
    for work in WORK:
        speed = 2 * half / statistics.median(seconds[work])
        print(f"{work:<8}{human(block):>12}{depth:>7}{speed / 1e9:>9.3f}", flush=True)
        rows.append({"work": work, "block_size": block, "queue_depth": depth, "backend": backend, "speed": speed})
    return rows


def move(
    store: DiskStore, reads: Sequence[DiskRecord], writes: Sequence[DiskRecord], buffers: Sequence[Tensor]
) -> float:
    """Seconds to read and write whole records. Pieces share a buffer: what is measured is the way, not the freight."""
    begun = time.perf_counter()
    tickets = []
    for work, records, buffer in ((store.read, reads, buffers[0]), (store.write, writes, buffers[1])):
        for record in records:
            for offset in range(0, record.nbytes, buffer.numel()):
                tickets.append(work(record, buffer, offset, min(buffer.numel(), record.nbytes - offset)))
    for ticket in tickets:
        ticket.wait()
    return time.perf_counter() - begun


def best_settings(rows: Sequence[Row]) -> dict[str, int]:
    """The smallest block size and depth that are as good as the best, by the mean over all kinds of work."""
    speeds: dict[tuple[int, int], float] = {}
    for row in rows:
        key = row["block_size"], row["queue_depth"]
        speeds[key] = speeds.get(key, 0.0) + math.log(row["speed"])
    floor = max(speeds.values()) + len(WORK) * math.log(_AS_GOOD)
    block, depth = min((key for key, speed in speeds.items() if speed >= floor), key=lambda key: (math.prod(key), key))
    return {"block_size": block, "queue_depth": depth}
