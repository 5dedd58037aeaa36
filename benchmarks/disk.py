"""The disk tier beside fio and DeepSpeed's aio on the same file: python benchmarks/disk.py --path FOLDER [--quick].

Bytes a second of reading, writing and both at once, with one block size and depth, in turns. Wherry goes through one
pinned buffer of 64 MiB for what it reads and one for what it writes; DeepSpeed's aio moves the whole by one pinned
buffer of that size, on one thread; fio has a buffer of a block for each of its depth.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, systems
from benchmarks.build_peers import built
from wherry.cli.bench import WORK, move
from wherry.errors import WherryError
from wherry.tiers.buffers import HostPool
from wherry.tiers.disk import DiskStore

_PIECE = 64 << 20
Subject = Callable[[], float]


def measure(path: str, size: int, block: int, depth: int, rounds: int) -> list[harness.Row]:
    rows: list[harness.Row] = []
    half = size // 2
    with HostPool() as pool, DiskStore(path, name="bench", block_size=block, queue_depth=depth) as store:
        store.attach(pool)
        records = store.reserve("first half", half), store.reserve("second half", half)
        buffers = pool.take(min(half, _PIECE)), pool.take(min(half, _PIECE))
        for buffer in buffers:
            buffer.random_(0, 256)  # as fio does: zeros, and pages never touched, are cheaper to move
        move(store, (), records, buffers)  # room that was written before, as a run's is
        aio, why_not = _deepspeed_aio(store.paths[0], block, depth, 2 * half)
        for work in WORK:
            case = {"work": work, "block_size": block, "queue_depth": depth}
            reads, writes = {"read": (records, ()), "write": ((), records), "both": (records[:1], records[1:])}[work]
            subjects: dict[str, Subject] = {"wherry": partial(move, store, reads, writes, buffers)}
            absent = {}
            if shutil.which("fio"):
                subjects["fio"] = partial(_fio, store.paths[0], half, work, block, depth)
            else:
                absent["fio"] = "fio is not installed"
            if work in aio:
                subjects["deepspeed aio"] = aio[work]
            else:
                absent["deepspeed aio"] = why_not or "it reads or writes, never both at once"
            for name, seconds in harness.interleave(subjects, rounds).items():
                values = [2 * half / value for value in seconds]
                rows.append(harness.row(case, name, "B/s", values, more_is_better=True))
            rows += [harness.row(case, name, "B/s", reason=why) for name, why in absent.items()]
        for buffer in buffers:
            pool.give(buffer)
    return rows


def _fio(path: str, half: int, work: str, block: int, depth: int) -> float:
    """Seconds that fio takes for the same work on the same file. Two jobs share the depth when it does both at once."""
    command = ["fio", "--output-format=json", "--ioengine=io_uring", "--direct=1", "--fixedbufs", "--registerfiles"]
    command += ["--thread", "--invalidate=0", "--fallocate=none", f"--filename={path}", f"--bs={block}"]
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise WherryError(f"fio: {done.stderr.strip() or done.stdout.strip()}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return max(float(job[way]["runtime"]) for job in jobs for way in ("read", "write")) / 1000


def _deepspeed_aio(file: str, block: int, depth: int, size: int) -> tuple[dict[str, Subject], str | None]:
    """DeepSpeed's aio on the same file: its reading and its writing of the whole, or why there is none."""
    reason = systems.cannot_run("deepspeed-0")
    if reason is None and not built("async_io").is_file():
        reason = "its async_io is not compiled here (python benchmarks/build_peers.py compiles it)"
    if reason is not None:
        return {}, reason
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle: Any = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    buffer.random_(0, 256)

    def timed(run: Callable[..., int]) -> float:
        begun = time.perf_counter()
        if run(buffer, file, 0) < 0:
            raise WherryError("DeepSpeed's aio could not move the file, and has printed why")
        return time.perf_counter() - begun

    return {"read": partial(timed, handle.sync_pread), "write": partial(timed, handle.sync_pwrite)}, None


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--path", type=harness.folder, required=True, help="a folder on the drive to measure")
    parser.add_argument("--blocks", type=harness.positives, default=[1 << 20, 4 << 20], help="bytes of a block")
    parser.add_argument("--depths", type=harness.positives, default=[8, 16, 32], help="blocks under way at once")
    options = harness.parse(parser, argv)
    size, rounds = (64 << 20, 1) if options.quick else (1 << 30, options.rounds or 5)
    results = harness.Results("disk", options, {"size": size, "rounds": rounds})
    for block in options.blocks:
        for depth in options.depths:
            results.add(*measure(options.path, size, block, depth, rounds))
    harness.show(results.rows)
    results.close()
    return 0


if __name__ == "__main__":
    harness.alone(main)
