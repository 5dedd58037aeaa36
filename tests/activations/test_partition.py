"""Activation checkpoints partitioned among tensor-parallel ranks: each keeps its part, and the bits stay the same."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.activations.model import late_links
from tests.engine.harness import LENGTH, WIDTH, engine_of, make_model, settings, token_batch, weights_of
from tests.parallel.handmade import Model

from wherry.activations import build
from wherry.activations.partition import CheckpointPartition
from wherry.errors import WherryError
from wherry.observe.footprint import WORKING, Footprint
from wherry.parallel.topology import Topology
from wherry.testing import run_grid
from wherry.testing.late import ChaosLink

STEPS, BATCH = 2, 2
CHECKPOINT = BATCH * LENGTH * WIDTH * 4


def model_of() -> Any:
    return make_model(partial(Model, blocks=2))


def engine_on(place: Topology, model: Model, stage: int, block: dict[str, Any]) -> Any:
    """Build an engine of this rank's part of a copy of the model."""
    mine = copy.deepcopy(model)
    mine.cut(place.tensor)
    return engine_of(mine, settings(stage, more={"activation_checkpointing": block}), place)


def train(
    model: Model, place: Topology, stage: int, block: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], int, dict[str, int]]:
    engine, losses = engine_on(place, model, stage, block), []
    for step in range(STEPS):
        place.tensor.traffic.clear()
        loss = engine(*token_batch(step, 0, place.data.rank, BATCH))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    weights, traffic = weights_of(engine), place.tensor.traffic
    engine.close()
    return losses, weights, traffic.bytes["all_gather"], dict(traffic.calls)


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> list[ChaosLink]:
    monkeypatch.setattr(build, "SMALLEST_PARTITIONED", 1)
    return late_links(monkeypatch)


@pytest.mark.parametrize(
    ("stage", "data", "tensor", "more"),
    [
        (3, 2, 2, {"cpu_checkpointing": True, "offload_min_bytes": 1}),
        (2, 1, 4, {"nvme_path": "DISK", "offload_min_bytes": 1}),
    ],
)
def test_partitioned_checkpoints(
    stage: int, data: int, tensor: int, more: dict[str, Any], tmp_path: Path, links: list[ChaosLink]
) -> None:
    model, blocks = model_of(), 2
    more = {key: str(tmp_path) if value == "DISK" else value for key, value in more.items()}
    plain = run_grid(lambda place: train(model, place, stage, {}), data=data, tensor=tensor)
    whole = run_grid(lambda place: train(model, place, stage, {"policy": "recompute"}), data=data, tensor=tensor)
    block = {"partition_activations": True, **more}
    cut = run_grid(lambda place: train(model, place, stage, block), data=data, tensor=tensor)
    for one, other in zip(cut, plain, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])
        _, _, gathered, calls = one
        # Each rank keeps 1/M of each checkpoint, and gathers each once.
        assert gathered == blocks * CHECKPOINT
        assert calls["all_gather"] == blocks
        assert calls["all_reduce"] == whole[0][3]["all_reduce"]
    assert links
    assert [link.bytes_down for link in links] == [STEPS * blocks * CHECKPOINT // tensor] * len(links)


def test_a_rank_holds_no_more_than_its_part() -> None:
    model, batch = model_of(), 64

    def body(place: Topology, block: dict[str, Any]) -> tuple[int, int]:
        engine = engine_on(place, model, 0, block)
        for step in range(2):
            with Footprint() as footprint:
                loss = engine(*token_batch(step, 0, 0, batch))
                kept = footprint.live[WORKING]
                engine.backward(loss)
            engine.step()
        engine.close()
        return kept, footprint.peaks[WORKING]

    (whole, whole_peak), (cut, cut_peak) = (
        run_grid(lambda place, block=block: body(place, block), tensor=2)[0]
        for block in ({"policy": "recompute"}, {"partition_activations": True})
    )
    halves = len(model.blocks) * batch * LENGTH * WIDTH * 4 // 2
    assert whole - cut == whole_peak - cut_peak == halves


def test_a_length_that_does_not_divide_is_padded() -> None:
    data = torch.arange(21.0).view(3, 7)

    def body(place: Topology) -> tuple[int, torch.Tensor]:
        partition = CheckpointPartition(place.tensor, smallest=1)
        part = partition.part_of(data, "here")
        return part.numel(), partition.gather(part, data.shape)

    for numel, joined in run_grid(body, tensor=4):
        assert numel == 6
        assert torch.equal(joined, data)


def test_checkpoints_that_differ_are_refused() -> None:
    model = model_of()

    def body(place: Topology) -> None:
        engine = engine_on(place, model, 1, {"partition_activations": True})
        ids, targets = token_batch(0, 0, 0)
        engine(ids % 20 + place.tensor.rank, targets)

    with pytest.raises(WherryError, match=r"blocks\.0: input 0 of the checkpoint differs between"):
        run_grid(body, tensor=2)
