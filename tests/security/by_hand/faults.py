"""Faults of one of two ranks under `wherry run`: all ends, the right rank is blamed, the last checkpoint resumes.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.faults --times 50 --seed 0
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.faults --only stopped killed --times 4

Rank, stage, step and phase are drawn for every number.
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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.programs import WHERE, gone, launched, pids_in
from tests.forks import ROOT
from tests.security.by_hand import Findings, advance, begin_process, build, digest, in_fork, run, source, zero

from wherry.checkpoint import folder as folders
from wherry.testing import run_ranks

STEPS, SAVES_EVERY = 6, 2
# Seconds that ranks wait for each other. Most faults are seen at once, and a program that waits for them hangs.
SHORT, ENDLESS = 6.0, 3600.0
# Seconds after which the launcher hangs.
HANGS = 120.0


def config(stage: int, behind: bool, timeout: float) -> dict[str, Any]:
    more = zero("cpu" if stage == 2 else "none", behind=behind, timeout_s=timeout)
    return more if stage < 2 else more | {"bf16": {"enabled": True}}


# The faults, as the rank commits them, and as the launcher is to tell of them.


def fail() -> None:
    raise ValueError("this rank is unwell")


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@dataclass(frozen=True)
class Fault:
    # Nothing where the program itself takes another way.
    commit: Callable[[], Any] | None
    # A pattern of the error, which names rank {bad} or its peer {good}; and one that it does not match.
    told: str
    timeout: float = ENDLESS
    phases: tuple[str, ...] = ("before", "forward", "backward", "between", "save", "writing")
    never: str = "out of memory"


FAULTS = {
    "raises": Fault(fail, r"rank {bad}(:| failed,) [^\0]*ValueError: this rank is unwell$"),
    "killed": Fault(send(signal.SIGKILL), r"rank {bad} was ended by SIGKILL", never="^$"),
    "stopped": Fault(send(signal.SIGSTOP), r"rank {bad} (did not|has not)", SHORT),
    "exits-3": Fault(lambda: sys.exit(3), r"rank {bad} exited with status 3"),
    "_exits-0": Fault(lambda: os._exit(0), r"rank {bad} (has ended|is gone|has gone|exited)", SHORT),
    "disk-full": Fault(fill_the_disk, r"rank {bad}: [^\0]*File too large", phases=("save",)),
    "interrupted": Fault(send(signal.SIGINT), r"rank {bad}"),
    "skips-save": Fault(None, r"(rank {good} is in save_checkpoint|PeerError)[^\0]*rank {bad}", SHORT, ("skip",)),
    "fewer-steps": Fault(None, r"rank {bad} has ended", phases=("leave",)),
}


def rank_main(kind: str, bad: int, stage: int, step: int, phase: str, behind: bool, home: Path) -> None:
    """Train on a rank, and commit a fault at a step and phase of the bad one."""
    begin_process()
    rank, fault = int(os.environ["RANK"]), FAULTS[kind]
    (home / f"pid.{os.getpid()}").touch()
    engine = build(stage, 1, config(stage, behind, fault.timeout), home)

    def at(here: str) -> bool:
        if rank != bad or here != phase or engine.global_steps != step:
            return False
        (home / "fault").touch()
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
    while engine.global_steps < STEPS:
        at("before")
        if at("leave"):
            break
        advance(engine, engine.global_steps + 1)
        if engine.global_steps % SAVES_EVERY == 0:
            at("save")
            if not at("skip"):
                engine.save_checkpoint(folder)
                if rank == 0:
                    (home / "saved").write_text(str(engine.global_steps - SAVES_EVERY * behind))
    engine.close()


# The program that starts them.


def go_on(stage: int, home: Path, resumes: bool) -> tuple[int, str]:
    """Train to the end, from the newest checkpoint or anew; return the first step, and a digest of the last states."""

    def train_on(comm: Any) -> tuple[int, str]:
        engine = build(stage, 1, config(stage, False, ENDLESS), home, comm)
        if resumes and (home / "checkpoints").is_dir():
            tag = folders.newest_whole(home / "checkpoints")
            if tag is not None:
                engine.load_checkpoint(home / "checkpoints", tag=tag)
        first = engine.global_steps
        advance(engine, STEPS)
        states = digest(engine)
        engine.close()
        return first, states

    source()
    return run_ranks(2, train_on)[0]


def try_once(number: int, kind: str, seed: int, home: Path, findings: Findings) -> str:
    """Commit a fault and note what is wrong; return how the launcher ended."""
    rng, fault = random.Random(f"{seed}/{number}/{kind}"), FAULTS[kind]
    bad, stage, phase, behind = rng.randrange(2), rng.randrange(4), rng.choice(fault.phases), rng.random() < 0.3
    # Saves are after even numbers of steps.
    step = rng.choice((2, 4)) if phase in ("save", "writing", "skip") else rng.randrange(2, STEPS)
    if kind == "disk-full" or phase == "writing":
        behind = False
    (home / "tmp").mkdir(parents=True)
    words = ["rank", kind, bad, stage, step, phase, int(behind), home]
    flags = ("run", "--nproc", 2, "--module", "tests.security.by_hand.faults")
    where = {"PYTHONPATH": os.pathsep.join([WHERE, str(ROOT)]), "TMPDIR": str(home / "tmp")}
    setting = f"{number}: {kind} of rank {bad}, stage {stage}{' async' * behind}, step {step}, {phase}"
    try:
        done = launched(*flags, *words, cwd=home, timeout=HANGS, **where)
        status, end, said = done.returncode, f"ended with {done.returncode}", done.stderr
    except AssertionError:
        status, end, said = None, "hung", ""
    pids = pids_in(home)
    told = fault.told.format(bad=bad, good=1 - bad)
    stays = not gone(pids)
    left = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)] + os.listdir(home / "tmp")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    saved = int((home / "saved").read_text()) if (home / "saved").exists() else 0
    oracle = in_fork(go_on, stage, home / "oracle", False)[1]
    went_on, states = in_fork(go_on, stage, home, True)
    for is_wrong, what in (
        (not (home / "fault").exists(), "the fault was never reached"),
        (status is None or status <= 0, f"the launcher {end}"),
        (not re.search(told, said.rstrip()), "the right rank is not blamed"),
        (re.search(fault.never, said), "a reason is given that is none"),
        (said.count("Traceback") > 1 + said.count("was the direct cause of the"), "it is told more than once"),
        (stays, "ranks are left behind"),
        (left, f"left in shared memory or among temporary files: {left}"),
        (went_on < saved, "a finished checkpoint is lost"),
        (states != oracle, "other states than undisturbed, after going on"),
    ):
        if is_wrong:
            findings[what].append(f"{setting}, went on from step {went_on} of {saved}: {said}")
    print(f"{setting}: {end}, went on from step {went_on} of {saved}", flush=True)
    shutil.rmtree(home)
    return end


def attack(kind: str, numbers: range, seed: int, home: Path, findings: Findings) -> Counter[str]:
    return Counter(try_once(number, kind, seed, home / str(number), findings) for number in numbers)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        name, *numbers, phase, behind, home = sys.argv[2:]
        bad, stage, step = map(int, numbers)
        rank_main(name, bad, stage, step, phase, behind == "1", Path(home))
    else:
        sys.exit(run(__doc__, 50, list(FAULTS), attack))
