"""SIGKILL at random instants of training that saves: nothing is lost but the steps since the last save.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.kills --times 200 --seed 0

A process loads the newest checkpoint, and trains and saves until it is killed; the next goes on from there. Each says
what it is about to do and what it has, and that is compared with the same training undisturbed, to the bit.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.security.by_hand import Findings, begin_process, build, digest, forks, in_fork, parser, scratch, train, zero

from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError

KEEP = 2
# Steps of one training; when it has made them, the next begins in an empty folder.
STEPS = 40
# Steps between those whose states are compared.
EVERY = 5
# Seconds in which a process is killed, from its start or from when it has loaded.
SECONDS = 0.25


@dataclass
class Setting:
    stage: int = 0
    behind: bool = False
    tag: str | None = None
    more: dict[str, Any] = field(default_factory=zero)

    def engine(self, disk: Path) -> Any:
        self.more["wherry"]["checkpoint"] = {"keep_last": KEEP, "async_save": self.behind}
        return build(self.stage, 1, self.more, disk)


SETTINGS = {
    "plain": Setting(),
    "plain-async": Setting(behind=True),
    "one-tag": Setting(tag="last"),
    "one-tag-async": Setting(tag="last", behind=True),
    "disk": Setting(more=zero("nvme")),
    "disk-async": Setting(more=zero("nvme"), behind=True),
    "host-async": Setting(more=zero("cpu"), behind=True),
    "stage3": Setting(3),
    "stage3-async": Setting(3, behind=True),
    "infinity": Setting(3, more=zero("nvme", "nvme")),
}


def undisturbed(setting: Setting, folder: Path) -> list[str]:
    """The states after each step."""
    engine = setting.engine(folder)
    found = [digest(engine)]
    for _ in range(STEPS):
        train(engine)
        found.append(digest(engine))
    engine.close()
    return found


def live(setting: Setting, folder: Path, disk: Path, tell: Any) -> None:
    """Go on from what is there, until the end. Every message is a moment: what comes next, the step, the states."""
    begin_process()
    tell.send(("begins", 0, "", []))
    engine = setting.engine(disk)
    tell.send(("loads", 0, "", []))
    engine.load_checkpoint(folder)
    tell.send(("trains", engine.global_steps, digest(engine), names(folder)))
    while engine.global_steps < STEPS:
        train(engine)
        tell.send(("saves", engine.global_steps, "" if engine.global_steps % EVERY else digest(engine), []))
        engine.save_checkpoint(folder, tag=setting.tag)
        tell.send(("trains", engine.global_steps, "", names(folder)))
    engine.close()
    tell.send(("ended", engine.global_steps, "", []))


def names(folder: Path) -> list[str]:
    return sorted(
        entry.name + ("" if entry.is_file() or any(entry.iterdir()) else "/empty") for entry in folder.iterdir()
    )


class Killer:
    """One setting: its folder, how far it has come, and what of it is wrong."""

    def __init__(self, name: str, folder: Path, rng: random.Random, findings: Findings) -> None:
        self.name, self.setting, self.rng, self.findings = name, SETTINGS[name], rng, findings
        self.home = folder / name
        self.disk = self.home / "disk"
        self.disk.mkdir(parents=True)
        self.oracle = in_fork(undisturbed, self.setting, self.disk)
        self.rounds = self.lost = 0
        self.moments: Counter[str] = Counter()
        self.begin_anew()

    def begin_anew(self) -> None:
        self.rounds += 1
        self.steps = 0
        self.folder = self.home / f"round{self.rounds}"
        self.folder.mkdir()
        self.promised = 0

    def wrong(self, kind: str, details: str = "") -> None:
        self.findings.add(self.name, kind, f"kill {sum(self.moments.values())}, step {self.promised}: {details}")

    def kill_once(self) -> None:
        hear, tell = forks.Pipe(duplex=False)
        process = forks.Process(target=live, args=(self.setting, self.folder, self.disk, tell))
        process.start()
        tell.close()
        heard: list[tuple[str, int, str, list[str]]] = []
        # One in five dies before it has loaded, perhaps.
        if self.rng.random() < 0.8:
            try:
                while not heard or heard[-1][0] != "trains":
                    heard.append(hear.recv())
            except EOFError:
                pass
        time.sleep(self.rng.uniform(0.0, SECONDS))
        process.kill()
        process.join()
        try:
            while hear.poll():
                heard.append(hear.recv())
        except EOFError:
            pass
        hear.close()
        if process.exitcode not in (0, -9):
            self.wrong(f"a process ended with status {process.exitcode}", str(heard[-1:]))
        self.look_at(heard)
        self.look_at_folder()
        if heard and heard[-1][0] == "ended":
            self.begin_anew()

    def look_at(self, heard: list[tuple[str, int, str, list[str]]]) -> None:
        self.moments[heard[-1][0] if heard else "begins"] += 1
        for (before, *_), (moment, step, states, there) in zip([("", 0), *heard], heard, strict=False):
            if states and states != self.oracle[step]:
                self.wrong(f"other states than undisturbed {'after a load' if before == 'loads' else 'in training'}")
            if before == "loads":
                # What is written behind is promised with the next save.
                if step < self.promised:
                    self.wrong("a finished checkpoint is lost", f"{self.promised} had been saved, {step} was loaded")
                left = [name for name in there if name.startswith(".") and not name.endswith("/empty")]
                if left:
                    self.wrong("half-written folders are left after a load", ", ".join(left))
                self.lost = max(self.lost, self.steps - step)
            elif before == "saves":
                self.promised = max(self.promised, step - self.setting.behind)
                tags = [name for name in there if name.startswith("global_step")]
                if len(tags) > KEEP + self.setting.behind:
                    self.wrong(f"more than {KEEP} checkpoints after a save", ", ".join(tags))
            self.steps = step if moment == "trains" else self.steps

    def look_at_folder(self) -> None:
        """Whatever has a checkpoint's name is whole."""
        for entry in self.folder.iterdir():
            if entry.name == folders.LATEST:
                tag = entry.read_text()
                if not (self.folder / tag).is_dir() and not list(self.folder.glob(f".{tag}.replaced.*")):
                    self.wrong("latest names what is not there", tag)
            elif entry.is_dir() and not entry.name.startswith("."):
                try:
                    problems = folders.damage(entry, folders.read_manifest(entry))
                except CheckpointError as error:
                    problems = [str(error)]
                if problems:
                    self.wrong("a half checkpoint has a name", f"{entry.name}: {problems}")

    def end(self) -> None:
        """One undisturbed process more, and what it leaves."""
        in_fork(_finish, self.setting, self.folder, self.disk)
        left = [name for name in names(self.folder) if name.startswith(".")]
        empty = len(list(self.home.glob("round*/.*.partial.*")))
        if [name for name in left if not name.endswith("/empty")]:
            self.wrong("something is left at the end", ", ".join(left))
        if swap := [entry.name for entry in self.disk.iterdir() if any(entry.iterdir())]:
            self.wrong("swap folders are left on the disk", ", ".join(swap))
        moments = ", ".join(f"{count} {moment}" for moment, count in sorted(self.moments.items()))
        verdict = f"{self.findings.of(self.name)} wrong" if self.findings.of(self.name) else "all well"
        print(
            f"{self.name:14} {sum(self.moments.values())} kills, last heard: {moments}; {self.rounds - 1} trainings "
            f"ended, at most {self.lost} saved steps lost, {empty} empty folders wait for their day: {verdict}",
            flush=True,
        )


def _finish(setting: Setting, folder: Path, disk: Path) -> None:
    engine = setting.engine(disk)
    engine.load_checkpoint(folder)
    train(engine)
    engine.save_checkpoint(folder, tag=setting.tag)
    engine.close()


def main() -> int:
    options = parser(__doc__.splitlines()[0], 200, list(SETTINGS)).parse_args()
    findings = Findings()
    with scratch() as folder:
        for number, name in enumerate(options.only):
            rng = random.Random(f"{options.seed}/{name}")
            killer = Killer(name, folder, rng, findings)
            share = options.times // len(options.only) + (number < options.times % len(options.only))
            for _ in range(share):
                killer.kill_once()
            killer.end()
        left = sorted(entry.name for entry in (folder / "tmp").iterdir())
        if left:
            findings.add("all", "temporary files are left", ", ".join(left))
    return findings.tell()


if __name__ == "__main__":
    sys.exit(main())
