"""Ctrl-C at random calls of training, saving and loading, for every placement, in an engine that is used on.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --times 100 --seed 0
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --only disk-delayed --first 17 --times 1

After it one half drops the window with zero_grad() and goes on from `global_steps`, and the other loads the last
checkpoint. Either that comes to the bits of the same training undisturbed, or an error says that it cannot, and a load
makes all whole again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.security.by_hand import Findings, build, digest, forked, in_fork, parser, scratch, train, zero

from wherry.errors import WherryError

HERE = os.path.dirname(__file__)
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
# Stage, micro-batches of a step, and the rest of the config.
PLACEMENTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "device": (0, 1, zero()),
    "host-delayed": (0, 1, zero("cpu", policy="delayed", delayed_update_warmup=1)),
    "disk-before-use": (2, 1, zero("nvme", policy="before_use")),
    "disk-delayed": (2, 1, zero("nvme", policy="delayed", delayed_update_warmup=1)),
    "stage3": (3, 1, zero()),
    "infinity": (3, 1, zero("nvme", "nvme")),
    "accumulation-in-backward": (3, 2, zero("cpu", policy="in_backward")),
    "fp16-host": (3, 2, zero("cpu") | FP16),
    "async-infinity": (3, 1, zero("nvme", "nvme", checkpoint={"async_save": True})),
}
# Steps from one comparison to the next: each settles, which delayed updates must do at the same steps.
EVERY = 3
# Seconds after which something hangs.
HANGS = 30.0


class Calls:
    """Counts Python's calls and returns from C, which is where it looks for signals, and interrupts at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.count, self.at = 0, at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(HERE) or event not in ("call", "c_return"):
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # the generator's own `finally` would be left out
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            raise KeyboardInterrupt


@contextlib.contextmanager
def profiled(calls: Calls) -> Iterator[None]:
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(None)


def where(error: BaseException) -> str:
    """The error, and its innermost frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(HERE)]
    lines = [f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}: {f.line}" for f in frames]
    return "\n".join([f"{type(error).__name__}: {error}"[:300], *lines[-5:]])


def open_now() -> tuple[int, int]:
    """Count the threads and the files of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def undisturbed(name: str, disk: Path) -> dict[int, str]:
    engine = build(*PLACEMENTS[name], disk)
    found = {}
    while engine.global_steps < 6 * EVERY:
        train(engine)
        if engine.global_steps % EVERY == 0:
            found[engine.global_steps] = digest(engine)
    engine.close()
    return found


class Trials:
    def __init__(self, name: str, seed: int, home: Path, oracle: dict[int, str]) -> None:
        self.name, self.seed, self.home, self.oracle = name, seed, home, oracle
        self.folder = home / "checkpoints"
        self.make()
        self.until(EVERY)
        self.engine.save_checkpoint(self.folder, tag="base")
        self.engine.wait_for_checkpoint()
        self.cycle()
        self.engine.load_checkpoint(self.folder, tag="base")
        with profiled(calls := Calls()):
            self.cycle()
        self.engine.load_checkpoint(self.folder, tag="base")
        self.calls = calls.count

    def make(self) -> None:
        self.engine = build(*PLACEMENTS[self.name], self.home / "disk")

    def until(self, step: int) -> None:
        while self.engine.global_steps < step:
            train(self.engine)

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
        try:
            self.engine.load_checkpoint(self.folder, tag="base")
            was_right = self.right()
            self.until(2 * EVERY)
        except BaseException as error:  # an interrupt that was kept somewhere comes again
            return "load_checkpoint does not make it whole", where(error)
        return None if was_right and self.right() else ("after load_checkpoint states are others than undisturbed", "")

    def go_on(self) -> tuple[str, str] | None:
        """Go on without a load; what is wrong with that. An error of Wherry's says that it cannot."""
        try:
            self.engine.zero_grad()
            step = self.engine.global_steps
            was_right = step % EVERY > 0 or self.right()
            self.until(step - step % EVERY + EVERY)
            if not was_right or not self.right():
                return "states are others than undisturbed, in silence", f"from step {step}"
        except WherryError:
            return None
        except BaseException as error:
            return "it goes on to an error that is not Wherry's", where(error)
        return None

    def trial(self, number: int) -> tuple[str, list[tuple[str, str]]]:
        """Interrupt once; where, and what is wrong."""
        rng = random.Random(f"{self.seed}/{self.name}/{number}")
        loads, calls = rng.random() < 0.5, Calls(rng.randrange(1, self.calls))
        ended, place, wrong = "late", "", []
        try:
            with profiled(calls):
                self.cycle()
            ended = "lost" if calls.count >= calls.at else "late"
        except KeyboardInterrupt as error:
            ended, place = "interrupted", where(error)
        except BaseException as error:
            ended, place = "told" if isinstance(error, WherryError) else "wrong", where(error)
            wrong = [("it becomes an error that is not Wherry's", "")] if ended == "wrong" else []
        torch.set_grad_enabled(True)  # torch.no_grad itself may have been cut short
        if ended in ("interrupted", "lost") and not loads and (found := self.go_on()) is not None:
            wrong.append(found)
        if (found := self.again()) is not None:
            wrong.append(found)
            with contextlib.suppress(BaseException):
                self.engine.close()
            self.make()
        self.engine.load_checkpoint(self.folder, tag="base")
        return ended, [(kind, f"trial {number}: {details}\n{place}") for kind, details in wrong]


def serve(name: str, seed: int, numbers: range, home: Path, oracle: dict[int, str], tell: Any) -> None:
    sys.unraisablehook = lambda _: None  # an interrupt in a finalizer is lost: it is counted
    build(*PLACEMENTS[name], home / "disk").close()  # what is opened once stays open
    before = open_now()
    trials = Trials(name, seed, home, oracle)
    for number in numbers:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        tell.send(trials.trial(number))
    faulthandler.cancel_dump_traceback_later()
    trials.engine.close()
    if open_now() > before:
        tell.send(("", [("threads or files are left open", f"{before} before, {open_now()} after close()")]))


def attack(name: str, seed: int, numbers: range, home: Path, findings: Findings) -> None:
    (home / "disk").mkdir(parents=True)
    oracle = in_fork(undisturbed, name, home / "disk")
    ends: Counter[str] = Counter()
    with forked(serve, name, seed, numbers, home, oracle) as (process, hear):
        with contextlib.suppress(EOFError):
            while True:
                end, wrong = hear.recv()
                ends[end] += 1
                for kind, details in wrong:
                    findings.add(name, kind, details)
        process.join()
    if process.exitcode:
        kind = f"the process hangs or ends, with status {process.exitcode}"
        findings.add(name, kind, f"after {sum(ends.values())} trials; a stack may stand above")
    told = ", ".join(f"{count} {end}" for end, count in ends.most_common() if end)
    print(f"{name:25} {len(numbers)} interrupts, {told}: {findings.verdict(name)}", flush=True)


def main() -> int:
    options = parser(__doc__.splitlines()[0], 100, list(PLACEMENTS)).parse_args()
    findings = Findings()
    with scratch() as folder:
        for name in options.only:
            attack(name, options.seed, range(options.first, options.first + options.times), folder / name, findings)
    return findings.tell()


if __name__ == "__main__":
    sys.exit(main())
