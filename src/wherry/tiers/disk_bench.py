"""Measures a path as the disk tier uses it, and names the settings that serve it best: `wherry bench disk --path P`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherry.observe import bench
from wherry.tiers.buffers import HostPool
from wherry.tiers.disk import DiskStore, DiskUseError, Record
from wherry.tiers.disk_errors import human

WORK = ("read", "write", "both")
PEERS = ("fio", "deepspeed")
# What their rows are called.
_NAMES = {"fio": "fio", "deepspeed": "deepspeed aio"}
# Seconds that fio is waited for.
_TIMEOUT = 600.0
_PIECE = 64 << 20
# A setting this close to the best is as good as it; the smaller one wins then.
_AS_GOOD = 0.97

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    size: int
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    repeats: int

    @classmethod
    def of(cls, quick: bool, size: int | None = None) -> Plan:
        if quick:
            return cls(size or 64 << 20, (1 << 20,), (8, 32), 1)
        # 8 is DeepSpeed's default, 16 is ours.
        return cls(size or 1 << 30, (256 << 10, 1 << 20, 4 << 20), (4, 8, 16, 32, 64), 5)


def run_bench(
    path: str,
    quick: bool = False,
    *,
    size: int | None = None,
    peers: Sequence[str] = PEERS,
    say: Say = print,
    keep: Callable[[bench.Row], object] = lambda row: None,
) -> list[bench.Row]:
    """Measure reading, writing and both at once, by block size and depth, with the named peers beside it.

    Every measure is interleaved with the others, on the same drive. Returns a row for each system and case; `say` gets
    the table, line by line, as it grows, and `keep` each row.
    """
    plan = Plan.of(quick, size)
    reasons = {peer: reason for peer in peers if (reason := _cannot_run(peer))}
    here = [peer for peer in peers if peer not in reasons]
    say(f"{'who':<22}{'work':<8}{'block':>10}{'depth':>7}{'GB/s':>9}{'spread':>8}{'of fio':>9}")
    rows: list[bench.Row] = []
    broken: dict[str, str] = {}

    def add(more: list[bench.Row]) -> None:
        for row in more:
            row["of_limit"] = _of_fio(row, [*rows, *more])
            rows.append(row)
            keep(row)
            if row["reason"] is None:
                say(_line(row))

    with HostPool() as pool:
        for block in plan.blocks:
            for depth in plan.depths:
                add(_point(path, None, block, depth, plan, pool, here, broken))
        best = best_settings(rows)
        for backend in ("threads", "buffered"):
            if rows[0]["backend"] != backend:
                add(_point(path, backend, best["block_size"], best["queue_depth"], plan, pool, (), {}))
    add([_absent(work, peer, reasons[peer], **best) for peer in reasons for work in WORK])
    for who, why in dict.fromkeys((row["system"], row["reason"]) for row in rows if row["reason"] is not None):
        say(_wrapped(f"{who}: {why}"))
    if "fio" in here and not _huge_pages_free(max(plan.blocks) * max(plan.depths)):
        say(_wrapped("fio ran on 4 KiB pages where too few huge ones are reserved (vm.nr_hugepages)"))
    return rows


def _of_fio(row: bench.Row, rows: Iterable[bench.Row]) -> float | None:
    """Of fio's speed in the same turns, or else in the same case of this run."""
    if "fio" in row["ratio"] or not row["value"] or row["system"] == "fio":
        return row["ratio"].get("fio")
    beside = [one["value"] for one in rows if one["system"] == "fio" and one["case"] == row["case"] and one["value"]]
    return row["value"] / beside[0] if beside else None


def _wrapped(text: str) -> str:
    return textwrap.fill(text, bench.WIDTH, subsequent_indent="  ")


def _cannot_run(peer: str) -> str | None:
    if peer == "fio":
        return None if shutil.which("fio") else "fio is not installed"
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install '.[bench]')"
    from torch.utils import cpp_extension

    built = Path(cpp_extension._get_build_directory("async_io", False)) / "async_io.so"
    return None if built.is_file() else "its async_io is not compiled here (python benchmarks/peers.py compiles it)"


def best_settings(rows: Iterable[bench.Row]) -> dict[str, int]:
    """The smallest block size and depth that are as good as the best: {"block_size": ..., "queue_depth": ...}."""
    speeds: dict[tuple[int, int], float] = {}
    for row in rows:
        if row["system"] == "wherry" and row["value"]:
            key = row["case"]["block_size"], row["case"]["queue_depth"]
            speeds[key] = speeds.get(key, 0.0) + math.log(row["value"])
    # The geometric mean over reading, writing and both.
    floor = max(speeds.values()) + len(WORK) * math.log(_AS_GOOD)
    block, depth = min((key for key, speed in speeds.items() if speed >= floor), key=lambda key: (math.prod(key), key))
    return {"block_size": block, "queue_depth": depth}


