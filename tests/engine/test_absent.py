"""Parameters without a gradient stay unchanged, as in plain PyTorch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.absent import check
from tests.engine.harness import assert_near, make_model, masters_of, on_ranks, train, train_plain
from torch import nn

FAST = (79, 121, 124, 164)
MORE = [pytest.param(number, marks=pytest.mark.nightly) for number in range(100) if number not in FAST]


@pytest.mark.parametrize("number", [*FAST, *MORE])
def test_experts_and_branches_at_random(number: int) -> None:
    check(number)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, within: nn.Module) -> torch.Tensor:
        after: torch.Tensor = self.after(within(self.before(x)))
        return after


class Reused(nn.Module):
    """Blocks that run twice, one within another, and a weight used before its own block runs: late gradients."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.within = within
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.around = Around()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.blocks[2][0].weight
        if self.within:
            return self.around(x, self.blocks[1])
        for number in (0, 1, 0, 1, 2):
            x = x + self.blocks[number](x)
        return x


@pytest.mark.parametrize(
    ("within", "stage", "policy"),
    [
        (False, 2, "before_use"),
        (False, 3, "in_backward"),
        (True, 2, "in_backward"),
        (True, 3, "before_use"),
        (True, 3, "in_backward"),
    ],
)
def test_gradients_after_those_of_other_units_are_not_missing(within: bool, stage: int, policy: str) -> None:
    model, x = make_model(lambda: Reused(within)), torch.linspace(-1, 1, 32).view(4, 8)

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for _ in range(2):
            y = engine(x)
            engine.backward(y.square().mean(), retain_graph=True)
            engine.step()
            engine.backward(y.abs().mean())
            engine.step()
        return masters_of(engine)

    sgd = partial(torch.optim.SGD, lr=0.1)
    own = {"update_policy": policy, "unit_classes": ["Sequential", "Around"]}
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "wherry": own}
    masters = on_ranks(use, stage=stage, accumulation=2, model=model, optimizer=sgd, config=config)[0]
    optimizer = sgd(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        y = model(x)
        ((y.square().mean() + y.abs().mean()) / 2).backward()
        optimizer.step()
    assert_near(masters, {name: p.detach() for name, p in model.named_parameters()}, 1e-6)


class Branches(nn.Module):
    """Branches of a trunk that always runs, and so has all of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor, taken: list[bool]) -> torch.Tensor:
        for layer, branch, take in zip(self.trunk, self.branches, taken, strict=True):
            x = torch.tanh(layer(x))
            x = x + branch(x) if take else x
        return x.square().mean()


def test_the_root_unit_is_reduced_after_units_that_a_rank_skips() -> None:
    """Use a branch that completes after the root unit while all ranks skip it, and that one rank runs later."""

    def batch(step: int, micro: int, rank: int) -> tuple[Any, ...]:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        return x, [rank == 1 and step > 0, False, False]

    def use(engine: Any) -> dict[str, torch.Tensor]:
        train(engine, 4, batch=batch)
        return masters_of(engine)

    model = make_model(Branches, seed=3)
    adamw = partial(torch.optim.AdamW, lr=3e-3, eps=1e-2)
    plain = copy.deepcopy(model)
    train_plain(plain, ranks=2, steps=4, optimizer=lambda _: adamw(plain.parameters()), batch=batch, in_place=True)
    own = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}, "wherry": {"unit_classes": ["Sequential"]}}
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert_near(on_ranks(use, model=model, optimizer=adamw, config=own)[0], expected, 1e-6)
