"""Secondary shards: backward gathers from the ranks of its own node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import assert_same, on_ranks, token_batch, weights_of

import wherry
from wherry.errors import WherryError


def secondary(size: int = 2) -> dict[str, Any]:
    return {"zero_optimization": {"zero_hpz_partition_size": size}}


def test_backward_communicates_across_nodes_for_reductions_only() -> None:
    def use(engine: Any) -> None:
        comm, node = engine.comm, engine.topology.node
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
            assert node.traffic.calls == {"all_gather": 3}  # the blocks: the root unit stays whole
        rows = {row.state: row for row in engine.memory()}
        whole = sum(flat.nbytes for unit in engine.units for flat in unit.flats)
        assert rows["parameters"].bytes_actual == rows["parameters"].bytes_expected == whole // 4 + whole // 2

    on_ranks(use, ranks=4, config=secondary())


def test_an_edit_between_forward_and_backward_reaches_the_backward() -> None:
    def use(engine: Any) -> dict[str, torch.Tensor]:
        loss = engine(*token_batch(0, 0, engine.comm.rank))
        weight = engine.module.blocks[1].up.weight
        with wherry.gathered(weight, modifier_rank=2):
            weight.data.mul_(3 if engine.comm.rank == 2 else 1)
        engine.backward(loss)
        engine.step()
        return weights_of(engine)

    assert_same(on_ranks(use, ranks=4, config=secondary())[0], on_ranks(use, ranks=4)[0])


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(WherryError, match="3 does not divide the 4 data-parallel ranks"):
        on_ranks(lambda engine: None, ranks=4, config=secondary(3))
