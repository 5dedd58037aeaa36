"""Engines of the alias over two small models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import wherry
from wherry.compat.deepspeed.config import load
from wherry.compat.deepspeed.engine import DeepSpeedEngine

ADAM = {"type": "Adam", "params": {"lr": 0.01}}
SGD = {"type": "SGD", "params": {"lr": 1.0}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}
HOST = {"offload_optimizer": {"device": "cpu"}}


with torch.random.fork_rng():
    torch.manual_seed(0)
    _MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_model() -> nn.Sequential:
    """Copy the model: ranks that are threads share the generator it was drawn from."""
    return copy.deepcopy(_MODEL)


def line(weight: float = 1.0, width: int = 4) -> nn.Linear:
    """Build a layer whose gradient is the sum of its inputs."""
    model = nn.Linear(width, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def engine_of(
    stage: int = 0,
    *,
    model: nn.Module | None = None,
    given: Any = None,
    zero: dict[str, Any] | None = None,
    mesh: Any = None,
    **config: Any,
) -> Any:
    """Build an engine; `given` is an optimizer of the script's own, `zero` joins the block `zero_optimization`."""
    config = {"train_micro_batch_size_per_gpu": 2, **config}
    config["zero_optimization"] = {"stage": stage, **(zero or {})}
    if given is None:
        config.setdefault("optimizer", ADAM)
    model = model if model is not None else make_model()
    return wherry.initialize(
        model=model, optimizer=given, config=load(config), mesh=mesh, engine_class=DeepSpeedEngine
    )[0]


def batch(seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.float32)


def loss_of(engine: Any, seed: int = 0) -> torch.Tensor:
    return engine(batch(seed, engine.working_dtype)).float().mean()


def step(engine: Any, seed: int = 0) -> None:
    engine.backward(loss_of(engine, seed))
    engine.step()


def masters(engine: Any) -> list[torch.Tensor]:
    return [engine.states.full(name, "master") for name, _ in engine.module.named_parameters()]
