"""Builds what the peers compile at their first use, so that no benchmark waits: python benchmarks/peers.py.

DeepSpeed's host optimizer takes about a minute, its aio as long, which needs libaio's header (Debian: libaio-dev).
What cannot be built is named with the reason; its rows will say so too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import systems

OPERATORS = ("CPUAdamBuilder", "AsyncIOBuilder")
# What ranks of one machine communicate by, where there is no GPU.
ON_THE_CPU = ("ShareMemCommBuilder",)
_BUILD = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("{name}").load(verbose=False)
"""


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="wherry bench peers", description=__doc__).parse_args(argv)
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed (pip install '.[bench]'): its rows will say so")
        return 0
    # The compiler is found by the ninja of this environment.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    environment, operators = {**os.environ, "PATH": path}, OPERATORS
    if systems.device_type() == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"  # or it looks for a GPU, and says that there is none
        operators += ON_THE_CPU
    for name in operators:
        command = [sys.executable, "-c", _BUILD.format(name=name)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        print(f"{name}: {'built' if done.returncode == 0 else f'not built: {last}'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
