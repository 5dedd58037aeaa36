"""Real processes over gloo: one group per test module, reused by its tests."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cli.programs import free_port
from tests.engine.harness import Run, adamw, assert_close, assert_equal, make_model, settings, token_batch, train_plain
from tests.engine.test_models import D, Stack, vectors
from tests.forks import ENGINE
from tests.plan import measured
from tests.plan.test_dryrun import ALONE, config
from torch import nn

import wherry
from wherry import config as configs
from wherry.errors import WherryError
from wherry.parallel.comm import MANY, ProcessGroupComm
from wherry.parallel.peers import _left
from wherry.plan.counts import Counts
from wherry.plan.dry_run import count
from wherry.sources import find

RANKS = 2
# Weights that every rank holds are gathered beside the forward, each after its update.
BESIDE = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "wherry": {"update_policy": "before_use"}}


# Processes are forked from one that has imported everything and started no thread.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    [
        *("tests.checkpoint.test_faults", "tests.parallel.test_torch_axes"),
        *("wherry.checkpoint.load", "wherry.checkpoint.save", *ENGINE),
    ]
)


class Pool:
    """Processes that stay, each one rank, and run what they are sent."""

    def __init__(self, size: int) -> None:
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = forks.Pipe()
            process = forks.Process(target=serve, args=(rank, size, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((body, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(120), f"rank {rank} does not answer"
            failed, value = pipe.recv()
            assert not failed, f"rank {rank}:\n{value}"
            answers.append(value)
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            assert process.exitcode == 0


def serve(rank: int, size: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank)
    )
    dist.init_process_group("gloo")
    while (task := pipe.recv()) is not None:
        body, args = task
        try:
            pipe.send((False, body(rank, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(RANKS)
    yield pool
    pool.close()


def train(rank: int, stage: int, accumulation: int, more: dict[str, Any], mesh: bool = False) -> Run:
    """On all processes of a pool, however many it has."""
    model = make_model()
    shape = (dist.get_world_size(),)
    device_mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp",)) if mesh else None
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config=settings(stage, accumulation, 0.5, more),
        mesh=device_mesh,
    )
    run = Run()
    for step in range(8):
        total = 0.0
        for micro in range(accumulation):
            loss = engine(*token_batch(step, micro, engine.comm.rank))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulation
        run.losses.append(sum(engine.comm.gather_objects(total)) / engine.comm.size)
        run.norms.append(engine.get_global_grad_norm())
    run.weights = engine.module.state_dict()
    run.extra = dict(engine.comm.traffic.calls)
    engine.close()
    return run


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_processes_train_as_plain_pytorch(pool: Pool, stage: int, accumulation: int) -> None:
    runs = pool.run(train, stage, accumulation, {})
    oracle = train_plain(make_model(), ranks=RANKS, accumulation=accumulation, steps=8, clip=0.5)
    oracle.weights["head.weight"] = oracle.weights["embed.weight"]
    assert_close(runs[0], oracle)
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_over_processes(pool: Pool, precision: str) -> None:
    runs = [pool.run(train, stage, 1, {precision: {"enabled": True}})[0] for stage in (0, 2, 3)]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[2], runs[0])


def build_within_init(rank: int, seeds: list[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(seeds[rank])
    with wherry.Init(settings(3)):
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
        for layer in model:
            nn.init.normal_(layer.weight)
    with wherry.gathered(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_weights_that_processes_draw_are_those_of_the_first(pool: Pool) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    for layer in plain:
        nn.init.normal_(layer.weight)
    for values in pool.run(build_within_init, [3, 4]):
        assert all(torch.equal(values[name], parameter) for name, parameter in plain.named_parameters())


def test_a_device_mesh(pool: Pool) -> None:
    assert_equal(pool.run(train, 3, 1, {}, True)[0], pool.run(train, 3, 1, {})[0])


def exchange(rank: int) -> None:
    comm = ProcessGroupComm()
    for numel in (64, 1 << 20):
        expected = torch.cat([torch.arange(float(numel)), torch.arange(float(numel)) + 1])
        own = slice(rank * numel, (rank + 1) * numel)
        whole = torch.full((2 * numel,), float("nan"))
        comm.all_gather(whole, torch.arange(float(numel)) + rank).wait()
        assert torch.equal(whole, expected)
        whole = torch.full((2 * numel,), float("nan"))
        whole[own] = expected[own]
        comm.all_gather(whole, whole[own]).wait()
        assert torch.equal(whole, expected)
        shard = torch.empty(numel)
        ticket = comm.reduce_scatter(shard, whole * (rank + 1))
        ticket.wait()
        ticket.wait()
        assert torch.equal(shard, 3 * expected[own])
        comm.reduce_scatter(whole[own], whole).wait()
        assert torch.equal(whole[own], 2 * expected[own])
    assert comm.traffic.calls == {"all_gather": 4, "reduce_scatter": 4}
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        addends = [torch.linspace(-3, 5, 5000, dtype=dtype) * (other + 1) / 7 for other in range(2)]
        ticket = comm.all_reduce(tensor := addends[rank].clone())
        ticket.wait()
        ticket.wait()
        assert torch.equal(tensor, addends[0] + addends[1])
    comm.all_reduce(highest := torch.full((7,), float(rank)), "max").wait()
    assert torch.all(highest == 1)
    assert not comm.under_way
    comm.close()


def exchange_nothing(rank: int) -> None:
    comm = ProcessGroupComm()
    for numels in ((0,), (0, 0), (0, 4), (4, 0)):
        wholes = [torch.arange(float(comm.size * numel)) for numel in numels]
        shards = [torch.full((numel,), float("nan")) for numel in numels]
        parts = [whole.view(comm.size, numel)[rank].clone() for whole, numel in zip(wholes, numels, strict=True)]
        comm.reduce_scatter_together(shards, [whole.clone() for whole in wholes], [""]).wait()
        assert all(torch.equal(shard, comm.size * part) for shard, part in zip(shards, parts, strict=True))
        gathered = [torch.full_like(whole, float("nan")) for whole in wholes]
        comm.all_gather_together(gathered, parts, [""]).wait()
        assert all(map(torch.equal, gathered, wholes))
    comm.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_empty_travels_too(pool: Pool, ranks: int) -> None:
    several = pool if ranks == RANKS else Pool(ranks)
    try:
        several.run(exchange_nothing)
    finally:
        if several is not pool:
            several.close()


class Narrow(Stack):
    """Frozen weights of 8 bits, which no optimizer has and gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.linspace(-1, 1, D * D).view(D, D).to(torch.float8_e4m3fn)
        self.blocks[0].narrow = nn.Parameter(values, requires_grad=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x + 0.1 * x @ self.blocks[0].narrow.float())


