"""SIGKILL at random instants of training that saves: nothing is lost but the steps since the last save.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.kills --times 200 --seed 0

A process loads the newest checkpoint, and trains and saves until it is killed; the next goes on from there. Each
reports what it is about to do and its states, which are compared with the same training undisturbed, to the bit.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.security.by_hand import Findings, build, digest, forked, in_fork, parser, scratch, train, zero

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError

KEEP = 2
# Steps of one training, after which the next begins in an empty folder, and steps between comparisons of the states.
STEPS, EVERY = 40, 5
SECONDS = 0.25  # in which a process is killed, from its start or from its load


class Setting(NamedTuple):
    stage: int = 0
    behind: bool = False
    tag: str | None = None
    more: dict[str, Any] = zero()

    def engine(self, disk: Path) -> Any:
        own = self.more["wherry"] | {"checkpoint": {"keep_last": KEEP, "async_save": self.behind}}
        return build(self.stage, 1, self.more | {"wherry": own}, disk)


SETTINGS = {
    "plain": Setting(),
    "one-tag-async": Setting(tag="last", behind=True),
    "disk-async": Setting(more=zero("nvme"), behind=True),
    "stage3": Setting(3),
    "infinity": Setting(3, more=zero("nvme", "nvme")),
}


def undisturbed(setting: Setting, disk: Path) -> list[str]:
    """The states after each step."""
    engine = setting.engine(disk)
    found = [digest(engine)]
    for _ in range(STEPS):
        train(engine)
        found.append(digest(engine))
    engine.close()
    return found


def live(setting: Setting, folder: Path, disk: Path, tell: Any) -> None:
    """Go on from the newest checkpoint to the end. Every message is a moment: what comes next, the step, the states."""
    engine = setting.engine(disk)
    tell.send(("loads", 0, ""))
    engine.load_checkpoint(folder)
    tell.send(("trains", engine.global_steps, digest(engine)))
    while engine.global_steps < STEPS:
        train(engine)
        tell.send(("saves", engine.global_steps, "" if engine.global_steps % EVERY else digest(engine)))
        engine.save_checkpoint(folder, tag=setting.tag)
        tell.send(("trains", engine.global_steps, ""))
    engine.close()
    tell.send(("ended", engine.global_steps, ""))


def killed(setting: Setting, folder: Path, disk: Path, rng: random.Random) -> tuple[list[tuple[str, int, str]], int]:
    """What a process had sent when it was killed, one in five perhaps before it had loaded; and its status."""
    heard: list[tuple[str, int, str]] = [("begins", 0, "")]
    loads = rng.random() < 0.8
    with forked(live, setting, folder, disk) as (process, hear), contextlib.suppress(EOFError):
        while loads and heard[-1][0] in ("begins", "loads"):
            heard.append(hear.recv())
        time.sleep(rng.uniform(0.0, SECONDS))
        process.kill()
        while hear.poll():
            heard.append(hear.recv())
    return heard, process.exitcode


def damages(folder: Path) -> Iterator[str]:
    """Checkpoints with a name that are not whole."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith("."):
            try:
                yield from folders.damage(entry, folders.read_manifest(entry))
            except CheckpointError as error:
                yield str(error)


def attack(name: str, times: int, rng: random.Random, home: Path, findings: Findings) -> None:
    setting, folder, disk = SETTINGS[name], home / "checkpoints", home / "disk"
    disk.mkdir(parents=True)
    folder.mkdir()
    oracle = in_fork(undisturbed, setting, disk)
    moments: Counter[str] = Counter()
    saved = 0
    for number in range(times):
        heard, status = killed(setting, folder, disk, rng)
        moments[heard[-1][0]] += 1
        where = f"kill {number}, {saved} had been saved, {heard[-1]}"
        if status not in (0, -9):
            findings.add(name, f"a process ended with status {status}", where)
        for (before, *_), (_, step, states) in itertools.pairwise(heard):
            if states and states != oracle[step]:
                findings.add(name, f"other states than undisturbed, where it {before}", where)
            if before == "loads" and step < saved:
                findings.add(name, "a finished checkpoint is lost", f"{where}: {step} was loaded")
            if before == "saves":  # a save in the background has ended when the next begins
                saved = max(saved, step - setting.behind)
        for damage in damages(folder):
            findings.add(name, "a half checkpoint has a name", f"{where}: {damage}")
        if heard[-1][0] == "ended":
            shutil.rmtree(folder)
            folder.mkdir()
            saved = 0
    with forked(live, setting, folder, disk) as (process, _):
        process.join(120)
    left = [entry.name for entry in folder.iterdir() if entry.name.startswith(".") and any(entry.iterdir())]
    if left := [*left, *(entry.name for entry in disk.iterdir() if any(entry.iterdir()))]:
        findings.add(name, "something is left at the end", ", ".join(left))
    told = ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items()))
    print(f"{name:14} {times} kills, last heard: {told}: {findings.verdict(name)}", flush=True)


def main() -> int:
    options = parser(__doc__.splitlines()[0], 200, list(SETTINGS)).parse_args()
    findings = Findings()
    with scratch() as folder:
        for number, name in enumerate(options.only):
            share = options.times // len(options.only) + (number < options.times % len(options.only))
            attack(name, share, random.Random(f"{options.seed}/{name}"), folder / name, findings)
    return findings.tell()


if __name__ == "__main__":
    sys.exit(main())
