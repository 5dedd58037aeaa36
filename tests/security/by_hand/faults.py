"""Faults of one of two ranks under `wherry run`: all end soon, the right one is blamed, the last checkpoint resumes.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.faults --times 50 --seed 0
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.faults --only stopped killed --times 4 --show

Kinds of fault take turns; rank, stage, step and phase are drawn.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from tests.cli.programs import WHERE, gone, launched, pids_in
from tests.forks import ROOT
from tests.security.by_hand import Findings, begin_process, build, digest, in_fork, parser, scratch, source, train, zero

from wherry.checkpoint import folder as folders
from wherry.testing import run_ranks

STEPS, SAVES_EVERY = 6, 2
# What the ranks wait for each other, and what the launcher may take to end, from the fault on: where others see it at
# once, and where they wait for it.
TIMEOUT = 6.0
SOON, LATE = 12.0, TIMEOUT + 12.0


def config(stage: int, behind: bool) -> dict[str, Any]:
    more = zero("cpu" if stage == 2 else "none", timeout_s=TIMEOUT, checkpoint={"async_save": behind, "keep_last": 2})
    return more if stage < 2 else more | {"bf16": {"enabled": True}}


# The faults, as the rank commits them, and as the launcher is to tell of them.


def fail() -> None:
    raise ValueError("this rank is unwell")


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def run_out_of_memory() -> None:
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    torch.empty(1 << 30, dtype=torch.uint8)


def fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@dataclass(frozen=True)
class Fault:
    # Nothing where the program itself takes another way.
    commit: Callable[[], Any] | None
    # What has to be told, of rank {bad} and its peer {good}; and what must not be.
    told: str
    bound: float = SOON
    phases: tuple[str, ...] = ("before", "forward", "backward", "between", "save", "writing")
    never: str = "out of memory"


FAULTS = {
    "raises": Fault(fail, r"rank {bad}(:| failed,) [^\0]*ValueError: this rank is unwell$"),
    "killed": Fault(send(signal.SIGKILL), r"rank {bad} was ended by SIGKILL", never="^$"),
    "segfault": Fault(send(signal.SIGSEGV), r"rank {bad} was ended by SIGSEGV"),
    "stopped": Fault(send(signal.SIGSTOP), r"rank {bad} (did not|has not)", LATE),
    "exits-0": Fault(lambda: sys.exit(0), r"rank {bad} has (ended|failed)"),
    "exits-3": Fault(lambda: sys.exit(3), r"rank {bad} exited with status 3"),
    "_exits-0": Fault(lambda: os._exit(0), r"rank {bad} (has ended|is gone|has gone|exited)"),
    "_exits-3": Fault(lambda: os._exit(3), r"rank {bad} exited with status 3"),
    "memory-error": Fault(lambda: bytearray(1 << 62), r"rank {bad}(:| failed,) [^\0]*MemoryError", never="^$"),
    "memory-limit": Fault(run_out_of_memory, r"rank {bad}(:| failed,) [^\0]*alloc.* memory", never="^$"),
    "disk-full": Fault(fill_the_disk, r"rank {bad}: [^\0]*File too large", phases=("save",)),
    "interrupted": Fault(send(signal.SIGINT), r"rank {bad}"),
    "skips-save": Fault(None, r"(rank {good} is in save_checkpoint|PeerError)[^\0]*rank {bad}", LATE, ("skip",)),
    "fewer-steps": Fault(None, r"rank {bad} has ended", phases=("leave",)),
    "extra-step": Fault(None, r"rank {good} has ended", phases=("stay",)),
}


def rank_main(kind: str, bad: int, stage: int, step: int, phase: str, behind: bool, home: Path) -> None:
    """What a rank runs."""
    begin_process()
    rank, fault = int(os.environ["RANK"]), FAULTS[kind]
    (home / f"pid.{os.getpid()}").touch()
    engine = build(stage, 1, config(stage, behind), home)

    def at(here: str) -> bool:
        if rank != bad or here != phase or engine.global_steps != step:
            return False
        (home / "fault").write_text(str(time.time()))
        if fault.commit is not None:
            fault.commit()
        return True

    def hook(here: str) -> Callable[..., None]:
        return lambda *_: (at(here), None)[1]

    block, fsync = engine.module.blocks[1], os.fsync
    block.register_forward_pre_hook(hook("forward"))
    block.register_forward_hook(lambda _, __, output: (output.register_hook(hook("backward")), None)[1])
    engine.register_forward_hook(hook("between"))
    os.fsync = lambda fd: (at("writing"), fsync(fd))[1]
    folder = home / "checkpoints"
    last = STEPS + 1 if kind == "extra-step" and rank == bad else STEPS
    while engine.global_steps < last:
        at("before")
        if at("leave"):
            break
        train(engine, rank)
        if engine.global_steps % SAVES_EVERY == 0:
            at("save")
            if not at("skip"):
                engine.save_checkpoint(folder)
                if rank == 0:
                    (home / "saved").write_text(str(engine.global_steps - SAVES_EVERY * behind))
        at("stay")
    engine.close()


# The program that starts them.


def on_ranks(ranks: int, stage: int, home: Path, body: Callable[..., Any]) -> Any:
    """What `body(engine, rank)` returns on rank 0 of ranks that are threads."""

    source()

    def rank(comm: Any) -> Any:
        engine = build(stage, 1, config(stage, False), home, comm)
        try:
            return body(engine, comm.rank)
        finally:
            engine.close()

    return run_ranks(ranks, rank)[0]


def go_on(stage: int, home: Path, resumes: bool) -> tuple[int, str]:
    """Train to the end, from the newest checkpoint or anew; the step that it went on from, and the last states."""

    def body(engine: Any, rank: int) -> int:
        if resumes:
            tag = folders.newest_whole(home / "checkpoints") if (home / "checkpoints").is_dir() else None
            if tag is not None:
                engine.load_checkpoint(home / "checkpoints", tag=tag)
        found = engine.global_steps
        while engine.global_steps < STEPS:
            train(engine, rank)
        engine.save_checkpoint(home / "end")
        return found

    def load(engine: Any, rank: int) -> str:
        engine.load_checkpoint(home / "end")
        return digest(engine)

    step = on_ranks(2, stage, home, body)
    return step, on_ranks(1, stage, home, load)


def try_once(number: int, kind: str, seed: int, home: Path, findings: Findings, show: bool) -> None:
    rng, fault = random.Random(f"{seed}/{number}/{kind}"), FAULTS[kind]
    bad, stage, phase, behind = rng.randrange(2), rng.randrange(4), rng.choice(fault.phases), rng.random() < 0.3
    # Saves are after even numbers of steps; the last thing that a rank may miss is the last step.
    step = rng.choice((2, 4)) if phase in ("save", "writing", "skip") else rng.randrange(2, STEPS)
    if kind == "disk-full" or phase == "writing":
        behind = False
    step, home = STEPS if phase == "stay" else step, home / str(number)
    (home / "tmp").mkdir(parents=True)
    words = ["rank", kind, bad, stage, step, phase, int(behind), home]
    flags = ("run", "--nproc", 2, "--module", "tests.security.by_hand.faults")
    where = {"PYTHONPATH": os.pathsep.join([WHERE, str(ROOT)]), "TMPDIR": str(home / "tmp")}
    setting = f"{number}: {kind} of rank {bad}, stage {stage}{' async' * behind}, step {step}, {phase}"

    def wrong(what: str, details: str = "") -> None:
        findings.add(kind, what, f"{setting}\n{details}")

    try:
        done = launched(*flags, *words, cwd=home, timeout=120, **where)
        status, said = done.returncode, done.stderr
    except AssertionError:
        status, said = -1, "the launcher does not end"
    took = time.time() - float((home / "fault").read_text()) if (home / "fault").exists() else float("nan")
    pids = pids_in(home)
    if not (home / "fault").exists():
        wrong("the fault was never reached", said)
    if status <= 0:
        wrong(f"the launcher ended with status {status}", said)
    if took > fault.bound:
        wrong("it ends late", f"after {took:.1f} s: {said}")
    told = fault.told.format(bad=bad, good=1 - bad)
    if not re.search(told, said.rstrip()):
        wrong("the right rank is not blamed", said)
    if re.search(fault.never, said):
        wrong("a reason is given that is none", said)
    if said.count("Traceback") > 1 + said.count("was the direct cause of the following"):
        wrong("it is told more than once", said)
    if not gone(pids):
        wrong("ranks are left behind", said)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    left = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]
    if left := [*left, *os.listdir(home / "tmp")]:
        wrong("something is left in shared memory or among temporary files", ", ".join(left))
    saved = int((home / "saved").read_text()) if (home / "saved").exists() else 0
    oracle = in_fork(go_on, stage, home / "oracle", False)[1]
    went_on, end = in_fork(go_on, stage, home, True)
    if went_on < saved:
        wrong("a finished checkpoint is lost", f"{saved} had been saved, and {went_on} is what is left")
    if end != oracle:
        wrong(f"other states than undisturbed, after going on from step {went_on}")
    print(f"{setting}: ended with {status} after {took:.1f} s, went on from step {went_on} of {saved}", flush=True)
    if show:
        print("    " + said.rstrip().replace("\n", "\n    "), flush=True)
    shutil.rmtree(home)


def main() -> int:
    made = parser(__doc__.splitlines()[0], 50, list(FAULTS))
    made.add_argument("--first", type=int, default=0, help="the number of the first one (default: %(default)s)")
    made.add_argument("--show", action="store_true", help="what the launcher says each time")
    options = made.parse_args()
    findings = Findings()
    with scratch() as folder:
        for number in range(options.first, options.first + options.times):
            kind = options.only[number % len(options.only)]
            try_once(number, kind, options.seed, folder, findings, options.show)
    return findings.tell()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        name, *numbers, phase, behind, home = sys.argv[2:]
        bad, stage, step = map(int, numbers)
        rank_main(name, bad, stage, step, phase, behind == "1", Path(home))
    else:
        sys.exit(main())
