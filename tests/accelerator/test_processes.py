"""Ranks that are processes, each with a late device, whose collectives end on a stream: Wherry starts their group.

Ranks are forked for each test from a process that has imported everything, and run a function of this module.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.accelerator import emulated, process_group
from tests.accelerator.machine import MACHINE
from tests.covering import Case, name_of
from tests.engine.harness import Run, adamw, assert_equal
from tests.forks import ENGINE, ROOT, Forks
from tests.life import BASE, Leg, at, batch, config_of, mean_losses, on_ranks, one_step, sized, subject, whole

import wherry
from wherry.errors import PeerError, WherryError
from wherry.parallel.comm import backend_of

RANKS = 2
NAME = "tests.accelerator.test_processes"
PROGRAM = f"from {NAME} import main; main()"
LOST = 7  # the status of a rank that is killed
TOGETHER = BASE | {"ranks": RANKS}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*ENGINE, NAME, apart=True) as forks:
        yield forks


def run(forks: Forks, folder: Path, body: Callable[..., Any], *arguments: Any, status: int = 0) -> list[Any]:
    """Run `body(rank, folder, *arguments)` on two processes; return the results of those that ended well."""
    (folder / "task").write_bytes(pickle.dumps((body.__name__, arguments)))
    done = forks.run("-c", PROGRAM, folder, ranks=RANKS, folder=ROOT, launched=False, timeout=60.0)
    assert done.returncode == status, done.stderr
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.result"))]


def main() -> None:
    """Run the task of a rank."""
    emulated.fill_module(os.getpid())
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    emulated.seed(rank)
    name, arguments = pickle.loads((folder / "task").read_bytes())
    result = globals()[name](rank, folder, *arguments)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


def build(row: str, folder: Path, **more: Any) -> Any:
    config, model = config_of(TOGETHER | at(row) | {"policy": "at_step", "clip": 0.5}, folder), subject(TOGETHER)
    config["wherry"] |= more
    return wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]


# ---- The same bits

CASES: list[Case] = [
    TOGETHER | at("device-2") | {"precision": "fp16", "activations": "host", "clip": 0.5, "flats": "alone"},
    TOGETHER | at("device-3") | {"policy": "in_backward", "window": "layer-major", "activations": "recompute"},
    TOGETHER | at("offload-2") | {"policy": "in_backward", "window": "three", "precision": "bf16", "sums": "host"},
    TOGETHER | at("infinity") | {"window": "three", "clip": 0.5, "save": "beside", "flats": "alone"},
]


def lives(rank: int, folder: Path, case: Case) -> list[Run]:
    """Live calm and late, each time with a group of its own."""
    runs = []
    for lateness, own in ((0.0, case | {"policy": "at_step"}), (0.9, case)):
        emulated.lateness(lateness)
        swap = folder / str(lateness) / "swap"
        swap.mkdir(parents=True, exist_ok=True)
        with sized(own):
            leg = Leg(own, swap, None, (rank, RANKS), subject(own))
            runs.append(whole(leg, swap.parent / "saved"))
        assert not dist.is_initialized(), "who started the group ends it"
    return runs


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_life_in_late_processes_has_the_bits_of_calm_ones_and_of_threads(
    case: Case, forks: Forks, tmp_path: Path
) -> None:
    body = partial(whole, saved=tmp_path / "saved")
    threads = on_ranks(body, case | {"policy": "at_step"}, tmp_path / "threads", MACHINE)
    runs = run(forks, tmp_path, lives, case)
    for calm, late in runs:
        assert_equal(late, calm)
    first, second = (calm for calm, _ in runs)
    assert first.losses != second.losses, "each has its batches"
    assert_equal(Run(weights=first.weights), Run(weights=second.weights))
    first.losses = mean_losses([first, second])
    assert_equal(first, threads)


# ---- A rank that is gone

PATIENCE = 2.0


def die_in_a_step(rank: int, folder: Path) -> str:
    """Kill rank 1 in its second step and keep its connections open, as those of a GPU are; return the other's error."""
    emulated.lateness(0.9)
    engine = build("offload-3-parameters", folder, timeout_s=PATIENCE)
    one_step(engine, 0, (rank, RANKS))
    engine.backward(engine(*batch(1, 0, rank, RANKS)))
    if rank == 1:
        if os.fork():
            os._exit(LOST)
        deadline = time.monotonic() + 60
        while not (folder / "over").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(0)
    with pytest.raises(PeerError) as raised:
        engine.step()
    return str(raised.value)


def test_a_rank_that_is_killed_is_missed_within_seconds(forks: Forks, tmp_path: Path) -> None:
    try:
        [message] = run(forks, tmp_path, die_in_a_step, status=LOST)
    finally:
        (tmp_path / "over").touch()
    assert "rank 1" in message


# ---- Groups that do not reach the device


def build_without_the_device(rank: int, folder: Path, backend: str) -> tuple[str, list[float]]:
    """Get the error about a user's group, and the losses once Wherry may start its own."""
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    with pytest.raises(WherryError) as refused:
        build("device-2", folder)
    dist.destroy_process_group()
    engine = build("device-2", folder)
    losses = [float(one_step(engine, step, (rank, RANKS))) for step in range(2)]
    assert dist.get_backend_config() == f"cpu:gloo,{emulated.NAME}:{process_group.NAME}"
    engine.close()
    return str(refused.value), losses


def test_a_group_without_a_backend_for_the_device_is_refused(forks: Forks, tmp_path: Path) -> None:
    for refused, losses in run(forks, tmp_path, build_without_the_device, "gloo"):
        assert f"2 ranks has no backend for what is on {emulated.NAME}:0" in refused
        assert f'init_process_group("cpu:gloo,{emulated.NAME}:NAME")' in refused and "leave that to Wherry" in refused
        assert all(0 < loss < 100 for loss in losses)
    with pytest.raises(WherryError, match="no backend for several ranks on 'vulkan'"):
        backend_of("vulkan")
