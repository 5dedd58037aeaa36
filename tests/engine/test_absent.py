"""Parameters without a gradient, as plain PyTorch leaves them; `python -m tests.engine.absent` tries many more."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engine.absent import check
from tests.engine.harness import make_model, settings
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

MORE = [pytest.param(number, marks=pytest.mark.slow) for number in range(12, 40)]


@pytest.mark.parametrize("number", [*range(12), 5004, *MORE])
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
    """Blocks that run twice, one within another, and a weight used before its own block runs: gradients come late."""

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


@pytest.mark.parametrize("policy", ["before_use", "in_backward"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("within", [False, True])
def test_gradients_that_come_after_those_of_other_units_are_not_missing(within: bool, stage: int, policy: str) -> None:
    model, x = make_model(lambda: Reused(within)), torch.linspace(-1, 1, 32).view(4, 8)

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        zero = {"stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
        own = {"update_policy": policy, "unit_classes": ["Sequential", "Around"]}
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=torch.optim.SGD(mine.parameters(), lr=0.1),
            config=settings(stage, 2, 0.0, {"zero_optimization": zero, "wherry": own}),
            mesh=comm,
        )
        for _ in range(2):
            y = engine(x)
            engine.backward(y.square().mean(), retain_graph=True)
            engine.step()
            engine.backward(y.abs().mean())
            engine.step()
        found = {name: engine.states.full(name, "master") for name, _ in mine.named_parameters()}
        engine.close()
        return found

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = run_ranks(2, body)[0]
    for _ in range(2):
        optimizer.zero_grad()
        y = model(x)
        ((y.square().mean() + y.abs().mean()) / 2).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-6)


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


def test_what_is_outside_of_all_units_is_reduced_behind_units_that_a_rank_passes_over() -> None:
    """A branch that nobody uses at first completes behind the root unit, and is another rank's alone later."""
    model = make_model(Branches, seed=3)

    def batch(step: int, rank: int) -> tuple[torch.Tensor, list[bool]]:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        return x, [rank == 1 and step > 0, False, False]

    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, eps=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (plain(*batch(step, rank)) / 2).backward()
        optimizer.step()

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        zero = {"stage3_prefetch_bucket_size": 0}
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=torch.optim.AdamW(mine.parameters(), lr=3e-3, eps=1e-2),
            config=settings(3, more={"zero_optimization": zero, "wherry": {"unit_classes": ["Sequential"]}}),
            mesh=comm,
        )
        for step in range(4):
            engine.backward(engine(*batch(step, comm.rank)))
            engine.step()
        found = {name: engine.states.full(name, "master") for name, _ in mine.named_parameters()}
        engine.close()
        return found

    for name, value in run_ranks(2, body)[0].items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=0, atol=1e-6)
