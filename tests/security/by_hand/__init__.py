"""Programs that attack training as its users' machines do. They are run by hand: they take minutes, and draw instants.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.kills --times 200
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --times 100
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.faults --times 50

Each prints a line for every setting and a block for everything that went wrong, and exits with 1 if anything did. They
share the model, its placements, forks, and the oracle, which is the same training undisturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A step is short, and ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo  # torch would import it with the first optimizer, in every fork
from tests.engine.harness import adamw, engine_of, make_model, settings, token_batch, weights_of

import wherry
import wherry.checkpoint.load
import wherry.checkpoint.save
from wherry.errors import WherryError

KINDS = ("master", "exp_avg", "exp_avg_sq")


def zero(optimizer: str = "none", parameters: str = "none", policy: str = "auto", **more: Any) -> dict[str, Any]:
    """A config with states that rest on these devices, and this update policy."""
    rests = {"offload_optimizer": {"device": optimizer}, "offload_param": {"device": parameters}}
    blocks = {name: block for name, block in rests.items() if block["device"] != "none"}
    return {"zero_optimization": blocks, "wherry": {"update_policy": policy, **more}}


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


def train(engine: Any, rank: int = 0) -> None:
    """Train one step on the batches of its number."""
    step = engine.global_steps
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(*token_batch(step, micro, rank)))
        engine.step()


def digest(engine: Any) -> str:
    """Digest all weights, masters, moments and counts; every rank calls it."""
    found = weights_of(engine)
    for name, kind in itertools.product(list(found), KINDS):
        with contextlib.suppress(WherryError):  # in fp32 there is no master
            found[f"{name}:{kind}"] = engine.states.full(name, kind)
    whole = hashlib.sha256(repr((engine.global_steps, engine.loss_scale)).encode())
    for name in found:
        whole.update(found[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def begin_process() -> None:
    torch.set_num_threads(1)
    wherry.observe.log.logger.setLevel("ERROR")


@contextlib.contextmanager
def forked(body: Callable[..., Any], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Run `body(*arguments, tell)` in a fork, which is killed afterwards; the process, and what it sends."""
    forks = multiprocessing.get_context("fork")
    hear, tell = forks.Pipe(duplex=False)

    def run() -> None:
        begin_process()
        body(*arguments, tell)

    process = forks.Process(target=run)
    process.start()
    tell.close()
    with hear:
        try:
            yield process, hear
        finally:
            process.kill()
            process.join()


def in_fork(body: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `body` returns in a process of its own."""
    with forked(lambda tell: tell.send(body(*arguments))) as (_, hear):
        assert hear.poll(120), f"{body.__name__}{arguments} does not end"
        return hear.recv()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for all files of a program, temporary ones too."""
    with tempfile.TemporaryDirectory(prefix="by-hand-") as name:
        (Path(name) / "tmp").mkdir()
        os.environ["TMPDIR"], tempfile.tempdir = f"{name}/tmp", None
        yield Path(name)
        del os.environ["TMPDIR"]
        tempfile.tempdir = None


class Findings:
    """What went wrong, printed once for each kind, and how often."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}

    def add(self, setting: str, kind: str, details: str = "") -> None:
        self._found.setdefault((setting, kind), []).append(details)

    def verdict(self, setting: str) -> str:
        count = sum(len(details) for (where, _), details in self._found.items() if where == setting)
        return f"{count} wrong" if count else "all well"

    def tell(self) -> int:
        """Print them; the status that the program exits with."""
        for (setting, kind), details in self._found.items():
            print(f"\nWRONG {setting}: {kind} ({len(details)} x)")
            for text in list(dict.fromkeys(filter(None, details)))[:3]:
                print("    " + text.rstrip().replace("\n", "\n    "))
        print("\nnothing went wrong" if not self._found else f"\n{sum(map(len, self._found.values()))} went wrong")
        sys.stdout.flush()
        return int(bool(self._found))


def parser(description: str, times: int, settings: list[str]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--times", type=int, default=times, help="how often (default: %(default)s)")
    made.add_argument("--first", type=int, default=0, help="the number of the first one (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    made.add_argument(
        "--only", nargs="*", choices=settings, default=settings, metavar="SETTING", help=", ".join(settings)
    )
    return made