def _case(work: str, block_size: int, queue_depth: int) -> dict[str, Any]:
    return {"work": work, "block_size": block_size, "queue_depth": queue_depth}


def _absent(work: str, who: str, why: str, block_size: int, queue_depth: int) -> bench.Row:
    return bench.row(_case(work, block_size, queue_depth), who, "B/s", reason=why, more_is_better=True)


def _point(
    path: str,
    backend: str | None,
    block: int,
    depth: int,
    plan: Plan,
    pool: HostPool,
    peers: Sequence[str],
    broken: dict[str, str],
) -> list[bench.Row]:
    """One block size and depth: a row for each kind of work and each system.

    `broken` has the peers that failed, and why: they are not tried again.
    """
    name = "wherry" if backend is None else f"wherry {backend}"
    try:
        store = DiskStore(path, name="bench", block_size=block, queue_depth=depth, backend=backend)
    except DiskUseError as error:
        if backend is None:
            raise
        # The folder itself is nobody's business.
        why = str(error).replace(os.path.abspath(path), "the folder")
        return [_absent(work, name, why, block, depth) for work in WORK]
    seconds: dict[tuple[str, str], list[float]] = {}
    with store, ExitStack() as stack:
        store.attach(pool)
        half = plan.size // 2 // _PIECE * _PIECE or plan.size // 2 // block * block
        records = store.reserve("first half", half), store.reserve("second half", half)
        buffers = pool.take(min(half, _PIECE)), pool.take(min(half, _PIECE))
        for buffer in buffers:
            buffer.random_(0, 256)  # as fio does: zeros, and pages never touched, are cheaper to move
        # Freshly reserved room is slower to write than room that was written before; a run's is, after its first step.
        _wherry(store, [], records, buffers)
        subjects: dict[str, Callable[[str], float | None]] = {
            name: lambda work: _wherry(
                store,
                records if work == "read" else records[:1] if work == "both" else (),
                records if work == "write" else records[1:] if work == "both" else (),
                buffers,
            )
        }
        if "fio" in peers and "fio" not in broken:
            subjects["fio"] = lambda work: _fio(records[0], work, block, depth)
        aio_name = _NAMES["deepspeed"]
        if "deepspeed" in peers and aio_name not in broken:
            try:
                aio = stack.enter_context(_deepspeed_aio(records[0].paths[0], block, depth, 2 * half))
                subjects[aio_name] = lambda work: aio[work]() if work in aio else None
            except Exception as error:  # whatever a package that is broken may raise
                broken[aio_name] = _does_not_run("its aio", error)
        for turn in range(plan.repeats):
            for work in WORK:
                for who in list(subjects)[:: 1 if turn % 2 else -1]:
                    try:
                        taken = subjects[who](work)
                    except Exception as error:
                        if who == name:
                            raise
                        broken[who] = _does_not_run("it", error)
                        del subjects[who]
                        continue
                    if taken is not None:
                        seconds.setdefault((who, work), []).append(taken)
        for buffer in buffers:
            pool.give(buffer)
        backend = store.backend
    backends = {"fio": "io_uring", "deepspeed aio": "libaio"}
    rows = [
        bench.row(
            _case(work, block, depth),
            who,
            "B/s",
            [2 * half / value for value in values],
            more_is_better=True,
            backend=backends.get(who, backend),
        )
        for (who, work), values in sorted(seconds.items(), key=lambda item: WORK.index(item[0][1]))
        if who in subjects
    ]
    if aio_name in subjects:
        rows.append(_absent("both", aio_name, "it reads or writes, never both at once", block, depth))
    failed = [_NAMES[peer] for peer in peers if _NAMES[peer] in broken]
    rows += [_absent(work, who, broken[who], block, depth) for who in failed for work in WORK]
    bench.compare(rows)
    return rows


def _does_not_run(what: str, error: Exception) -> str:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return f"installed, but {what} does not run here: {said[-1]}"


def _wherry(store: DiskStore, reads: Sequence[Record], writes: Sequence[Record], buffers: Sequence[Any]) -> float:
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


