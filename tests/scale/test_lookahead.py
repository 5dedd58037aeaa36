"""How far gathers look ahead."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.engine.harness import adamw, make_model, settings
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks
from wherry.sharding.unit import Weights


class Unlike(nn.Module):
    """Large units with small ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n, n), nn.Tanh()) for n in (32, 4, 32, 4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.repeat(1, 8)[:, : block[0].in_features])
        return x.square().mean()


def test_a_small_unit_does_not_take_the_place_of_the_large_one_behind_it() -> None:
    model = make_model(Unlike)

    def body(comm: Comm) -> list[set[str]]:
        mine = copy.deepcopy(model)
        zero = {"stage3_prefetch_bucket_size": 1100, "allgather_bucket_size": 500}
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more={"zero_optimization": zero}),
            mesh=comm,
        )  # fmt: skip
        on_the_way: list[set[str]] = []

        def note(*_: Any) -> None:
            flats = [flat for unit in engine.units for flat in unit.travelling]
            on_the_way.append({flat.name for flat in flats if flat.weights is Weights.GATHERING})

        mine.blocks[0][0].register_forward_pre_hook(note)
        mine.blocks[4][1].register_full_backward_hook(note)
        for _ in range(3):
            on_the_way.clear()
            engine.backward(engine(torch.ones(2, 32)))
            engine.step()
        engine.close()
        return on_the_way

    forward, backward = run_ranks(2, body)[0]
    assert "blocks.2" in forward and "blocks.2" in backward
