"""Builds what the peers compile at their first use, so that no benchmark waits: python benchmarks/build_peers.py.

DeepSpeed's host optimizer takes about a minute, its aio as long, which needs libaio's header (Debian: libaio-dev).
What cannot be built is named with the reason; its rows will say so too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, systems

HOST_OPTIMIZER = "CPUAdamBuilder"
OPERATORS = (HOST_OPTIMIZER, "AsyncIOBuilder")
# What ranks of one machine communicate by, where there is no GPU.
ON_THE_CPU = ("ShareMemCommBuilder",)
# Seconds for a compiler, at most.
TIMEOUT = 900.0
_BUILD = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("{name}").load(verbose=False)
"""


def build(name: str, timeout: float | None = None) -> str | None:
    """Compile an operator, if it is not yet; why it could not be."""
    systems.remove_dead_locks()  # of one that was interrupted, for which this would wait without end
    # The compiler is found by the ninja of this environment.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    if systems.device_type() == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"  # or it looks for a GPU, and says that there is none
    with subprocess.Popen(
        [sys.executable, "-c", _BUILD.format(name=name)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            said = process.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # compilers that it started, too
            return f"it was not compiled within {timeout:.0f} s"
    return None if process.returncode == 0 else (said.strip().splitlines() or ["it printed nothing"])[-1]


def built(operator: str) -> Path:
    """Where an operator is when it has been compiled."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(operator, False)) / f"{operator}.so"


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed (pip install '.[bench]'): its rows will say so")
        return 0
    for name in (*OPERATORS, *(ON_THE_CPU if systems.device_type() == "cpu" else ())):
        reason = build(name, timeout=TIMEOUT)
        print(f"{name}: {'built' if reason is None else f'not built: {reason}'}", flush=True)
    return 0


if __name__ == "__main__":
    harness.alone(main)
