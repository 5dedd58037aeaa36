"""The engine on gloo ranks that are processes."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.harness import Run, adamw, assert_close, assert_equal, make_model, settings, token_batch, train_plain
from tests.models import D, Stack, vectors
from tests.warm import Pool
from torch import nn

import wherry
from wherry import config as configs
from wherry.errors import WherryError
from wherry.parallel.comm import MANY, ProcessGroupComm
from wherry.parallel.peers import _left

RANKS, STEPS = 2, 4
# Every rank holds all weights, and gathers them during the forward, each after its update.
BESIDE = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "wherry": {"update_policy": "before_use"}}


@pytest.fixture
def pool(warm: Callable[[int], Pool]) -> Pool:
    return warm(RANKS)


def train(rank: int, stage: int, accumulation: int, more: dict[str, Any], mesh: bool = False) -> Run:
    """Train on all ranks of a pool, of any size."""
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
    for step in range(STEPS):
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


@pytest.mark.smoke
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (1, 1), (2, 2), (3, 1), (3, 2)])
def test_processes_train_as_plain_pytorch(pool: Pool, stage: int, accumulation: int) -> None:
    runs = pool.run(train, stage, accumulation, {})
    oracle = train_plain(make_model(), ranks=RANKS, accumulation=accumulation, steps=STEPS, clip=0.5)
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
def test_empty_tensors_are_exchanged(warm: Callable[[int], Pool], ranks: int) -> None:
    warm(ranks).run(exchange_nothing)


class Narrow(Stack):
    """A model with a frozen weight of 8 bits: no optimizer has it, and gloo does not know its dtype."""

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
    """A collective's work as NCCL has it, which does not tell whether it succeeded."""

    def __init__(self) -> None:
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self) -> None:
        """The stream waits, and not the host."""


def begin_on_a_gpu(rank: int) -> None:
    """Begin more collectives than a comm keeps, and wait for none."""
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


def observe_thrice(rank: int, given: dict[str, Any]) -> list[Any]:
    """Count memory three times: gloo's threads may hold a tensor a moment longer than a wait."""
    from tests.plan import measured

    model, args = measured.make()
    with measured.sizes_shown():
        return [measured.observed(given, ProcessGroupComm(), copy.deepcopy(model), args) for _ in range(3)]


@pytest.mark.parametrize(("stage", "alone"), [(0, True), (2, False), (3, True)])
def test_plans_count_the_memory_of_ranks_over_gloo(pool: Pool, stage: int, alone: bool) -> None:
    from tests.plan import measured

    from wherry.plan.dry_run import count
    from wherry.sources import find

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **(measured.ALONE if alone else {})}
    given = measured.config(stage, zero_optimization=zero)
    for rank, runs in enumerate(pool.run(observe_thrice, given)):
        planned = count(find(measured.make), configs.load(given), ranks=RANKS, rank=rank, sequence=24).lines(gpu=False)
        assert sum(line.at_peak for line in planned) == pytest.approx(
            min(sum(line.at_peak for line in seen.lines(gpu=False)) for seen in runs), rel=0.03
        )
        for line in planned:
            if line.category != "buffers":
                same = (each for seen in runs for each in seen.lines(gpu=False) if each.category == line.category)
                highest = min(each.highest for each in same)
                assert line.highest == pytest.approx(highest, rel=0.03, abs=2048), line.category


def uneven(rank: int) -> tuple[float, ...]:
    """Read this rank's share of the data through the engine's loader."""
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
    """Use the weights on one rank alone after a step, whose gathers no other rank waits for; on two engines."""
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
    """Close the engine in a fork while updates are under way in the first process, and train on there."""
    model = make_model()
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(1, 1, 0.5, BESIDE))
    engine.backward(engine(*token_batch(0, 0, rank)))
    engine.step()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            engine.close()
        finally:
            os._exit(7 if sys.exc_info()[0] is None else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    engine.backward(engine(*token_batch(1, 0, rank)))
    engine.step()
    # The other rank must not believe that this one has left.
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
