"""States partitioned within groups of ranks and replicated across: results, counts, bytes, checkpoints, errors."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, load_into, save_from
from tests.engine.harness import (
    Run,
    assert_close,
    assert_equal,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    masters_of,
    on_ranks,
    settings,
    token_batch,
    train,
    train_engine,
    train_plain,
)
from tests.tiers.rows import offload

import wherry
from wherry.errors import ConfigError
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
MODEL = make_model()


def groups(size: int = 2, stage: int = 3, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "mics_shard_size": size, **more}}


COMMON: dict[str, Any] = {"ranks": 4, "accumulation": 2, "steps": 2, "clip": 0.5}


@functools.cache
def oracle() -> Run:
    return train_plain(MODEL, **COMMON)


@pytest.mark.parametrize(("stage", "size"), [(3, 1), (3, 2), (2, 2), (1, 2)])
def test_trains_as_plain_pytorch(stage: int, size: int) -> None:
    run = train_engine(MODEL, stage=stage, config=groups(size, stage), **COMMON)
    assert_close(run, oracle())
    if (stage, size) == (3, 2):  # shared collectives change no bit
        merged = groups(size, allgather_bucket_size=10**6, reduce_bucket_size=10**6)
        assert_equal(train_engine(MODEL, stage=3, config=merged, **COMMON), run)


@pytest.mark.parametrize("more", [FP16, BF16])
def test_replicas_hold_the_same_bits(more: dict[str, Any]) -> None:
    """Train in half precision, where another order of sums changes bits."""

    def use(engine: Any) -> Any:
        train(engine, 1)
        return masters_of(engine), engine.module.state_dict(), engine.get_global_grad_norm()

    common: dict[str, Any] = {"ranks": 4, "accumulation": 2}
    whole = on_ranks(use, config=more, **common)[0]
    first, *others = on_ranks(use, config=groups() | more, **common)
    for other in others:
        assert_same(other[0], first[0])
        assert_same(other[1], first[1])
        assert other[2] == first[2]
    assert first[2] == pytest.approx(whole[2], rel=0.02)
    assert_near(first[0], whole[0], 0.02)


def test_a_sum_of_more_backwards_than_the_window_has() -> None:
    """Add a backward after the boundary to a sum that is over all ranks already."""

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for micro in range(3):
            engine.backward(engine(*token_batch(0, micro, engine.comm.rank)))
        gradient = engine.gradients("blocks.0.up.weight")
        engine.step()
        return {"gradient": gradient, **engine.module.state_dict()}

    whole = on_ranks(use, ranks=4)[0]
    for rank in on_ranks(use, ranks=4, config=groups()):
        assert_near(rank, whole)


@pytest.mark.parametrize(("row", "free"), [("offload-3-parameters", 0), ("offload-2", None)])
def test_offloaded_and_late_as_on_the_device(row: str, free: int | None, tmp_path: Path) -> None:
    """Offload gradients, which cross to the replicas before they leave the device; `free` 0 sums them on the host."""

    def use(engine: Any) -> dict[str, torch.Tensor]:
        train(engine, 2)
        return engine.module.state_dict()

    def place(comm: Comm) -> Topology:
        chaos = Chaos(comm.rank)
        return topology(comm, chaos, link=ChaosLink(chaos, free=free))

    config = offload(row, tmp_path, "at_step")
    config["zero_optimization"]["mics_shard_size"] = 2
    common: dict[str, Any] = {"ranks": 4, "accumulation": 2, "clip": 0.5}
    first, *others = on_ranks(use, config=config, place=place, **common)
    assert_near(first, on_ranks(use, config=groups(), **common)[0])
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("order", ["step_major", "layer_major"])
def test_gathers_stay_in_the_group_and_sums_cross_once_a_window(order: str) -> None:
    k, flats = 4, 4

    def seen(engine: Any, step: int) -> Any:
        counted = {among: (dict(t.calls), dict(t.bytes)) for among, t in engine.topology.traffic()}
        for _, traffic in engine.topology.traffic():
            traffic.clear()
        shards = sum(flat.nbytes // 2 for unit in engine.units for flat in unit.flats)
        return counted, shards

    config = groups() | {"wherry": {"accumulation": order}}
    common: dict[str, Any] = {"accumulation": k, "ranks": 4, "steps": 2, "config": config, "each_step": seen}
    counted, shards = train_engine(MODEL, stage=3, by_window=True, **common).extra[-1]
    times = 1 if order == "layer_major" else k
    assert counted[""] == ({"all_reduce": 1}, {"all_reduce": 6 * 8})
    calls, nbytes = counted[" within groups of 2"]
    # Once in forward and once in backward; the root unit stays whole.
    assert calls == {"all_gather": times * (2 * flats - 1), "reduce_scatter": times * flats}
    assert nbytes["reduce_scatter"] == times * 2 * shards
    assert counted[" across groups"] == ({"all_reduce": flats}, {"all_reduce": shards})


def test_a_checkpoint_of_groups_is_written_once_and_loads_into_one_rank(tmp_path: Path) -> None:
    states, sizes = [], []
    for number, more in enumerate((groups(), {})):
        states.append(save_from(Shape(4, 3, more=more), tmp_path / str(number)))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(number)).rglob("*.safetensors")))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    assert_same(load_into(Shape(1), tmp_path / "0"), states[0])


def test_secondary_shards_within_a_group() -> None:
    both = groups(4, zero_hpz_partition_size=2)
    common: dict[str, Any] = {"stage": 3, "ranks": 4, "steps": 2}
    assert_equal(train_engine(MODEL, config=both, **common), train_engine(MODEL, **common))


def test_built_partitioned_loaded_and_edited() -> None:
    def body(comm: Comm) -> dict[str, torch.Tensor]:
        config = settings(3, more=groups())
        with wherry.Init(config, mesh=comm):
            model = copy.deepcopy(MODEL)
        engine = engine_of(model, config, comm)
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
        (0, {}, "expected a number of ranks, or -1"),
        (2, {"zero_hpz_partition_size": 4}, "4 does not divide mics_shard_size 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(size: int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ranks(lambda engine: None, ranks=4, model=MODEL, config=groups(size, **more))
