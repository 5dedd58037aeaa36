"""A program of the tests: a fine-tuning that is killed and resumed. `killed.py FOLDER TIMES`.

A run kills itself after a number of operations on files, counted from its first on a new checkpoint: within a save,
within a step, or between them. The numbers are drawn, so that a seed repeats them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

from wherry.cli.finetune import main

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
FILES = {"open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree"}


class KillAfter:
    """An audit hook that ends this process at an operation on files."""

    def __init__(self, step: int, operations: int) -> None:
        self.step, self.left, self.counts = step, operations, False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILES:
            return
        named = CHECKPOINT.search(str(arguments[0]))
        self.counts = self.counts or (named is not None and int(named[1]) > self.step)
        self.left -= self.counts
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def finetune(words: list[str], out: Path, kill: KillAfter | None = None) -> int:
    """Run the command in a fork; return its exit status."""
    child = os.fork()
    if child == 0:
        sink = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        status = 1
        if kill is not None:
            sys.addaudithook(kill)
        try:
            status = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def bits(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def newest(run: Path) -> int:
    """The last step whose save has begun."""
    return max((int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("checkpoint-*")), default=0)


def run() -> None:
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    words = [
        str(folder / "llama"),
        f"--data={folder / 'rows.jsonl'}",
        f"--steps={8 * times}",
        "--save-interval=1",
        "--stage=3",
    ]
    words += ["--offload-optimizer=cpu", "--offload-param=none", "--batch-size=4", "--global-batch-size=8", "--lr=0.01"]
    words += ["--samples=1", "--precision=fp32", "--keep-last=3", "--eval-split=4"]
    assert finetune([*words, f"--run-dir={folder / 'whole'}"], folder / "whole.txt") == 0
    draw, steps = random.Random(0), [0]
    again = [*words, f"--run-dir={folder / 'killed'}", "--resume=auto"]
    for _ in range(times):
        status = finetune(again, folder / "killed.txt", KillAfter(steps[-1], draw.randrange(1, 60)))
        assert status == -signal.SIGKILL, (folder / "killed.txt").read_text()[-3000:]
        steps.append(newest(folder / "killed"))
    assert finetune(again, folder / "killed.txt") == 0, (folder / "killed.txt").read_text()[-3000:]
    told = {"kills": times, "steps": steps, "same": bits(folder / "whole") == bits(folder / "killed")}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    run()