def _fio(record: Record, work: str, block: int, depth: int) -> float:
    """Seconds that fio takes for the same work on the same file. Two jobs share the depth when it does both at once."""
    half = record.nbytes
    command = ["fio", "--output-format=json", "--ioengine=io_uring", "--direct=1", "--fixedbufs", "--registerfiles"]
    command += [
        f"--mem={'shmhuge' if _huge_pages_free(block * depth) else 'malloc'}",
        "--thread",
        "--invalidate=0",
        "--fallocate=none",
        f"--filename={record.paths[0]}",
        f"--bs={block}",
    ]
    if work == "both":
        shared = [f"--size={half}", f"--iodepth={max(depth // 2, 1)}"]
        command += [
            "--name=r",
            "--rw=read",
            "--offset=0",
            *shared,
            "--name=w",
            "--rw=write",
            f"--offset={half}",
            *shared,
        ]
    else:
        command += ["--name=one", f"--rw={work}", f"--size={2 * half}", f"--iodepth={depth}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {_TIMEOUT:g} s") from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip() or f"it ended with status {done.returncode}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = sum(job[d]["io_bytes"] for job in jobs for d in ("read", "write"))
    assert moved == 2 * half, f"fio moved {moved} bytes of {2 * half}"
    return max(job[d]["runtime"] for job in jobs for d in ("read", "write")) / 1000


def _huge_pages_free(nbytes: int) -> bool:
    """Whether fio can have reserved huge pages: on 4 KiB pages a drive that takes few segments splits its blocks."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return False
    lines = meminfo.read_text().splitlines()
    values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    # Each of two jobs rounds its buffers up.
    return values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0) * 1024 >= nbytes + (16 << 20)


@contextmanager
def _deepspeed_aio(file: str, block: int, depth: int, size: int) -> Iterator[dict[str, Callable[[], float]]]:
    """DeepSpeed's aio on the same file, of that size: seconds of a read and of a write of the whole."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    buffer.random_(0, 256)

    def timed(run: Callable[..., int]) -> Callable[[], float]:
        def seconds() -> float:
            begun = time.perf_counter()
            if run(buffer, file, 0) < 0:
                raise RuntimeError("it could not move the file, and has printed why")
            return time.perf_counter() - begun

        return seconds

    try:
        yield {"read": timed(handle.sync_pread), "write": timed(handle.sync_pwrite)}
    finally:
        handle.free_cpu_locked_tensor(buffer)


def _line(row: bench.Row) -> str:
    case = row["case"]
    head = f"{case['work']:<8}{human(case['block_size']):>10}{case['queue_depth']:>7}"
    of_fio = "" if row["of_limit"] is None else f"{row['of_limit']:.2f}"
    who = f"{row['system']} {row['backend']}" if row["system"] == "wherry" else row["system"]
    return f"{who:<22}{head}{row['value'] / 1e9:>9.3f}{bench.spread_words(row):>8}{of_fio:>9}"


def drive_of(path: str) -> dict[str, Any]:
    """What a path's figures depend on. The path itself is nobody's business."""
    device = os.stat(path).st_dev
    return {"drive": _drive(os.major(device), os.minor(device)), "file_system": _file_system(path)}


def _drive(major: int, minor: int) -> str:
    block = Path(f"/sys/dev/block/{major}:{minor}")
    for folder in (block, block / ".."):
        model = folder / "device" / "model"
        if model.is_file():
            return model.read_text().strip()
    return block.resolve().name if block.exists() else "unknown"


def _file_system(path: str) -> str:
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    real = os.path.realpath(path)
    rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [(len(at), kind) for at, kind in rows if os.path.commonpath([real, at]) == at]
    return max(holding, default=(0, "unknown"))[1]


def main(argv: Sequence[str] | None = None) -> int:
    """The `wherry bench disk` command."""
    parser = bench.parser("disk", __doc__ or "")
    parser.add_argument("--path", type=bench.folder, required=True, help="a folder on the drive to measure")
    parser.add_argument("--size", type=bench.positive, help="bytes in each measure (1 GiB; 64 MiB with --quick)")
    peers = bench.listed(PEERS, or_none=True)
    parser.add_argument("--peers", type=peers, default=list(PEERS), help=f"of {', '.join(PEERS)}, or none (all)")
    options = bench.parse(parser, argv)
    if options.size is not None and options.size < 8 << 20:
        parser.error(f"--size {options.size}: expected {8 << 20} or more")
    plan = Plan.of(options.quick, options.size)
    results = bench.Results("disk", options, vars(plan) | drive_of(options.path))
    try:
        rows = run_bench(options.path, options.quick, size=options.size, peers=options.peers, keep=results.add)
    except DiskUseError as error:
        parser.error(str(error))
    best = best_settings(rows)
    print(f'best here, for the config:\n"aio": {json.dumps(best)}')
    results.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
