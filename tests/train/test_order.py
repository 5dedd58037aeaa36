"""Where `wherry train` runs the micro-batches of a window together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wherry.activations import build
from wherry.train.config import layer_major_pays
from wherry.train.presets import Shape

SHAPE = Shape(layers=2, hidden=32, heads=2, sequence=16)


def chosen(config: dict[str, Any], *, ranks: int = 2, device: str = "cpu", checkpointed: bool = False) -> bool:
    place: Any = SimpleNamespace(data=SimpleNamespace(size=ranks), device=torch.device(device), world_size=ranks)
    return layer_major_pays({"train_micro_batch_size_per_gpu": 2} | config, place, SHAPE, checkpointed)


def windows(stage: int, accumulation: int = 4, **more: Any) -> dict[str, Any]:
    return {"gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": stage}} | more


OFFLOADED = {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("config", "where", "together"),
    [
        (windows(3), {}, True),
        (windows(2), {}, True),
        (windows(1), {}, False),
        (windows(3, 1), {}, False),
        (windows(3), {"ranks": 1}, False),
        (windows(3, zero_optimization=OFFLOADED), {"ranks": 1}, False),
        (windows(3, zero_optimization=OFFLOADED), {"ranks": 1, "device": "xpu"}, True),
        (windows(3, wherry={"accumulation": "step_major"}), {}, False),
    ],
)
def test_where_micro_batches_would_travel_one_by_one(
    config: dict[str, Any], where: dict[str, Any], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "free_on_gpu", lambda device: 2**40)
    assert chosen(config, **where) is together


def test_where_there_is_room_for_the_activations_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SHAPE.activation_bytes(2, checkpointed=False, itemsize=4)
    for free, together in ((8 * one, True), (8 * one - 1, False)):
        monkeypatch.setattr(build, "free_bytes", lambda place, free=free: free)
        assert chosen(windows(3)) is together
