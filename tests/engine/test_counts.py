"""Counted, not guessed: the collectives and bytes of a step, and the bytes a rank holds."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings, token_batch

import wherry
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks

# A shard is a multiple of 128 elements, and a parameter starts on a multiple of 32.
SHARD, PARAMETER = 128, 32


def padded(model: torch.nn.Module, ranks: int) -> dict[str, int]:
    """Elements of each unit with its padding, worked out from the shapes alone."""
    units: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root"
        units[unit] += -(-parameter.numel() // PARAMETER) * PARAMETER
    multiple = ranks * SHARD
    return {unit: -(-numel // multiple) * multiple for unit, numel in units.items()}


def measure(stage: int, ranks: int, accumulation: int, precision: str, steps: int = 3) -> list[dict[str, Any]]:
    """Traffic of one step after the first two, and memory, by rank."""
    model = make_model()

    def body(comm: Comm) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        more = {} if precision == "fp32" else {precision: {"enabled": True}}
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(stage, accumulation, more=more), mesh=comm
        )
        for step in range(steps):
            comm.traffic.clear()
            for micro in range(accumulation):
                engine.backward(engine(*token_batch(step, micro, comm.rank)))
                engine.step()
        rows = {row.state: row for row in engine.memory()}
        return {
            "calls": dict(comm.traffic.calls),
            "bytes": dict(comm.traffic.bytes),
            "volume": comm.traffic.volume(),
            "memory": rows,
            "peak": engine._gatherer.peak_live,
        }

    return run_ranks(ranks, body)


NORM = 16  # two float64 scalars: the square, and whether gradients are missing
MISSING = 4  # at stage 0, where no norm travels, that alone
DIGEST = 32  # at stage 3 four more: what the rank has gathered, and which units it ran


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_of_a_step_equal_the_formulas(stage: int, ranks: int, accumulation: int) -> None:
    units = padded(make_model(), 1 if stage == 0 else ranks)
    psi, count = 4 * sum(units.values()), len(units)
    k = accumulation
    expected = {
        # Gradients once a window, all-reduced: 2 psi.
        0: ({"all_reduce": count + 1}, {"all_reduce": psi + MISSING}, 2 * (psi + MISSING)),
        # Gradients once a window, reduce-scattered, and updated weights gathered: 2 psi.
        1: (
            {"reduce_scatter": count, "all_gather": count, "all_reduce": 1},
            {"reduce_scatter": psi, "all_gather": psi, "all_reduce": NORM},
            2 * psi + 2 * NORM,
        ),
        # Gradients every micro-batch, and updated weights: (k + 1) psi.
        2: (
            {"reduce_scatter": k * count, "all_gather": count, "all_reduce": 1},
            {"reduce_scatter": k * psi, "all_gather": psi, "all_reduce": NORM},
            (k + 1) * psi + 2 * NORM,
        ),
    }
    # Weights in forward and in backward, the root unit once for both, and gradients: 3 psi less one of the root.
    gathers = 2 * count - 1
    gathered = 2 * psi - 4 * units["root"]
    expected[3] = (
        {"reduce_scatter": k * count, "all_gather": k * gathers, "all_reduce": 1},
        {"reduce_scatter": k * psi, "all_gather": k * gathered, "all_reduce": NORM + DIGEST},
        k * (psi + gathered) + 2 * (NORM + DIGEST),
    )
    calls, nbytes, volume = expected[stage]
    for seen in measure(stage, ranks, accumulation, "fp32"):
        assert seen["calls"] == calls
        assert seen["bytes"] == nbytes
        assert seen["volume"] == volume


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_a_rank_equals_the_formulas(stage: int, ranks: int, precision: str) -> None:
    """2 psi + 2 psi + 10 psi in bf16, each divided by the ranks where it is partitioned; 4 + 4 + 8 in fp32.

    In bf16 the working weights are the upper halves of the masters: weights and optimizer together are 12 psi.
    """
    units = padded(make_model(), ranks if stage else 1)
    psi = sum(units.values())
    word, state = (4, 8) if precision == "fp32" else (2, 10)
    per = {
        name: ranks if stage >= level else 1 for name, level in (("optimizer", 1), ("gradients", 2), ("parameters", 3))
    }
    for seen in measure(stage, ranks, 1, precision):
        rows = seen["memory"]
        assert rows["parameters"].bytes_actual == word * psi // per["parameters"]
        assert rows["gradients"].bytes_actual == word * psi // per["gradients"]
        # Rules keep state for parameters and the padding between them, not for the padding at a flat's end.
        tail = state * SHARD * ranks * len(units)
        assert 0 <= state * psi // per["optimizer"] + 256 - rows["optimizer"].bytes_actual <= tail + 256
        for row in rows.values():
            if row.state != "optimizer":
                assert row.bytes_actual <= row.bytes_expected
        assert rows["gathered"].bytes_actual == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_weights_stay_within_the_budget(ranks: int) -> None:
    """At most the root unit, the unit at work and the ones prefetched are whole; with no prefetch, two units."""
    model = make_model()
    units = padded(model, ranks)

    def body(comm: Comm) -> int:
        mine = copy.deepcopy(model)
        config = settings(3)
        config["zero_optimization"]["stage3_max_live_parameters"] = 0
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        for step in range(2):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()
        return engine._gatherer.peak_live

    block = max(numel for unit, numel in units.items() if unit != "root")
    assert run_ranks(ranks, body) == [units["root"] + block] * ranks


def test_prefetch_follows_the_schedule() -> None:
    """From the second step on, a unit's gather is under way before its forward asks for it."""
    model = make_model()

    def body(comm: Comm) -> list[int]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=settings(3), mesh=comm)
        peaks = []
        for step in range(2):
            engine._gatherer.peak_live = 0
            loss = engine(*token_batch(step, 0, comm.rank))
            peaks.append(engine._gatherer.peak_live)
            engine.backward(loss)
            engine.step()
        return peaks

    first, second = run_ranks(2, body)[0]
    assert second > first


def test_small_flats_stay_whole_below_the_persistence_threshold() -> None:
    model = make_model()

    def body(comm: Comm) -> dict[str, int]:
        mine = copy.deepcopy(model)
        config = settings(3)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 10**6
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        comm.traffic.clear()
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        return dict(comm.traffic.calls)

    # Gathered once, after the update, as at stage 2.
    assert run_ranks(2, body)[0]["all_gather"] == len(padded(model, 2))
