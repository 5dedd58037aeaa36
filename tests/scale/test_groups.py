"""States partitioned within groups of ranks and replicated across them: results, counts, bytes, checkpoints, errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, load_into, on, save_from, state_of
from tests.engine.harness import (
    adamw,
    assert_close,
    assert_equal,
    make_model,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from tests.engine.test_models import MODELS, sgd, vectors
from tests.engine.test_skipping import Choosing
from tests.scale.windows import train_windows

import wherry
from wherry import config as configs
from wherry.errors import ConfigError
from wherry.parallel.comm import Comm
from wherry.plan.dry_run import count
from wherry.sources import find
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
MODEL = make_model()


def groups(size: int = 2, stage: int = 3, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "mics_shard_size": size, **more}}


# Results.


@pytest.mark.parametrize("size", [1, 2, 4])
def test_trains_as_plain_pytorch_and_as_stage_3(size: int) -> None:
    common: dict[str, Any] = {"ranks": 4, "accumulation": 2, "steps": 4, "clip": 0.5}
    run = train_engine(MODEL, stage=3, config=groups(size), **common)
    whole = train_engine(MODEL, stage=3, **common)
    assert_close(run, train_plain(MODEL, **common))
    assert_close(run, whole)
    if size == 4:
        assert_equal(run, whole)
    # What travels together changes nothing.
    merged = groups(size, allgather_bucket_size=10**6, reduce_bucket_size=10**6)
    assert_equal(train_engine(MODEL, stage=3, config=merged, **common), run)


@pytest.mark.parametrize("stage", [1, 2])
def test_lower_stages_have_groups_too(stage: int) -> None:
    common: dict[str, Any] = {"ranks": 4, "accumulation": 2, "steps": 4, "clip": 0.5}
    run = train_engine(MODEL, stage=stage, config=groups(stage=stage), **common)
    assert_close(run, train_plain(MODEL, **common))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str) -> None:
    model = make_model(MODELS[name])
    common: dict[str, Any] = {"ranks": 4, "steps": 3, "accumulation": 2, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=3, config=groups(), **common), train_plain(model, **common))


def test_ranks_that_run_different_units() -> None:
    model = make_model(Choosing)
    common: dict[str, Any] = {"ranks": 4, "steps": 6, "accumulation": 2, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=3, config=groups(), **common), train_plain(model, **common))


@pytest.mark.parametrize("more", [BF16, FP16, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}])
def test_replicas_hold_the_same_bits(more: dict[str, Any]) -> None:
    """In half precision too, where another order of sums would show."""

    def body(engine: Any, comm: Comm) -> Any:
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(*token_batch(step, micro, comm.rank)))
                engine.step()
        masters = {n: engine.states.full(n, "master") for n, _ in engine.module.named_parameters()}
        return masters, engine.module.state_dict(), engine.get_global_grad_norm()

    shape = Shape(4, 3, 2, groups() | more)
    whole = on(Shape(4, 3, 2, more), body)[0]
    first, *others = on(shape, body)
    for other in others:
        assert_same(other[0], first[0])
        assert_same(other[1], first[1])
        assert other[2] == first[2]
    assert first[2] == pytest.approx(whole[2], rel=0.02)
    for name, value in first[0].items():
        assert (value - whole[0][name]).abs().max() < 0.02, name


def test_a_sum_of_more_backwards_than_the_window_has() -> None:
    """What comes after the boundary joins a sum that is over all ranks already."""

    def body(engine: Any, comm: Comm) -> Any:
        for micro in range(3):
            engine.backward(engine(*token_batch(0, micro, comm.rank)))
        name = "blocks.0.up.weight"
        gradient = engine.gradients(name)
        engine.step()
        return {name: gradient, **engine.module.state_dict()}

    whole, cut = on(Shape(4, 3), body), on(Shape(4, 3, more=groups()), body)
    for name, value in whole[0].items():
        for rank in cut:
            torch.testing.assert_close(rank[name], value, rtol=0, atol=1e-5)


OFFLOADED: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "parameters too": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "stage 2": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.parametrize("free", [None, 0], ids=["sums on the device", "sums on the host"])
@pytest.mark.parametrize("row", OFFLOADED)
def test_offloaded_and_late_as_on_the_device(row: str, free: int | None) -> None:
    """Gradients that are streamed to the host cross to the replicas before they leave the device."""

    def body(comm: Comm, late: bool, k: int) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(MODEL)
        chaos = Chaos(comm.rank) if late else None
        link = ChaosLink(chaos, free=free) if chaos else None
        config = settings(3, k, 0.5 if k > 1 else 0.0, groups(**(OFFLOADED[row] if late else {})))
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=topology(comm, chaos, link=link)
        )
        for step in range(3):
            for micro in range(k):
                engine.backward(engine(*token_batch(step, micro, comm.rank)))
                engine.step()
        state = engine.module.state_dict()
        engine.close()
        return state

    for k in (1, 2):
        there, here = (run_ranks(4, lambda comm, late=late, k=k: body(comm, late, k)) for late in (True, False))
        for rank in there:
            for name, value in here[0].items():
                torch.testing.assert_close(rank[name], value, rtol=0, atol=1e-5)
            assert_same(rank, there[0])


# Counts and bytes.


@pytest.mark.parametrize("order", ["step_major", "layer_major"])
def test_gathers_stay_in_the_group_and_sums_cross_once_a_window(order: str) -> None:
    k, flats = 8, 4

    def seen(engine: Any, step: int) -> Any:
        counted = {among: (dict(t.calls), dict(t.bytes)) for among, t in engine.topology.traffic()}
        for _, traffic in engine.topology.traffic():
            traffic.clear()
        shards = sum(flat.nbytes // 2 for unit in engine.units for flat in unit.flats)
        return counted, shards

    run = train_windows(MODEL, stage=3, order=order, accumulation=k, ranks=4, steps=3, config=groups(), each_step=seen)
    counted, shards = run.extra[-1]
    times = 1 if order == "layer_major" else k
    assert counted[""] == ({"all_reduce": 1}, {"all_reduce": 6 * 8})
    calls, nbytes = counted[" within groups of 2"]
    # Once in forward and once in backward; the root unit stays.
    assert calls == {"all_gather": times * (2 * flats - 1), "reduce_scatter": times * flats}
    assert nbytes["reduce_scatter"] == times * 2 * shards
    assert counted[" across groups"] == ({"all_reduce": flats}, {"all_reduce": shards})


@pytest.mark.parametrize("k", [1, 3])
def test_a_dry_run_counts_the_same_bytes(k: int) -> None:
    given = settings(3, k, more=groups())

    def body(comm: Comm) -> Any:
        mine = copy.deepcopy(MODEL)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=given, mesh=comm)
        for step in range(2):
            for _, traffic in engine.topology.traffic():
                traffic.clear()
            for micro in range(k):
                engine.backward(engine(*token_batch(step, micro, comm.rank)))
                engine.step()
        found = engine.topology.traffic()
        return {operation + among: nbytes for among, traffic in found for operation, nbytes in traffic.bytes.items()}

    told = count(find(lambda: (MODEL, token_batch(0, 0, 0))), configs.load(given), ranks=4)
    assert told.bytes == run_ranks(4, body)[0]


# Checkpoints.

SHAPES = [
    Shape(1),
    Shape(2, 3),
    Shape(4, 2),
    Shape(4, 3),
    Shape(4, 3, more=groups()),
    Shape(4, 1, more=groups(stage=1)),
]


def test_a_checkpoint_is_written_once_and_loads_into_any_shape(tmp_path: Path) -> None:
    cut = Shape(4, 3, more=groups())
    saved = save_from(cut, tmp_path / "cut")
    whole = save_from(Shape(4, 3), tmp_path / "whole")
    for shape in SHAPES:
        assert_same(load_into(shape, tmp_path / "cut"), saved)
    assert_same(load_into(cut, tmp_path / "whole"), whole)
    one, other = (
        sum(path.stat().st_size for path in (tmp_path / name).rglob("*.safetensors")) for name in ("cut", "whole")
    )
    assert abs(one - other) < 0.1 * other


@pytest.mark.parametrize("more", [{}, FP16])
def test_a_save_within_a_window_is_of_the_last_update(tmp_path: Path, more: dict[str, Any]) -> None:
    """In the same shape bit for bit, in others with the same sums."""
    cut = Shape(4, 3, 2, groups() | more)

    def update(engine: Any, comm: Comm, step: int) -> None:
        for micro in range(2):
            engine.backward(engine(*token_batch(step, micro, comm.rank)))
            engine.step()

    def stop(engine: Any, comm: Comm) -> None:
        update(engine, comm, 0)
        engine.backward(engine(*token_batch(7, 0, comm.rank)))
        engine.step()
        engine.save_checkpoint(tmp_path)

    def go_on(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        engine.load_checkpoint(tmp_path)
        update(engine, comm, 1)
        return state_of(engine)

    def undisturbed(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        update(engine, comm, 0)
        update(engine, comm, 1)
        return state_of(engine)

    expected = on(cut, undisturbed)[0]
    on(cut, stop)
    assert_same(on(cut, go_on)[0], expected)
    for shape in (Shape(4, 3, 2, dict(more)), Shape(4, 0, 2, dict(more)), Shape(4, 1, 2, groups(stage=1) | more)):
        for name, value in on(shape, go_on)[0].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-3 if more else 1e-5)


# With everything else.


def test_secondary_shards_within_a_group() -> None:
    common: dict[str, Any] = {"ranks": 4, "accumulation": 2, "steps": 3}
    both = groups(4, zero_hpz_partition_size=2)
    assert_equal(train_engine(MODEL, stage=3, config=both, **common), train_engine(MODEL, stage=3, **common))


def test_built_partitioned_loaded_and_edited() -> None:
    def body(comm: Comm) -> dict[str, torch.Tensor]:
        config = settings(3, more=groups())
        with wherry.Init(config, mesh=comm):
            model = copy.deepcopy(MODEL)
        engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config, mesh=comm)
        with wherry.gathered(model.blocks[1].up.weight, modifier_rank=3):
            if comm.rank == 3:
                model.blocks[1].up.weight.data.fill_(2.0)
        return engine.module.state_dict()

    expected = copy.deepcopy(MODEL)
    expected.blocks[1].up.weight.data.fill_(2.0)
    for state in run_ranks(4, body):
        assert_same(state, dict(expected.state_dict()))


@pytest.mark.parametrize(
    ("size", "more", "message"),
    [
        (3, {}, "mics_shard_size: 3 does not divide the 4 data-parallel ranks; give a divisor"),
        (8, {}, "mics_shard_size: 8 does not divide the 4"),
        (0, {}, "expected a number of ranks, or -1"),
        (2, {"zero_hpz_partition_size": 4}, "4 does not divide mics_shard_size 2"),
    ],
)
def test_sizes_that_do_not_fit(size: int, more: dict[str, Any], message: str) -> None:
    def body(comm: Comm) -> None:
        wherry.initialize(model=copy.deepcopy(MODEL), config=settings(3, more=groups(size, **more)), mesh=comm)

    with pytest.raises(ConfigError, match=message):
        run_ranks(4, body)
