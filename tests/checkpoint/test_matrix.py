"""Any to any: saved by every number of ranks and stage, loaded by every other, the states the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, load_into, on, save_from, state_of

from wherry.parallel.comm import Comm

RANKS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
BF16 = {"bf16": {"enabled": True}}
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
# States and weights on the host and on disk, by all numbers of ranks and every stage that has them.
TIERED = [
    Shape(ranks, stage, more={"zero_optimization": {"stage": stage, **tiers}})
    for ranks, stage, tiers in (
        (3, 1, {"offload_optimizer": CPU}),
        (2, 2, {"offload_optimizer": CPU}),
        (1, 3, {"offload_optimizer": CPU, "offload_param": NVME}),
        (4, 3, {"offload_optimizer": NVME, "offload_param": NVME}),
    )
]
SHAPES = [*(Shape(ranks, stage) for ranks in RANKS for stage in STAGES), *TIERED]

Saved = dict[Shape, tuple[Path, dict[str, torch.Tensor]]]


def key(shape: Shape) -> str:
    zero = shape.more.get("zero_optimization", {})
    return "-".join([f"{shape.ranks}x{shape.stage}", *(v["device"] for v in zero.values() if isinstance(v, dict))])


def made(shape: Shape, more: dict[str, Any], folder: Path) -> Shape:
    """With what all have, and a folder for what rests on disk. Split masters round otherwise, so all are whole."""
    zero = {
        name: {**value, "nvme_path": str(folder)} if value == NVME else value
        for name, value in shape.more.get("zero_optimization", {"stage": shape.stage}).items()
    }
    own = {**more, "zero_optimization": zero, "wherry": {"master": "whole"}}
    return Shape(shape.ranks, shape.stage, more=own)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    more = BF16 if request.param == "bf16" else {}
    found = {}
    for shape in SHAPES:
        folder = tmp_path_factory.mktemp(f"{request.param}-{key(shape)}")
        found[key(shape)] = (folder / "saved", save_from(made(shape, more, folder), folder / "saved"))
    return more, found


@pytest.mark.parametrize("target", SHAPES, ids=key)
def test_every_checkpoint_loads(saved: tuple[dict[str, Any], Any], target: Shape, tmp_path: Path) -> None:
    """Each pair in one of the two dtypes, and each of these with every shape on both sides."""
    more, checkpoints = saved
    names = random.Random(key(target)).sample(sorted(checkpoints), len(checkpoints))
    chosen = set(names[::2] if more else names[1::2])

    def body(engine: Any, comm: Comm) -> None:
        for name, (folder, states) in checkpoints.items():
            if name not in chosen:
                continue
            path, client_state = engine.load_checkpoint(folder)
            assert path == str(folder / "global_step2") and client_state == {}
            found = state_of(engine, everywhere=False)
            if comm.rank == 0:
                assert_same(states, found)
            assert engine.global_steps == 2

    on(made(target, more, tmp_path), body)


@pytest.mark.parametrize("shape", [Shape(1, 0), Shape(2, 1), Shape(3, 2), Shape(2, 3)], ids=str)
def test_grouping_may_differ(tmp_path: Path, shape: Shape) -> None:
    """Units of other modules cut the flats elsewhere."""
    whole = {"wherry": {"unit_classes": ["TinyLM"]}}
    linear = {"wherry": {"unit_classes": ["Linear", "LayerNorm"]}}
    states = save_from(Shape(shape.ranks, shape.stage, more=whole), tmp_path)

    def body(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(tmp_path)
        assert_same(states, state_of(engine))

    on(Shape(2, 3, more=linear), body)
    on(Shape(shape.ranks, shape.stage), body)


HOST = {"offload_optimizer": {"device": "cpu"}}
DISK = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}


def tiers(folder: Path) -> dict[str, Shape]:
    """Shapes whose states rest on the host and on disk."""

    def zero(stage: int, tier: dict[str, Any], **own: Any) -> dict[str, Any]:
        placed = {key: {**value, "nvme_path": str(folder)} for key, value in tier.items()}
        return {"zero_optimization": {"stage": stage, **placed}, "bf16": {"enabled": True}, "wherry": own}

    return {
        "device": Shape(2, 3, more=BF16),
        "host": Shape(2, 2, more=zero(2, HOST, master="whole")),
        "split": Shape(1, 3, more=zero(3, HOST, master="split")),
        "disk": Shape(3, 3, more=zero(3, DISK, master="whole")),
        "before use": Shape(2, 3, more=zero(3, HOST, master="whole", update_policy="before_use")),
    }


@pytest.mark.parametrize("source", ["device", "host", "split", "disk", "before use"])
def test_any_tier_to_any(tmp_path: Path, source: str) -> None:
    """Masters and moments are the same bits; working weights are what the target's own rounding makes of masters."""
    shapes = tiers(tmp_path / "states")
    (tmp_path / "states").mkdir()
    states = save_from(shapes[source], tmp_path / "saved")
    for name, shape in shapes.items():
        found = load_into(shape, tmp_path / "saved")
        assert found.keys() == states.keys()
        for key, value in states.items():
            if key.endswith(":working") and "split" in (source, name) and source != name:
                master = states[key.replace(":working", ":master")]
                assert (found[key].float() - master).abs().max() <= master.abs().max() / 256, (name, key)
            else:
                assert torch.equal(found[key], value), (name, key)
