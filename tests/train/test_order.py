"""Choose whether `wherry train` runs the micro-batches of a window together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wherry.activations import build
from wherry.train.config import layer_major_pays
from wherry.train.presets import Shape

SHAPE = Shape(layers=2, hidden=32, heads=2, sequence=16)
# Of the micro-batches of a window; half of what is free may be taken.
NEEDED = 2 * 4 * SHAPE.activation_bytes(2, checkpointed=False, itemsize=4)
OFFLOADED = {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("stage", "change", "together"),
    [
        (3, {}, True),
        (2, {}, True),
        (1, {}, False),
        (3, {"accumulation": 1}, False),
        (3, {"ranks": 1}, False),
        (3, {"ranks": 1, "zero": OFFLOADED}, False),
        (3, {"ranks": 1, "zero": OFFLOADED, "device": "xpu"}, True),
        (3, {"order": "step_major"}, False),
        (3, {"free": NEEDED - 1}, False),
    ],
)
def test_where_micro_batches_would_travel_one_by_one_and_there_is_room_for_all(
    stage: int, change: dict[str, Any], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"accumulation": 4, "ranks": 2, "zero": {}, "device": "cpu", "order": "auto", "free": NEEDED} | change
    monkeypatch.setattr(build, "free_bytes", lambda *_: how["free"])
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": how["accumulation"]}
    config |= {"zero_optimization": {"stage": stage, **how["zero"]}, "wherry": {"accumulation": how["order"]}}
    ranks, device = how["ranks"], torch.device(how["device"])
    place: Any = SimpleNamespace(data=SimpleNamespace(size=ranks), device=device, world_size=ranks)
    assert layer_major_pays(config, place, SHAPE, False) is together