def train_narrow(rank: int, stage: int) -> list[float]:
    model = make_model(Narrow)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(trained), config=settings(stage))
    losses = []
    for step in range(2):
        loss = engine(*vectors(step, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.close()
    return losses


def test_frozen_weights_of_eight_bits(pool: Pool) -> None:
    assert pool.run(train_narrow, 3) == pool.run(train_narrow, 0)


def test_parts_and_sums_arrive_where_they_belong(pool: Pool) -> None:
    pool.run(exchange)


class OfNccl:
    """A collective's work as NCCL has it: whether it ended well it does not say."""

    def __init__(self) -> None:
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self) -> None:
        """The stream waits, and not the host."""


def begin_on_a_gpu(rank: int) -> None:
    """More collectives than are kept, of which nobody waits for any."""
    comm = ProcessGroupComm()
    tensor, works = torch.empty(4, device="meta"), [OfNccl() for _ in range(MANY + 3)]
    for work in works:
        comm._ask("all_reduce", tensor, "")
        ticket = comm._ticket(lambda work=work: work, tensor)
        assert comm.under_way
        work.completed = True
    assert not comm.under_way
    assert len(comm._begun) < MANY
    ticket.wait()
    comm.close()


def test_collectives_on_a_gpu_are_not_asked_how_they_ended(pool: Pool) -> None:
    pool.run(begin_on_a_gpu)


def observe_thrice(rank: int, given: dict[str, Any]) -> list[Counts]:
    """The same each time, but that gloo's threads may hold a tensor a moment longer than a wait."""
    model, args = measured.make()
    with measured.sizes_shown():
        return [measured.observed(given, ProcessGroupComm(), copy.deepcopy(model), args) for _ in range(3)]


@pytest.mark.parametrize(("stage", "buckets"), [(0, ALONE), (1, {}), (2, ALONE), (3, {}), (3, ALONE)])
def test_plans_count_what_ranks_over_gloo_take(pool: Pool, stage: int, buckets: dict[str, int]) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **buckets}
    given = config(stage, zero_optimization=zero)
    for rank, runs in enumerate(pool.run(observe_thrice, given)):
        told = count(find(measured.make), configs.load(given), ranks=RANKS, rank=rank, sequence=24).lines(gpu=False)
        assert sum(line.at_peak for line in told) == pytest.approx(
            min(sum(line.at_peak for line in seen.lines(gpu=False)) for seen in runs), rel=0.03
        )
        for line in told:
            if line.category != "buffers":
                same = (each for seen in runs for each in seen.lines(gpu=False) if each.category == line.category)
                highest = min(each.highest for each in same)
                assert line.highest == pytest.approx(highest, rel=0.03, abs=2048), line.category


