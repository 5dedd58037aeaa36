"""Collectives and bytes of a step, and the states that a rank holds, equal their formulas."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    PeakGathered,
    TinyLM,
    assert_same,
    make_model,
    on_ranks,
    token_batch,
    train,
    train_step,
    weights_of,
)
from torch import nn

import wherry
from wherry.errors import WherryError

# A shard is a multiple of 128 elements, and a parameter starts on a multiple of 32.
SHARD, PARAMETER = 128, 32


def padded(model: torch.nn.Module, ranks: int) -> dict[str, int]:
    """Compute each unit's elements with its padding from the shapes alone."""
    units: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root"
        units[unit] += -(-parameter.numel() // PARAMETER) * PARAMETER
    multiple = ranks * SHARD
    return {unit: -(-numel // multiple) * multiple for unit, numel in units.items()}


HOST = {"offload_optimizer": {"device": "cpu"}}
# Bytes of an element's weight and gradient; of its state: Adam's moments, and an fp32 master beside them; the config.
# The upper half of a bf16 weight's master is the weight itself.
PRECISIONS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "fp32": (4, 8, {}),
    "bf16": (2, 2 + 8, {"bf16": {"enabled": True}}),
    "bf16 on the host": (2, 2 + 8, {"bf16": {"enabled": True}, "zero_optimization": HOST}),
    "fp16": (2, 4 + 8, {"fp16": {"enabled": True, "loss_scale": 128}}),
}


def measure(stage: int, ranks: int, accumulation: int, precision: str, **zero: int) -> list[dict[str, Any]]:
    """Return the traffic of the third step, and the states after it, by rank."""

    def use(engine: Any) -> dict[str, Any]:
        traffic = engine.comm.traffic
        train(engine, 2)
        traffic.clear()
        train(engine, 3, 2)
        states: Counter[str] = Counter()
        for row in engine.memory():
            states[row.state] += row.bytes_actual
        return {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes), "states": states}

    config = dict(PRECISIONS[precision][2])
    config["zero_optimization"] = config.get("zero_optimization", {}) | zero
    return on_ranks(use, ranks=ranks, stage=stage, accumulation=accumulation, config=config)


NORM = 16  # two float64 scalars: the square, and whether gradients are missing
MISSING = 4  # at stage 0, without a norm, the second alone
DIGEST = 32  # at stage 3 four more: the gathers of the rank, and the units that it ran


@pytest.mark.parametrize(
    ("ranks", "accumulation", "precision", "bucket"),
    [(2, 3, "fp32", 0), (4, 1, "bf16", 10**6), (2, 1, "fp16", 0), (2, 2, "bf16 on the host", 0)],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_of_a_step_equal_the_formulas(
    stage: int, ranks: int, accumulation: int, precision: str, bucket: int
) -> None:
    """Expect 2 psi at stages 0 to 2 and 3 psi at stage 3, of the working dtype; flats together take fewer calls.

    States take 2 psi + 2 psi + 12 psi in fp16, each divided by the ranks where it is partitioned; 4 + 4 + 8 in fp32.
    In bf16 the working weights are the upper halves of the masters: weights and optimizer together are 12 psi.
    """
    units = padded(make_model(), 1 if stage == 0 else ranks)
    word, state, _ = PRECISIONS[precision]
    psi, count = word * sum(units.values()), len(units)
    k, flats = accumulation, 1 if bucket else count
    # Weights in forward and in backward, the root unit once for both: 2 psi less one of the root. Together: the root
    # unit, and in each pass the current block and the prefetched ones.
    gathers = 5 if bucket else 2 * count - 1
    gathered = 2 * psi - word * units["root"]
    reduced = {"reduce_scatter": k * psi, "all_gather": psi, "all_reduce": NORM}
    # An all-reduce sends its tensor twice, other collectives once.
    calls, nbytes = {
        # Gradients once a window, all-reduced: 2 psi.
        0: ({"all_reduce": flats + 1}, {"all_reduce": psi + MISSING}),
        # Gradients once a window, reduce-scattered, and updated weights gathered: 2 psi.
        1: ({"reduce_scatter": flats, "all_gather": flats, "all_reduce": 1}, reduced | {"reduce_scatter": psi}),
        # Gradients every micro-batch, and updated weights: (k + 1) psi.
        2: ({"reduce_scatter": k * flats, "all_gather": flats, "all_reduce": 1}, reduced),
        # Weights twice and gradients, every micro-batch: 3 psi.
        3: (
            {"reduce_scatter": k * flats, "all_gather": k * gathers, "all_reduce": 1},
            reduced | {"all_gather": k * gathered, "all_reduce": NORM + DIGEST},
        ),
    }[stage]
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    everyone = measure(stage, ranks, accumulation, precision, **zero)
    for seen in everyone:
        assert seen["calls"] == calls
        assert seen["bytes"] == nbytes
        assert seen["states"]["gathered"] == 0
    payload = sum(parameter.numel() for parameter in make_model().parameters())
    for name, size, level in (("parameters", word, 3), ("gradients", word, 2), ("optimizer", state, 1)):
        of_all, copies = sum(seen["states"][name] for seen in everyone), 1 if stage >= level else ranks
        least = payload if name == "optimizer" else sum(units.values())  # optimizers keep no state of padding
        assert copies * size * least <= of_all <= copies * size * sum(units.values()), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_weights_stay_within_the_budget(ranks: int) -> None:
    """Expect, without a prefetch, two whole units: the root unit and the current one."""
    units = padded(make_model(), ranks)

    def use(engine: Any) -> int:
        peak = PeakGathered(engine)
        train(engine, 2)
        return peak.take() // 4

    block = max(numel for unit, numel in units.items() if unit != "root")
    config = {"zero_optimization": {"stage3_max_live_parameters": 0}}
    assert on_ranks(use, ranks=ranks, config=config) == [units["root"] + block] * ranks


def test_frozen_weights_are_released_with_those_that_train() -> None:
    """Freeze most of each block, as an adapter does: its weights come last in the backward."""
    model = make_model(lambda: TinyLM(8))
    for block in model.blocks:
        block.up.requires_grad_(False)
    units = padded(model, 2)

    def use(engine: Any) -> int:
        peak = PeakGathered(engine)
        train(engine, 2)
        return peak.take() // 4

    config = {"zero_optimization": {"stage3_max_live_parameters": 0}}
    (highest, _) = on_ranks(use, model=model, config=config)
    assert 0 < highest <= units["root"] + 3 * units["blocks.0"]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_freed_in_the_backward(stage: int) -> None:
    """Expect, beside the sums, the gradients of the root unit, and of two others of which one is being reduced."""
    units = padded(make_model(), 2)

    def use(engine: Any) -> int:
        parameters, held = list(engine.module.parameters()), [0]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(
                lambda _: held.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))
            )
        train(engine, 2)
        return max(held) // 4

    assert all(0 < held <= units["root"] + 2 * units["blocks.0"] for held in on_ranks(use, stage=stage))


