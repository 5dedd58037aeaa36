"""A command of a page as it is written, at the size of a toy: `python -m tests.docs.toy train --stage 1`.

Training has few steps of a small model on one rank, and a plan is of a small one; their other flags are obeyed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

SHAPE = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--seq-length=64", "--vocab-size=256"]
STEPS = 3


def toy(words: list[str]) -> list[str]:
    if words[:1] == ["train"] and "--help" not in words:
        resumed = "--resume" in words
        # What goes on from a checkpoint takes its shape from there, and goes further each time.
        shape = SHAPE if not resumed or "auto" in words else []
        before = len(list(Path.cwd().glob("**/metrics*.jsonl"))) if resumed else 0
        ranks = [] if "parallel" in " ".join(words) else ["--nproc", "1"]
        # Those that are recorded are to come.
        steps = [] if "--profile" in words else ["--steps", str(STEPS * (before + 1))]
        return [*words, *shape, *steps, *ranks]
    if words[:1] == ["finetune"]:
        few = [word for number, word in enumerate(words) if "--epochs" not in words[max(0, number - 1) : number + 1]]
        return [*few, "--steps", str(STEPS), "--eval-split", "4", "--samples", "1"]
    if words[:1] == ["generate"]:
        return [*words, "--max-new-tokens", "4"]
    return words


def main() -> int:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    from wherry.cli import main as wherry

    if sys.argv[1:2] == ["finetune"]:
        # Measuring this machine takes longer than the training, and a busy machine is measured each time.
        from wherry.plan import machines, probe

        here = machines.described(machines.known("4090"), gpus=0)
        probe.this_machine = lambda *_, **__: here
    if sys.argv[1:2] == ["plan"]:
        from wherry.sources import SHAPES

        tiny = replace(SHAPES["gpt2-10m"], layers=2, hidden=48)
        SHAPES.update({name: tiny for name in SHAPES if name.startswith("gpt2-")})
    return wherry(toy(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
