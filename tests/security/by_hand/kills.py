"""SIGKILL before a drawn call that changes the disk, in training that saves: only the steps since the save are lost.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.kills --times 200 --seed 0

A process loads the newest checkpoint, and trains and saves until it is killed; the next goes on from there. Each
reports what it is about to do and its states, which are compared with the same training undisturbed, to the bit.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.harness import before_disk_calls
from tests.security.by_hand import PLACEMENTS, Findings, advance, build, digest, forked, in_fork, run, undisturbed

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError

# Of the placements; in the first that saves behind training, all saves have one tag.
SETTINGS = ["device", "async-device", "stage3", "infinity", "async-infinity"]
# Steps of one training, after which the next begins in an empty folder, and steps between comparisons of the states.
STEPS, EVERY = 40, 5
# Calls that change the disk, before one of which a process is killed: those of a few saves.
CALLS = 100


def live(name: str, folder: Path, disk: Path, calls: int, send: Callable[[Any], None]) -> None:
    """Go on from the newest checkpoint to the end, and send the next activity, the step and the states.

    The process is killed once it has made as many calls that change the disk; with -1 it is not.
    """
    left = itertools.count(calls, -1)

    def count() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = build(*PLACEMENTS[name], disk)
    before_disk_calls(pytest.MonkeyPatch(), count)
    send(("loads", 0, ""))
    engine.load_checkpoint(folder)
    send(("trains", engine.global_steps, digest(engine)))
    while engine.global_steps < STEPS:
        advance(engine, engine.global_steps + 1)
        send(("saves", engine.global_steps, "" if engine.global_steps % EVERY else digest(engine)))
        engine.save_checkpoint(folder, tag="last" if name == "async-device" else None)
        send(("trains", engine.global_steps, ""))
    engine.close()
    send(("ended", engine.global_steps, ""))


def damages(folder: Path) -> Iterator[str]:
    """Checkpoints with a name that are not whole."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith("."):
            try:
                yield from folders.damage(entry, folders.read_manifest(entry))
            except CheckpointError as error:
                yield str(error)


def attack(name: str, numbers: range, seed: int, home: Path, findings: Findings) -> Counter[str]:
    folder, disk, behind = home / "checkpoints", home / "disk", name.startswith("async")
    disk.mkdir()
    folder.mkdir()
    oracle = in_fork(undisturbed, lambda: build(*PLACEMENTS[name], disk), STEPS)
    activities: Counter[str] = Counter()
    saved = 0
    for number in (*numbers, "none"):
        calls = -1 if number == "none" else random.Random(f"{seed}/{name}/{number}").randrange(CALLS)
        with forked(live, name, folder, disk, calls) as (process, messages):
            heard = [("begins", 0, ""), *messages]
            process.join()
        activities[heard[-1][0]] += 1
        where = f"kill {number} after {calls} calls, {saved} had been saved, {heard[-1]}"
        if process.exitcode not in (0, -signal.SIGKILL):
            findings[f"a process ended with status {process.exitcode}"].append(where)
        for (before, *_), (_, step, states) in itertools.pairwise(heard):
            if states and states != oracle[step]:
                findings[f"other states than undisturbed, where it {before}"].append(where)
            if before == "loads" and step < saved:
                findings["a finished checkpoint is lost"].append(f"{where}: {step} was loaded")
            if before == "saves":  # a save in the background has ended when the next begins
                saved = max(saved, step - behind)
        for damage in damages(folder):
            findings["a half checkpoint has a name"].append(f"{where}: {damage}")
        if heard[-1][0] == "ended" and number != "none":
            shutil.rmtree(folder)
            folder.mkdir()
            saved = 0
    left = [entry.name for entry in folder.iterdir() if entry.name.startswith(".") and any(entry.iterdir())]
    left += [entry.name for entry in disk.iterdir() if any(entry.iterdir())]
    if left:
        findings["something is left at the end"].append(", ".join(left))
    return activities


if __name__ == "__main__":
    sys.exit(run(__doc__, 200, SETTINGS, attack))