def test_prefetch_follows_the_schedule() -> None:
    """Expect a unit's gather to start before its forward from the second step on."""

    def use(engine: Any) -> list[int]:
        peak, peaks = PeakGathered(engine), []
        for step in range(2):
            peak.take()
            loss = engine(*token_batch(step, 0, engine.comm.rank))
            peaks.append(peak.take())
            engine.backward(loss)
            engine.step()
        return peaks

    first, second = on_ranks(use)[0]
    assert second > first


def test_flats_below_the_persistence_threshold_stay_whole() -> None:
    def use(engine: Any) -> tuple[list[str], int]:
        engine.comm.traffic.clear()
        train(engine, 1)
        resident = [flat.name for unit in engine.units for flat in unit.flats if flat.resident]
        return resident, engine.comm.traffic.calls["all_gather"]

    zero = {"stage3_param_persistence_threshold": 10**6}
    # Gathered once, after the update, as at stage 2.
    assert on_ranks(use, config={"zero_optimization": zero})[0] == (["root", "blocks.0", "blocks.1", "blocks.2"], 4)
    # The sum of those that stay is limited; others are gathered in forward and in backward.
    zero["stage3_model_persistence_threshold"] = 2500
    assert on_ranks(use, config={"zero_optimization": zero})[0] == (["root", "blocks.0"], 2 + 2 * 2)


# Small flats share collectives.

