"""Whole accumulation windows through `engine.train_batch`, in one of the two orders."""

from __future__ import annotations

from typing import Any

from tests.engine.harness import Run, train_engine
from tests.models import sgd, vectors
from torch import nn

VECTORS: dict[str, Any] = {"batch": vectors, "optimizer": sgd}


def windows(model: nn.Module, order: str, **how: Any) -> Run:
    """Train three windows at stage 3, unless the arguments of `train_engine` differ."""
    config = dict(how.pop("config", {}))
    config["wherry"] = {**config.get("wherry", {}), "accumulation": order}
    return train_engine(model, config=config, by_window=True, **{"stage": 3, "steps": 3, **how})
