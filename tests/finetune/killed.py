"""A program of the tests: a fine-tuning that is killed at random times and resumed. `killed.py FOLDER TIMES`.

What the runs need is imported once, and each is a process that begins from there.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import datasets  # noqa: F401
import peft  # noqa: F401
import trl

import wherry.finetune.following
import wherry.finetune.place
import wherry.finetune.report  # noqa: F401
from wherry.cli.finetune import main

NOT_YET = os.WEXITED | os.WNOHANG | os.WNOWAIT
trl.SFTTrainer, trl.SFTConfig  # noqa: B018  (they are imported when they are asked for)


def start(words: list[str], out: Path) -> int:
    """A child that fine-tunes, as the command does."""
    child = os.fork()
    if child == 0:
        sink = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        status = 1
        try:
            status = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(status)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def bits(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def newest(run: Path) -> int:
    """The last step that it began to save."""
    return max((int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("checkpoint-*")), default=0)


def run() -> None:
    gc.freeze()
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
    assert ended(start([*words, f"--run-dir={folder / 'whole'}"], folder / "whole.txt")) == 0
    draw, kills, steps = random.Random(0), 0, [0]
    again = [*words, f"--run-dir={folder / 'killed'}", "--resume=auto"]
    while kills < times:
        child = start(again, folder / "killed.txt")
        while newest(folder / "killed") <= steps[-1] and os.waitid(os.P_PID, child, NOT_YET) is None:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.15))  # in the midst of a save, of a step, of what comes between
        os.kill(child, signal.SIGKILL)
        if ended(child) == 0:  # it was quicker
            break
        kills += 1
        steps.append(newest(folder / "killed"))
    assert ended(start(again, folder / "killed.txt")) == 0, (folder / "killed.txt").read_text()[-3000:]
    told = {"kills": kills, "steps": steps, "same": bits(folder / "whole") == bits(folder / "killed")}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    run()