BLOCK = 1792  # elements of one block with its padding


def merged(bucket: int = 10**6, **zero: int) -> dict[str, Any]:
    return {"zero_optimization": {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **zero}}


def calls(stage: int, config: dict[str, Any], blocks: int = 8) -> Counter[str]:
    """Count the collectives of the second step."""

    def use(engine: Any) -> Counter[str]:
        for step in range(2):
            engine.comm.traffic.clear()
            train_step(engine, step, engine.comm.rank)
        return Counter(engine.comm.traffic.calls)

    return on_ranks(use, stage=stage, config=config, model=make_model(lambda: TinyLM(blocks)))[0]


def test_small_flats_take_few_collectives() -> None:
    assert calls(2, merged()) == {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}
    # Without shards and a norm, ranks still exchange whether any of them misses a gradient.
    assert calls(0, merged()) == {"all_reduce": 2}
    # The root unit; the first block, and all others ahead of it; the same in backward.
    assert calls(3, merged()) == {"reduce_scatter": 1, "all_gather": 5, "all_reduce": 1}


def test_a_bucket_is_not_overfilled_and_large_flats_are_communicated_alone() -> None:
    assert calls(2, merged(3 * BLOCK))["reduce_scatter"] == 3  # eight blocks and the root unit, by three
    assert calls(2, merged(BLOCK - 1))["reduce_scatter"] == 9


def test_prefetch_windows_of_a_long_model_are_gathered_in_batches() -> None:
    """Check that a window which moves on by one unit does not issue a gather for each."""
    zero = {"stage3_prefetch_bucket_size": 8 * BLOCK, "reduce_bucket_size": 0}
    assert calls(3, merged(8 * BLOCK, **zero), blocks=32)["all_gather"] <= 1 + 2 * (32 // 4 + 2)


@pytest.mark.parametrize("limit", [600, 1000])
def test_every_rank_updates_the_same_flats_together(limit: int, small_sizes: Any) -> None:
    """Use shards that are mostly padding: a batch that is closed by payload would gather in another order."""
    small_sizes(bucket=limit)

    def use(engine: Any) -> list[tuple[str, str]]:
        engine.backward(engine(torch.ones(2, 9)).square().mean())
        comm, asked = engine.comm, engine.comm.asked
        engine.step()
        return [(one[1], one[3]) for one in [*comm.recent][asked - comm.asked :]]

    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(12)])
    first, *others = on_ranks(use, ranks=4, stage=2, config=merged(), model=model)
    assert sum(operation == "all_gather" for operation, _ in first) > 1 and all(other == first for other in others)


# Secondary shards: backward gathers from the ranks of its own node.

SECONDARY = {"zero_optimization": {"zero_hpz_partition_size": 2}}


def test_a_load_after_a_lone_forward_is_seen_by_the_next_backward(tmp_path: Path) -> None:
    def use(engine: Any, *, loads: bool) -> dict[str, torch.Tensor]:
        if loads:
            engine.save_checkpoint(tmp_path)
            train(engine, 1)
            engine(*token_batch(3, 0, engine.comm.rank))
            engine.load_checkpoint(tmp_path)
        train(engine, 1)
        return engine.module.state_dict()

    calm, back = (on_ranks(partial(use, loads=loads), ranks=4, config=SECONDARY)[0] for loads in (False, True))
    assert_same(back, calm)


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

    on_ranks(use, ranks=4, config=SECONDARY)


def test_an_edit_between_forward_and_backward_reaches_the_backward() -> None:
    def use(engine: Any) -> dict[str, torch.Tensor]:
        loss = engine(*token_batch(0, 0, engine.comm.rank))
        weight = engine.module.blocks[1].up.weight
        with wherry.gathered(weight, modifier_rank=2):
            weight.data.mul_(3 if engine.comm.rank == 2 else 1)
        engine.backward(loss)
        engine.step()
        return weights_of(engine)

    assert_same(on_ranks(use, ranks=4, config=SECONDARY)[0], on_ranks(use, ranks=4)[0])


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(WherryError, match="3 does not divide the 4 data-parallel ranks"):
        on_ranks(lambda engine: None, ranks=4, config={"zero_optimization": {"zero_hpz_partition_size": 3}})