def uneven(rank: int) -> tuple[float, ...]:
    """Data for the loader, shared out over the ranks."""
    model = torch.nn.Linear(1, 1)
    data = [(torch.full((1,), float(i)),) for i in range(10)]
    engine, _, loader, _ = wherry.initialize(
        model=copy.deepcopy(model), config={"train_micro_batch_size_per_gpu": 1}, training_data=data
    )
    seen = tuple(float(batch[0]) for batch in loader)
    engine.close()
    return seen


def test_the_dataloader_shares_the_data_out(pool: Pool) -> None:
    first, second = pool.run(uneven)
    assert sorted(first + second) == [float(i) for i in range(10)]


def look_alone(rank: int) -> dict[str, torch.Tensor]:
    """One rank uses its weights after a step, whose gathers nobody else waits for; on each of two engines."""
    engines = []
    for seed in range(2):
        model = make_model(seed=seed)
        engines.append(
            wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(1, 1, 0.5, BESIDE))[0]
        )
    for step in range(2):
        for engine in engines:
            engine.backward(engine(*token_batch(step, 0, rank)))
            engine.step()
    weights = {}
    for engine in engines:
        if rank == 1:
            with torch.no_grad():
                engine(*token_batch(9, 0, 0))
    for seed, engine in enumerate(engines):
        weights |= {f"{seed}.{name}": weight.clone() for name, weight in engine.module.state_dict().items()}
        engine.close()
    return weights


def test_a_rank_looks_at_its_weights_alone(pool: Pool) -> None:
    first, second = pool.run(look_alone)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def close_in_a_fork(rank: int) -> None:
    """A fork closes the engine while updates are under way in the first process, whose engine goes on."""
    model = make_model()
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(1, 1, 0.5, BESIDE))
    engine.backward(engine(*token_batch(0, 0, rank)))
    engine.step()
    child = os.fork()
    if child == 0:
        try:
            engine.close()
        finally:
            os._exit(7 if sys.exc_info()[0] is None else 8)
    until = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    engine.backward(engine(*token_batch(1, 0, rank)))
    engine.step()
    # Nobody has been told that a rank has left.
    peers = engine.comm.peers
    assert not peers._store.check([_left(peers._name, rank)])
    engine.close()


def use_in_a_fork(rank: int) -> None:
    model = make_model()
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(1))
    engine.offload_states()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            engine.reload_states()
            with wherry.gathered_for_generation(engine):  # weights are whole on every rank
                assert engine.is_generating() and engine(*token_batch(0, 0, rank)).isfinite()
            with pytest.raises(WherryError, match=rf"is of process {os.getppid()}, .* with a model of its own"):
                engine.backward(engine(*token_batch(0, 0, rank)))
        finally:
            os._exit(7 if sys.exc_info()[0] is None else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    engine.close()


def test_a_fork_may_look_and_not_train(pool: Pool) -> None:
    pool.run(use_in_a_fork)


def test_a_fork_closes_nothing_of_the_first_process(pool: Pool) -> None:
    pool.run(close_in_a_fork)
