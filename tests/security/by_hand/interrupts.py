"""Ctrl-C at random calls of training, saving and loading, for every placement, in an engine that is used on.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --times 1000 --seed 0
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.security.by_hand import PLACEMENTS, Findings, advance, build, digest, forked, in_fork, run, undisturbed

from wherry.errors import WherryError

HERE = os.path.dirname(__file__)
# Steps from one comparison to the next: each settles, which delayed updates must do at the same steps.
EVERY = 3
# Seconds after which a trial hangs.
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


def open_now() -> Counter[str]:
    """Count the threads and the files of this process."""
    gc.collect()
    found = Counter(thread=len(os.listdir("/proc/self/task")))
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found


class Trials:
    def __init__(self, name: str, seed: int, home: Path, oracle: dict[int, str]) -> None:
        self.name, self.seed, self.home, self.oracle = name, seed, home, oracle
        self.folder = home / "checkpoints"
        self.make()
        advance(self.engine, EVERY)
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

    def cycle(self) -> None:
        """Train from the first checkpoint, save, train on, load and train: the calls that are interrupted."""
        advance(self.engine, 2 * EVERY)
        self.engine.save_checkpoint(self.folder, tag="next")
        advance(self.engine, 3 * EVERY)
        self.engine.load_checkpoint(self.folder, tag="base")
        advance(self.engine, 2 * EVERY)

    def right(self) -> bool:
        return digest(self.engine) == self.oracle[self.engine.global_steps]

    def again(self) -> tuple[str, str] | None:
        """Load the first checkpoint; return what is wrong with that."""
        try:
            self.engine.load_checkpoint(self.folder, tag="base")
            was_right = self.right()
            advance(self.engine, 2 * EVERY)
        except BaseException as error:  # an interrupt that was kept somewhere comes again
            return "load_checkpoint does not make it whole", where(error)
        return None if was_right and self.right() else ("after load_checkpoint states are others than undisturbed", "")

    def go_on(self) -> tuple[str, str] | None:
        """Go on without a load; return what is wrong with that. An error of Wherry's says that it cannot."""
        try:
            self.engine.zero_grad()
            step = self.engine.global_steps
            was_right = step % EVERY > 0 or self.right()
            advance(self.engine, step - step % EVERY + EVERY)
            if not was_right or not self.right():
                return "states are others than undisturbed, in silence", f"from step {step}"
        except WherryError:
            return None
        except BaseException as error:
            return "it goes on to an error that is not Wherry's", where(error)
        return None

    def trial(self, number: int) -> tuple[str, list[tuple[str, str]]]:
        """Interrupt once; return how that ended, and what is wrong."""
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


def serve(
    name: str, numbers: range, seed: int, home: Path, oracle: dict[int, str], send: Callable[[Any], None]
) -> None:
    sys.unraisablehook = lambda _: None  # an interrupt in a finalizer is lost: it is counted
    build(*PLACEMENTS[name], home / "disk").close()  # what is opened once stays open
    before = open_now()
    trials = Trials(name, seed, home, oracle)
    for number in numbers:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        send(trials.trial(number))
    faulthandler.cancel_dump_traceback_later()
    trials.engine.close()
    if more := open_now() - before:
        send(("left open", [("threads or files are left open", f"after close(): {', '.join(more.elements())}")]))


def attack(name: str, numbers: range, seed: int, home: Path, findings: Findings) -> Counter[str]:
    (home / "disk").mkdir()
    oracle = in_fork(undisturbed, lambda: build(*PLACEMENTS[name], home / "disk"), 6 * EVERY, EVERY)
    ends: Counter[str] = Counter()
    with forked(serve, name, numbers, seed, home, oracle) as (process, messages):
        for end, wrong in messages:
            ends[end] += 1
            for kind, details in wrong:
                findings[kind].append(details)
        process.join()
    if process.exitcode:
        kind = f"the process hangs or ends, with status {process.exitcode}"
        findings[kind].append(f"after {ends.total()} trials; a stack may stand above")
    return ends


if __name__ == "__main__":
    sys.exit(run(__doc__, 1000, list(PLACEMENTS), attack))
