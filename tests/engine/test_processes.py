"""The engine on gloo ranks that are processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.harness import (
    Run,
    assert_close,
    assert_equal,
    engine_of,
    make_model,
    settings,
    token_batch,
    train_plain,
    weights_of,
)
from tests.engine.harness import train as train_steps
from tests.engine.test_codes import adamw_of_trained, coded
from tests.warm import Pool

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import ProcessGroupComm

RANKS, STEPS = 2, 4
# Every rank holds all weights, and gathers them during the forward, each after its update.
BESIDE = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "wherry": {"update_policy": "before_use"}}


@pytest.fixture
def pool(warm: Callable[[int], Pool]) -> Pool:
    return warm(RANKS)


def train(rank: int, stage: int, accumulation: int, more: dict[str, Any]) -> Run:
    model = make_model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    engine = engine_of(model, settings(stage, accumulation, 0.5, more), mesh if stage == 3 else None)
    run = Run()
    for step in range(STEPS):
        mean = sum(train_steps(engine, step + 1, step)) / accumulation
        run.losses.append(sum(engine.comm.gather_objects(mean)) / engine.comm.size)
        run.norms.append(engine.get_global_grad_norm())
    run.weights = weights_of(engine)
    engine.close()
    return run


@pytest.mark.smoke
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (1, 1), (3, 2)])
def test_processes_train_as_plain_pytorch(pool: Pool, stage: int, accumulation: int) -> None:
    runs = pool.run(train, stage, accumulation, {})
    assert_close(runs[0], train_plain(make_model(), ranks=RANKS, accumulation=accumulation, steps=STEPS, clip=0.5))
    assert_equal(runs[1], runs[0])


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


def test_tensors_are_exchanged(pool: Pool) -> None:
    pool.run(exchange)
    pool.run(exchange_nothing)


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


def train_codes(rank: int, stage: int) -> list[float]:
    with engine_of(coded(torch.float8_e4m3fn), settings(stage), optimizer=adamw_of_trained) as engine:
        return train_steps(engine, 2)


def test_frozen_weights_of_a_dtype_that_gloo_does_not_know(pool: Pool) -> None:
    assert pool.run(train_codes, 3) == pool.run(train_codes, 0)


def look_alone(rank: int) -> dict[str, torch.Tensor]:
    """Use the weights on one rank alone after a step, whose gathers no other rank waits for; on two engines."""
    engines = [engine_of(make_model(seed=seed), settings(1, 1, 0.5, BESIDE)) for seed in range(2)]
    for step in range(2):
        for engine in engines:
            train_steps(engine, step + 1, step)
    if rank == 1:
        for engine in engines:
            with torch.no_grad():
                engine(*token_batch(9, 0, 0))
    weights = {}
    for seed, engine in enumerate(engines):
        weights |= {f"{seed}.{name}": weight.clone() for name, weight in engine.module.state_dict().items()}
        engine.close()
    return weights


def test_a_rank_looks_at_its_weights_alone(pool: Pool) -> None:
    first, second = pool.run(look_alone)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def forked(use: Callable[[], None]) -> None:
    """Run in a fork, which must end well."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            use()
        finally:
            os._exit(7 if sys.exc_info()[0] is None else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def close_in_a_fork(rank: int) -> None:
    """Close the engine in a fork while updates are under way in the first process, and train on there."""
    engine = engine_of(make_model(), settings(1, 1, 0.5, BESIDE))
    train_steps(engine, 1)
    forked(engine.close)
    train_steps(engine, 3, 1)  # the other rank does not believe that this one has left
    engine.close()


def use_in_a_fork(rank: int) -> None:
    def use() -> None:
        engine.reload_states()
        with wherry.gathered_for_generation(engine):  # weights are whole on every rank
            assert engine.is_generating() and engine(*token_batch(0, 0, rank)).isfinite()
        with pytest.raises(WherryError, match=rf"is of process {os.getppid()}, .* with a model of its own"):
            engine.backward(engine(*token_batch(0, 0, rank)))

    engine = engine_of(make_model(), settings(1))
    engine.offload_states()
    forked(use)
    engine.close()


@pytest.mark.parametrize("use", [close_in_a_fork, use_in_a_fork])
def test_a_fork_may_look_and_close_and_not_train(pool: Pool, use: Callable[[int], None]) -> None:
    pool.run(use)
