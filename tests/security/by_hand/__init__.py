"""Programs that attack training as its users' machines do. They are run by hand: they take minutes, and draw instants.

    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.kills --times 200
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.interrupts --times 100
    PYTHONPATH=. .venv/bin/python -m tests.security.by_hand.faults --times 50

Each prints a line for every setting and a block for everything that went wrong, and exits with 1 if anything did.
Here is what they share: the model, its placements, processes that are forked from one that has imported everything, and
the oracle, which is the same training undisturbed.
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
from pathlib import Path
from typing import Any

# A step is short, and ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo  # torch would import it with the first optimizer, in every fork
from tests.engine.harness import adamw, make_model, settings, token_batch

import wherry
import wherry.checkpoint.load
import wherry.checkpoint.save
from wherry.errors import WherryError

KINDS = ("master", "exp_avg", "exp_avg_sq")
forks = multiprocessing.get_context("fork")


def zero(optimizer: str = "none", parameters: str = "none", policy: str = "auto", **more: Any) -> dict[str, Any]:
    """A config with states that rest on these devices, and this update policy."""
    rests = {"offload_optimizer": {"device": optimizer}, "offload_param": {"device": parameters}}
    blocks = {name: block for name, block in rests.items() if block["device"] != "none"}
    return {"zero_optimization": blocks, "wherry": {"update_policy": policy, **more}}


@functools.cache
def source() -> torch.nn.Module:
    """What each engine trains a copy of. Where ranks are threads it is made before they begin."""
    return make_model()


def build(stage: int, accumulation: int, more: dict[str, Any], disk: Path, mesh: Any = None) -> Any:
    """An engine that trains the model. Its swap files, if it has any, are in `disk`."""
    more = copy.deepcopy(more)
    for block in more.get("zero_optimization", {}).values():
        if isinstance(block, dict) and block["device"] == "nvme":
            block["nvme_path"] = str(disk)
    model = copy.deepcopy(source())
    config = settings(stage, accumulation, more=more)
    return wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config, mesh=mesh)[0]


def train(engine: Any, rank: int = 0, *, whole: bool = False) -> None:
    """One step, on the batches of its number; `whole`, by `train_batch`."""
    step, accumulation = engine.global_steps, engine.gradient_accumulation_steps()
    batches = [token_batch(step, micro, rank) for micro in range(accumulation)]
    if whole:
        engine.train_batch(iter(batches))
        return
    for batch in batches:
        engine.backward(engine(*batch))
        engine.step()


def digest(engine: Any) -> str:
    """Of all weights, masters, moments and counts, to the bit; every rank calls it."""
    states = engine.states
    with wherry.gathered(engine.module):
        found = {f"{name}:": weight.detach().clone() for name, weight in engine.module.named_parameters()}
    for name, kind in itertools.product(list(found), KINDS):
        with contextlib.suppress(WherryError):  # in fp32 there is no master
            found[f"{name}{kind}"] = states.local(name[:-1], kind).clone()
    parts = engine.comm.gather_objects(found)
    whole = hashlib.sha256(repr((engine.global_steps, engine.loss_scale)).encode())
    for name in found:
        for part in parts[: 1 if name.endswith(":") else None]:
            whole.update(part[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def in_fork(body: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> Any:
    """What `body` returns in a process of its own."""
    here, there = forks.Pipe(duplex=False)

    def run() -> None:
        begin_process()
        there.send(body(*arguments))

    process = forks.Process(target=run)
    process.start()
    there.close()
    try:
        assert here.poll(seconds), f"{body.__name__}{arguments} does not end"
        return here.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{body.__name__}{arguments} ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def begin_process() -> None:
    torch.set_num_threads(1)
    wherry.observe.log.logger.setLevel("ERROR")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for all files of a program, temporary ones too."""
    with tempfile.TemporaryDirectory(prefix="by-hand-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        before, tempfile.tempdir = tempfile.tempdir, None
        os.environ["TMPDIR"] = str(folder / "tmp")
        try:
            yield folder
        finally:
            del os.environ["TMPDIR"]
            tempfile.tempdir = before


class Findings:
    """What went wrong, told once for each kind, and how often."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}

    def add(self, setting: str, kind: str, details: str = "") -> None:
        self._found.setdefault((setting, kind), []).append(details)

    def of(self, setting: str) -> int:
        return sum(len(details) for (where, _), details in self._found.items() if where == setting)

    def tell(self) -> int:
        """Print them; the status that the program exits with."""
        for (setting, kind), details in self._found.items():
            print(f"\nWRONG {setting}: {kind} ({len(details)} x)")
            for text in list(dict.fromkeys(filter(None, details)))[:3]:
                lines = text.rstrip().splitlines()
                print("    " + "\n    ".join(lines if len(lines) < 30 else [*lines[:9], "...", *lines[-20:]]))
        print("\nnothing went wrong" if not self._found else f"\n{sum(map(len, self._found.values()))} went wrong")
        sys.stdout.flush()
        return int(bool(self._found))


def parser(description: str, times: int, settings: list[str]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--times", type=int, default=times, help="how often (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    made.add_argument(
        "--only", nargs="*", choices=settings, default=settings, metavar="SETTING", help=", ".join(settings)
    )
    return made
