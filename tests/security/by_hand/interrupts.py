"""Ctrl-C at random instants of training, saving and loading, for every placement, in an engine that is used on.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --times 100 --seed 0
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --only disk-delayed --first 17 --times 1

Half come after a random time, half at a random call of Python's: these come again with the same seed. After it one half
drops the window with zero_grad() and goes on from `global_steps`, and the other loads the last checkpoint. Either that
comes to the bits of the same training undisturbed, or an error says that it cannot, and a load makes all whole again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tests.security.by_hand import Findings, begin_process, build, digest, forks, in_fork, parser, scratch, train, zero
from tests.security.by_hand.ctrl_c import Calls, Fired, interrupt, interrupted, open_now, phase, told, where

from wherry.errors import WherryError

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
BF16 = {"bf16": {"enabled": True}}
ASYNC = {"async_save": True}
# Stage, micro-batches of a step, and the rest of the config.
PLACEMENTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "device": (0, 1, zero()),
    "host-at-step": (0, 1, zero("cpu", policy="at_step")),
    "host-before-use": (0, 1, zero("cpu", policy="before_use")),
    "host-in-backward": (0, 1, zero("cpu", policy="in_backward")),
    "host-delayed": (0, 1, zero("cpu", policy="delayed", delayed_update_warmup=1)),
    "disk-at-step": (2, 1, zero("nvme", policy="at_step")),
    "disk-before-use": (2, 1, zero("nvme", policy="before_use")),
    "disk-in-backward": (2, 1, zero("nvme", policy="in_backward")),
    "disk-delayed": (2, 1, zero("nvme", policy="delayed", delayed_update_warmup=1)),
    "stage3": (3, 1, zero()),
    "stage3-host": (3, 1, zero("cpu", "cpu")),
    "infinity": (3, 1, zero("nvme", "nvme")),
    "accumulation": (3, 2, zero()),
    "accumulation-in-backward": (3, 2, zero("cpu", policy="in_backward")),
    "layer-major": (3, 2, zero(accumulation="layer_major")),
    "fp16": (0, 1, zero() | FP16),
    "fp16-host": (3, 2, zero("cpu") | FP16),
    "bf16-host": (3, 1, zero("cpu") | BF16),
    "async": (0, 1, zero(checkpoint=ASYNC)),
    "async-stage3-host": (3, 1, zero("cpu", checkpoint=ASYNC)),
    "async-infinity": (3, 1, zero("nvme", "nvme", checkpoint=ASYNC)),
}
# Steps from one comparison to the next: each settles, which delayed updates must do at the same steps.
EVERY = 3
# Seconds after which something hangs.
HANGS = 30.0


def undisturbed(name: str, disk: Path) -> dict[int, str]:
    engine = build(*PLACEMENTS[name], disk)
    found = {}
    while engine.global_steps < 6 * EVERY:
        train(engine, whole=name == "layer-major")
        if engine.global_steps % EVERY == 0:
            found[engine.global_steps] = digest(engine)
    engine.close()
    return found


class Trials:
    """One engine, and its interrupts."""

    def __init__(self, name: str, seed: int, folder: Path, oracle: dict[int, str]) -> None:
        self.name, self.seed, self.folder, self.oracle = name, seed, folder, oracle
        self.make()
        self.until(EVERY)
        self.engine.save_checkpoint(folder, tag="base")
        self.engine.wait_for_checkpoint()
        times, calls = [], Calls()
        for counts in (None, None, None, calls):
            begun = time.perf_counter()
            with interrupted(None, counts):
                self.cycle()
            times.append(time.perf_counter() - begun)
            self.engine.load_checkpoint(folder, tag="base")
        self.seconds, self.calls = statistics.median(times[:3]), calls.count

    def make(self) -> None:
        self.engine = build(*PLACEMENTS[self.name], self.folder.parent / "disk")

    def until(self, step: int) -> None:
        while self.engine.global_steps < step:
            train(self.engine, whole=self.name == "layer-major")

    def cycle(self) -> None:
        """From the first checkpoint: what is interrupted."""
        self.until(2 * EVERY)
        self.engine.save_checkpoint(self.folder, tag="next")
        self.until(3 * EVERY)
        self.engine.load_checkpoint(self.folder, tag="base")
        self.until(2 * EVERY)

    def right(self) -> bool:
        return digest(self.engine) == self.oracle[self.engine.global_steps]

    def again(self) -> tuple[str, str] | None:
        """Load the first checkpoint; what is wrong with that."""
        first = ""
        for _ in range(2):
            try:
                self.engine.load_checkpoint(self.folder, tag="base")
                break
            except BaseException as error:  # an interrupt that was kept somewhere comes again
                if first:
                    return "load_checkpoint does not make it whole", told(error)
                first = told(error)
        if not self.right():
            return "after load_checkpoint states are others than undisturbed", ""
        try:
            self.until(2 * EVERY)
        except BaseException as error:
            return "after load_checkpoint no step can be made", told(error)
        if not self.right():
            return f"{EVERY} steps after load_checkpoint states are others than undisturbed", ""
        return ("load_checkpoint has to be called twice", first) if first else None

    def go_on(self) -> tuple[str, str, str]:
        """Without a load: how that ended, what was told or went wrong, and what there is to say of it."""
        engine = self.engine
        try:
            engine.zero_grad()
            step = engine.global_steps
            if step % EVERY == 0 and not self.right():
                return "wrong", "states are others than undisturbed, in silence", f"at step {step}"
            self.until(step - step % EVERY + EVERY)
            if not self.right():
                return "wrong", "states become others than undisturbed, in silence", f"after step {step}"
        except WherryError as error:
            return "told", told(error), ""
        except KeyboardInterrupt as error:
            return "wrong", "the interrupt comes again later", where(error)
        except Exception as error:
            return "wrong", f"it goes on to an error that is not Wherry's: {told(error)}", where(error)
        return "went on", "", ""

    def trial(self, number: int) -> dict[str, Any]:
        """One interrupt; how it ended, where it came, and what is wrong."""
        rng = random.Random(f"{self.seed}/{self.name}/{number}")
        loads, part, by_call = rng.random() < 0.5, rng.random(), rng.random() < 0.5
        calls = Calls(int(part * self.calls)) if by_call else None
        ended, place, doing, wrong = "late", "", "none", []
        try:
            with interrupted(None if by_call else 0.9 * part * self.seconds, calls):
                self.cycle()
            if Fired.so:
                ended = "lost"
        except BaseException as error:
            ended, place, doing = "interrupted", where(error), phase(error)
            if not isinstance(error, KeyboardInterrupt):
                ended = "told" if isinstance(error, WherryError) else "wrong"
                place = f"it became {told(error)}\n{place}"
                wrong = [("it becomes an error that is not Wherry's", "")] if ended == "wrong" else []
        torch.set_grad_enabled(True)  # torch.no_grad itself may have been cut short
        text, more = "", ""
        if ended in ("interrupted", "lost"):
            ended, text, more = ("loaded", "", "") if loads else self.go_on()
            wrong += [(text, more)] if ended == "wrong" else []
        if (failed := self.again()) is not None:
            wrong.append(failed)
            with contextlib.suppress(BaseException):
                self.engine.close()
            self.make()
        self.engine.load_checkpoint(self.folder, tag="base")
        how = f"trial {number}, {'load' if loads else 'go on'}, by {'call' if by_call else 'time'}"
        found = [(f"in {doing}: {kind}", f"{how} {more}\n{place}") for kind, more in wrong]
        return {"number": number, "ended": ended, "doing": doing, "wrong": found, "told": text}


def serve(name: str, seed: int, numbers: range, folder: Path, oracle: dict[int, str], dump: Any, tell: Any) -> None:
    begin_process()
    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = lambda _: None  # an interrupt in a finalizer is lost: it is counted
    build(*PLACEMENTS[name], folder.parent / "disk").close()  # what is opened once stays open
    empty = open_now()
    trials = Trials(name, seed, folder, oracle)
    before: dict[str, int] = {}
    for number in numbers:
        faulthandler.dump_traceback_later(HANGS, exit=True, file=dump)
        tell.send(trials.trial(number))
        if number == numbers.start + min(len(numbers) // 4, 20):
            before = open_now()
    faulthandler.dump_traceback_later(HANGS, exit=True, file=dump)
    after = open_now()
    leaks = [f"{before[key]} {key} became {after[key]}" for key in before if after[key] > 1.1 * before[key] + 2]
    trials.engine.save_checkpoint(folder, tag="next")
    trials.engine.close()
    del trials
    end = open_now()
    leaks += [f"{empty[key]} {key} before, {end[key]} after close()" for key in empty if end[key] > empty[key] + 2]
    leaks += [f"{entry.name} is left among the checkpoints" for entry in folder.iterdir() if entry.name[0] == "."]
    tell.send(leaks)


def attack(name: str, seed: int, numbers: range, home: Path, findings: Findings) -> None:
    (home / "disk").mkdir(parents=True)
    oracle = in_fork(undisturbed, name, home / "disk")
    ends: Counter[str] = Counter()
    doings: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    start, done = numbers.start, False
    while not done:
        folder = home / f"checkpoints{start}"
        hear, tell = forks.Pipe(duplex=False)
        rest = range(start, numbers.stop)
        with open(home / f"stacks{start}", "w+") as dump:
            process = forks.Process(target=serve, args=(name, seed, rest, folder, oracle, dump, tell))
            process.start()
            tell.close()
            try:
                while isinstance(found := hear.recv(), dict):
                    start = found["number"] + 1
                    ends[found["ended"]] += 1
                    doings[found["doing"]] += 1
                    messages[re.sub(r"\d+", "N", found["told"])[:110]] += found["ended"] == "told"
                    for kind, details in found["wrong"]:
                        findings.add(name, kind, details)
                for leak in found:
                    findings.add(name, leak)
                done = True
            except EOFError:
                process.join()
                dump.seek(0)
                stacks = dump.read()
                kind = "it hangs" if "Timeout" in stacks else f"the process ended with status {process.exitcode}"
                ends["died"] += 1
                findings.add(name, kind, f"trial {start}:\n{stacks}")
                start += 1
                done = start >= numbers.stop
            process.join()
    came = ", ".join(f"{count} {doing}" for doing, count in doings.most_common() if doing != "none")
    how = ", ".join(f"{count} {ended}" for ended, count in ends.most_common())
    verdict = f"{findings.of(name)} wrong" if findings.of(name) else "all well"
    print(f"{name:25} {len(numbers)} interrupts ({came}): {how}: {verdict}", flush=True)
    for message, count in messages.most_common(4):
        if count:
            print(f"{'':25} {count} x {message}", flush=True)


def main() -> int:
    made = parser(__doc__.splitlines()[0], 100, list(PLACEMENTS))
    made.add_argument("--first", type=int, default=0, help="the number of the first one (default: %(default)s)")
    options = made.parse_args()
    findings = Findings()
    with scratch() as folder:
        for name in options.only:
            numbers = range(options.first, options.first + options.times)
            attack(name, options.seed, numbers, folder / name, findings)
    return findings.tell()


if __name__ == "__main__":
    sys.exit(main())
