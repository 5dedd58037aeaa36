"""Ranks that are processes, each with a late device, whose collectives end on a stream: Wherry starts their group.

A pair of processes is forked for each test from one that has imported everything, and runs a function of this module.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.accelerator import emulated, process_group
from tests.accelerator.machine import MACHINE
from tests.cli.programs import environment, free_port
from tests.covering import Case, name_of
from tests.engine.harness import Run, adamw, assert_equal
from tests.forks import ENGINE, QUIET, ROOT, Child, Forks
from tests.life import BASE, Leg, at, batch, config_of, mean_losses, on_ranks, one_step, sized, subject, whole
from torch.utils._python_dispatch import TorchDispatchMode

import wherry
from wherry.errors import PeerError, WherryError
from wherry.parallel.comm import ProcessGroupComm, backend_of
from wherry.sharding.norm import Norm

RANKS = 2
NAME = "tests.accelerator.test_processes"
PROGRAM = f"from {NAME} import main; main()"
LOST = 7  # the status of a rank that is killed
Patch = pytest.MonkeyPatch
Process = Child | subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*ENGINE, NAME, apart=True) as forks:
        yield forks


class Pair:
    """Two processes that run a function of this module, each with its rank, the folder, and the arguments."""

    def __init__(
        self, forks: Forks | None, folder: Path, body: Callable[..., Any], *arguments: Any, **extra: str
    ) -> None:
        """Forks, or without `forks` interpreters of their own."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "task").write_bytes(pickle.dumps((body.__name__, arguments)))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        self.ranks: list[Process] = []
        for rank in range(RANKS):
            env = environment(**QUIET, **place, RANK=str(rank), LOCAL_RANK=str(rank), **extra)
            command = ["-c", PROGRAM, str(folder)]
            with open(folder / f"{rank}.err", "wb") as errors:
                if forks is None:
                    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), env["PYTHONPATH"]))
                    self.ranks.append(subprocess.Popen([sys.executable, *command], env=env, stderr=errors))
                else:
                    self.ranks.append(forks.start(command, stderr=errors, env=env, folder=ROOT))

    def end(self, seconds: float = 60.0) -> list[int | None]:
        """Wait for exit statuses; None for a rank that had not ended by then, or long after the other had failed."""
        deadline, codes = time.monotonic() + seconds, [rank.poll() for rank in self.ranks]
        while None in codes and time.monotonic() < deadline:
            if any(codes):
                deadline = min(deadline, time.monotonic() + 20.0)
            time.sleep(0.01)
            codes = [rank.poll() for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.wait(10)
        return codes

    def results(self) -> list[Any]:
        """Load the function's result of each rank."""
        codes = self.end()
        assert codes == [0] * RANKS, (codes, *map(self.errors, range(RANKS)))
        return [self.result(rank) for rank in range(RANKS)]

    def result(self, rank: int) -> Any:
        return pickle.loads((self.folder / f"{rank}.result").read_bytes())

    def errors(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text(errors="replace")


def main() -> None:
    """Run the task of a pair's process."""
    emulated.fill_module(os.getpid())
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    emulated.seed(rank)
    name, arguments = pickle.loads((folder / "task").read_bytes())
    result = globals()[name](rank, folder, *arguments)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


# ---- The same bits

TOGETHER = BASE | {"ranks": RANKS}
CASES: list[Case] = [
    TOGETHER | at("device-0") | {"window": "three", "precision": "bf16", "clip": 0.5},
    TOGETHER | at("device-1") | {"policy": "in_backward", "save": "beside", "flats": "alone"},
    TOGETHER | at("device-2") | {"precision": "fp16", "activations": "host", "clip": 0.5, "flats": "alone"},
    TOGETHER | at("device-3") | {"policy": "in_backward", "window": "layer-major", "activations": "recompute"},
    TOGETHER | at("offload-2") | {"policy": "in_backward", "window": "three", "precision": "bf16", "sums": "host"},
    TOGETHER | at("offload-3-parameters") | {"policy": "at_step", "precision": "bf16", "save": "beside"},
    TOGETHER | at("infinity") | {"window": "three", "clip": 0.5, "save": "beside", "flats": "alone"},
]
SEEDS = 2


def lives(rank: int, folder: Path, case: Case, seeds: list[int | None]) -> list[Run]:
    """Live once for each seed, each time with a group of its own: calm for None, or late."""
    runs = []
    for seed in seeds:
        emulated.seed(100 * rank + (seed or 0))
        emulated.lateness(0.0 if seed is None else 0.9)
        own = case | {"policy": "at_step"} if seed is None else case
        swap = folder / str(seed) / "swap"
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
    pair = Pair(forks, tmp_path / "pair", lives, case, [None, *range(SEEDS)])
    body = partial(whole, saved=tmp_path / "saved")
    threads = on_ranks(body, case | {"policy": "at_step"}, tmp_path / "threads", MACHINE)
    found = pair.results()
    for calm, *late in found:
        for run in late:
            assert_equal(run, calm)
    first, second = (runs[0] for runs in found)
    assert first.losses != second.losses, "each has its batches"
    assert_equal(Run(weights=first.weights), Run(weights=second.weights))
    first.losses = mean_losses([first, second])
    assert_equal(first, threads)


# ---- A rank that is gone

PATIENCE = 2.0


def killed(rank: int, folder: Path, row: str, victim: int, silent: bool) -> tuple[str, str, float]:
    """A rank dies in its second step; what the other is told, and after how long.

    `silent`: its connections stay open, as nothing says of a GPU that no process has it any more.
    """
    emulated.lateness(0.9)
    config, model = config_of(TOGETHER | at(row), folder), subject(TOGETHER)
    config["wherry"]["timeout_s"] = PATIENCE
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    one_step(engine, 0, (rank, RANKS))
    total = Norm.total

    def die(self: Norm, *arguments: Any) -> float:
        if rank == victim:
            if not silent or os.fork():
                os._exit(LOST)
            _hold(folder / "over")
        return total(self, *arguments)

    Norm.total = die  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        one_step(engine, 1, (rank, RANKS))
    except (PeerError, WherryError) as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError(f"a step without rank {victim}, of norm {engine.get_global_grad_norm()}")


def _hold(over: Path) -> None:
    """Be a process that has connections, and nothing else, until the test is over."""
    deadline = time.monotonic() + 60
    while not over.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)


@pytest.mark.parametrize(
    ("row", "victim", "silent", "forked"),
    [("device-2", 0, False, True), ("offload-3-parameters", 1, True, False)],
)
def test_a_rank_that_is_killed_is_missed_within_seconds(
    row: str, victim: int, silent: bool, forked: bool, forks: Forks, tmp_path: Path
) -> None:
    pair = Pair(forks if forked else None, tmp_path, killed, row, victim, silent)
    try:
        codes = pair.end()
    finally:
        (tmp_path / "over").touch()
    assert codes[victim] == LOST, pair.errors(victim)
    assert codes[1 - victim] == 0, pair.errors(1 - victim)
    kind, text, waited = pair.result(1 - victim)
    assert kind == PeerError.__name__
    assert f"rank {victim}" in text or "store is gone" in text, text
    assert waited < PATIENCE + 10.0, text


# ---- What the host waits for


class Scalars(TorchDispatchMode):
    """Counts what brings numbers of the device to the host, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [tensor for tensor in (*args, *(kwargs or {}).values()) if isinstance(tensor, torch.Tensor)]
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero") and _on_device(inputs):
            self.found[name] += 1
        result = func(*args, **(kwargs or {}))
        awaited = name == "_to_copy" or (name == "copy_" and not (kwargs or {}).get("non_blocking", (*args, False)[2]))
        if awaited and _on_device(inputs) and result.device.type == "cpu":
            self.found[name] += 1
        return result


def _on_device(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.device.type == emulated.NAME for tensor in tensors)


def counted(rank: int, folder: Path, row: str, spoilt: bool) -> tuple[int, dict[str, int], int, int]:
    """Count a third step's reads, scalars, and copies down, and the reads of its forward and backward."""
    config, model = config_of(TOGETHER | at(row) | {"policy": "at_step", "clip": 0.5}, folder), subject(TOGETHER)
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    for step in range(2):
        one_step(engine, step, (rank, RANKS))
    reads: list[torch.Size] = []
    with pytest.MonkeyPatch.context() as patch:
        read, here = ProcessGroupComm.read, Norm._here

        def noted(self: ProcessGroupComm, tensor: torch.Tensor) -> list[float]:
            reads.append(tensor.shape)
            return read(self, tensor)

        patch.setattr(ProcessGroupComm, "read", noted)
        if spoilt:
            patch.setattr(Norm, "_here", lambda self, gradients: float(here(self, gradients)))
        engine.backward(engine(*batch(2, 0, rank, RANKS)))
        before = len(reads)
        with Scalars() as scalars, emulated.trace() as traced:
            engine.step()
    engine.close()
    return len(reads) - before, dict(scalars.found), len(traced.of("down")), before


@pytest.mark.parametrize("row", ["device-0", "device-3"])
def test_a_step_waits_for_the_device_once(row: str, forks: Forks, tmp_path: Path) -> None:
    """The norm, which tells of inf and NaN, of missing gradients, and of mixed-up weights."""
    for reads, scalars, copies, before in Pair(forks, tmp_path, counted, row, False).results():
        assert (reads, scalars, copies, before) == (1, {}, 1, 0)


def test_a_second_wait_would_be_counted(forks: Forks, tmp_path: Path) -> None:
    for reads, scalars, *_ in Pair(forks, tmp_path, counted, "device-2", True).results():
        assert (reads, scalars) == (1, {"_local_scalar_dense": 1})


# ---- Groups that do not reach the device


def without_the_device(rank: int, folder: Path, backend: str) -> tuple[str, list[float]]:
    """Get the error about a user's group, and the losses once Wherry may start its own."""
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    config, model = config_of(TOGETHER | at("device-2"), folder), subject(TOGETHER)
    with pytest.raises(WherryError) as refused:
        wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    dist.destroy_process_group()
    model = subject(TOGETHER)
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    losses = [float(one_step(engine, step, (rank, RANKS))) for step in range(2)]
    assert dist.get_backend_config() == f"cpu:gloo,{emulated.NAME}:{process_group.NAME}"
    engine.close()
    return str(refused.value), losses


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_group_without_a_backend_for_the_device_is_refused(backend: str, forks: Forks, tmp_path: Path) -> None:
    for refused, losses in Pair(forks, tmp_path, without_the_device, backend).results():
        assert f"2 ranks has no backend for what is on {emulated.NAME}:0" in refused
        assert f'init_process_group("cpu:gloo,{emulated.NAME}:NAME")' in refused and "leave that to Wherry" in refused
        assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)


@contextmanager
def nothing_started() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def test_a_device_that_nothing_communicates_between(monkeypatch: Patch) -> None:
    assert backend_of(emulated.NAME) == process_group.NAME
    with pytest.raises(WherryError, match="no backend for several ranks on 'vulkan'"):
        backend_of("vulkan")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delitem(dist.Backend.default_device_backend_map, emulated.NAME)
    model = subject(TOGETHER)
    with nothing_started(), pytest.raises(WherryError, match=f"no backend for several ranks on '{emulated.NAME}'"):
        wherry.initialize(model=model, optimizer=adamw(model.parameters()), config={"train_batch_size": 2})
