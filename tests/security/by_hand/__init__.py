"""Programs that attack training as its users' machines do. They are run by hand: they take minutes, and draw instants.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.kills --times 200
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --times 1000
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.faults --times 50

Each prints a line for every setting and a block for everything that went wrong, and exits with 1 if anything did. They
share the model, its placements, forks, and the oracle, which is the same training undisturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import hashlib
import multiprocessing
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A step is short, and ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo  # torch would import it with the first optimizer, in every fork
from tests.checkpoint.harness import state_of
from tests.engine.harness import adamw, engine_of, make_model, settings, train

import wherry
import wherry.checkpoint.load
import wherry.checkpoint.save

# Seconds after which a process hangs: it prints its stacks and ends with status 1.
HANGS = 120.0


def zero(
    optimizer: str = "none", parameters: str = "none", policy: str = "auto", behind: bool = False, **more: Any
) -> dict[str, Any]:
    """A config with states that rest on these devices, this update policy, and saves behind training or not."""
    rests = {"offload_optimizer": {"device": optimizer}, "offload_param": {"device": parameters}}
    blocks = {name: block for name, block in rests.items() if block["device"] != "none"}
    saves = {"keep_last": 2, "async_save": behind}
    return {"zero_optimization": blocks, "wherry": {"update_policy": policy, "checkpoint": saves, **more}}


# Stage, micro-batches of a step, and the rest of the config.
PLACEMENTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "device": (0, 1, zero()),
    "async-device": (0, 1, zero(behind=True)),
    "host-delayed": (0, 1, zero("cpu", policy="delayed", delayed_update_warmup=1)),
    "disk-before-use": (2, 1, zero("nvme", policy="before_use")),
    "disk-delayed": (2, 1, zero("nvme", policy="delayed", delayed_update_warmup=1)),
    "stage3": (3, 1, zero()),
    "infinity": (3, 1, zero("nvme", "nvme")),
    "accumulation-in-backward": (3, 2, zero("cpu", policy="in_backward")),
    "fp16-host": (3, 2, zero("cpu") | {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "async-infinity": (3, 1, zero("nvme", "nvme", behind=True)),
}


@functools.cache
def source() -> torch.nn.Module:
    """The model of which each engine trains a copy. Where ranks are threads it is made before they begin."""
    return make_model()


def build(stage: int, accumulation: int, more: dict[str, Any], disk: Path, mesh: Any = None) -> Any:
    """Build an engine, with its swap files in `disk`."""
    more = copy.deepcopy(more)
    for block in more["zero_optimization"].values():
        if isinstance(block, dict) and block["device"] == "nvme":
            block["nvme_path"] = str(disk)
    return engine_of(copy.deepcopy(source()), settings(stage, accumulation, more=more), mesh, adamw)


def advance(engine: Any, step: int) -> None:
    """Train up to a step, each step on the batches of its number."""
    train(engine, step, engine.global_steps)


def digest(engine: Any) -> str:
    """Digest all weights, masters, moments and counts; every rank calls it."""
    whole = hashlib.sha256(repr((engine.global_steps, engine.loss_scale)).encode())
    for _, state in sorted(state_of(engine).items()):
        whole.update(state.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def undisturbed(make: Callable[[], Any], steps: int, every: int = 1) -> dict[int, str]:
    """Digest the states of a training at its begin and after `every` steps: the oracle."""
    engine = make()
    found = {}
    for step in range(0, steps + 1, every):
        advance(engine, step)
        found[step] = digest(engine)
    engine.close()
    return found


def begin_process() -> None:
    torch.set_num_threads(1)
    wherry.observe.log.logger.setLevel("ERROR")


@contextlib.contextmanager
def forked(body: Callable[..., Any], *arguments: Any) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Run `body(*arguments, send)` in a fork, which is killed afterwards; give the process, and what it sends."""
    forks = multiprocessing.get_context("fork")
    hear, tell = forks.Pipe(duplex=False)

    def run() -> None:
        begin_process()
        faulthandler.dump_traceback_later(HANGS, exit=True)
        body(*arguments, tell.send)

    def messages() -> Iterator[Any]:
        with contextlib.suppress(EOFError):
            while True:
                yield hear.recv()

    process = forks.Process(target=run)
    process.start()
    tell.close()
    with hear:
        try:
            yield process, messages()
        finally:
            process.kill()
            process.join()


def in_fork(body: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `body` in a process of its own."""
    with forked(lambda send: send(body(*arguments))) as (_, messages):
        (result,) = messages
        return result


# Kinds of what went wrong, and details of each time.
Findings = dict[str, list[str]]
# The setting, numbers of the trials, a seed, a folder: returns how often each end was met.
Attack = Callable[[str, range, int, Path, Findings], Counter[str]]


def run(description: str, times: int, settings: list[str], attack: Attack) -> int:
    """Attack every setting and print what went wrong; return the status that the program exits with."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--times", type=int, default=times, help="how often, all settings together (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="*", choices=settings, default=settings, metavar="SETTING", help=", ".join(settings)
    )
    options = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory(prefix="by-hand-") as scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch  # for temporary files of the processes
        for index, name in enumerate(options.only):
            numbers = range(options.first, options.first + options.times)[index :: len(options.only)]
            if not numbers:
                continue
            (home := Path(scratch) / name).mkdir()
            findings: Findings = defaultdict(list)
            ends = attack(name, numbers, options.seed, home, findings)
            told = ", ".join(f"{often} {end}" for end, often in ends.most_common())
            print(f"{name:25} {len(numbers)} times: {told}; {sum(map(len, findings.values()))} wrong", flush=True)
            for kind, details in findings.items():
                print(f"\nWRONG {name}: {kind} ({len(details)} x)")
                for text in list(dict.fromkeys(filter(None, details)))[:3]:
                    print("    " + text.rstrip().replace("\n", "\n    "), flush=True)
            count += sum(map(len, findings.values()))
    print(f"\n{count or 'nothing'} went wrong")
    return int(count > 0)
