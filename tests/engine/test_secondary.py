"""Secondary shards: backward gathers from the ranks of its own node, with the same results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
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

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def near(size: int = 2, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size, **more}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_bits_as_without(size: int, precision: str) -> None:
    model = make_model()
    half = {} if precision == "fp32" else {precision: {"enabled": True}}
    common: dict[str, Any] = {"stage": 3, "ranks": 4, "accumulation": 2, "steps": 4, "clip": 0.5}
    without = train_engine(model, config=half, **common)
    assert_equal(train_engine(model, config=near(size) | half, **common), without)
    merged = near(size, allgather_bucket_size=10**6, reduce_bucket_size=10**6)
    assert_equal(train_engine(model, config=merged | half, **common), without)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str) -> None:
    model = make_model(MODELS[name])
    common: dict[str, Any] = {"ranks": 4, "steps": 3, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=3, config=near(), **common), train_plain(model, **common))


def test_ranks_that_run_different_units() -> None:
    model = make_model(Choosing)
    common: dict[str, Any] = {"ranks": 4, "steps": 6, "accumulation": 2, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=3, config=near(), **common), train_plain(model, **common))


def test_backward_leaves_the_node_for_reductions_only() -> None:
    model = make_model()

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more=near()), mesh=comm
        )
        node = engine.topology.node
        assert node is not None
        assert node.size == 2
        for step in range(2):
            comm.traffic.clear()
            node.traffic.clear()
            loss = engine(*token_batch(step, 0, comm.rank))
            assert comm.traffic.calls == {"all_gather": 4}
            assert not node.traffic.calls
            engine.backward(loss)
            engine.step()
            assert comm.traffic.calls == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1}
            assert node.traffic.calls == {"all_gather": 3}  # the blocks: the root unit has stayed
        rows = {row.state: row for row in engine.memory()}
        whole = sum(flat.nbytes for unit in engine.units for flat in unit.flats)
        assert rows["parameters"].bytes_actual == rows["parameters"].bytes_expected == whole // 4 + whole // 2

    run_ranks(4, body)


def test_an_edit_between_forward_and_backward_is_seen() -> None:
    """The backward uses the weights as they are, as it does without secondary shards."""
    model = make_model()

    def body(comm: Comm, config: dict[str, Any]) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more=config), mesh=comm
        )
        loss = engine(*token_batch(0, 0, comm.rank))
        with wherry.gathered(mine.blocks[1].up.weight, modifier_rank=2):
            if comm.rank == 2:
                mine.blocks[1].up.weight.data.mul_(3)
        engine.backward(loss)
        engine.step()
        return engine.module.state_dict()

    one, other = (run_ranks(4, lambda comm, config=config: body(comm, config))[0] for config in ({}, near()))
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_a_size_that_does_not_divide_the_ranks() -> None:
    def body(comm: Comm) -> None:
        wherry.initialize(model=make_model(), config=settings(3, more=near(3)), mesh=comm)

    with pytest.raises(WherryError, match="3 does not divide the 4 data-parallel ranks"):
        run_ranks(4, body)
