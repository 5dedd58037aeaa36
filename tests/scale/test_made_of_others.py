"""Parameters that user code makes of others while a model is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import assert_same
from tests.scale.test_init import STAGE3, whole
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def _shared(model: nn.Module) -> None:
    model.two.weight = nn.Parameter(model.one.weight)
    model.one.weight.data.mul_(2)  # both, as they share memory


def _inside_gathered(model: nn.Module) -> None:
    with wherry.gathered(model.one.weight):
        model.two.weight = nn.Parameter(model.one.weight.detach().clone())
        model.third = nn.Parameter(model.one.weight.data)
        model.fourth = nn.Parameter(model.one.weight)


def _kept_and_used(model: nn.Module) -> None:
    made = nn.Parameter(model.one.weight)
    with wherry.gathered(model.one.weight):
        pass
    model.two.weight = nn.Parameter(made + model.two.weight)
    model.several = nn.ParameterList([nn.Parameter(model.two.bias), made])


def _slices(model: nn.Module) -> None:
    model.copied = nn.Parameter(model.one.weight[1:3].clone())
    model.viewed = nn.Parameter(model.one.weight[1:3])
    model.expanded = nn.Parameter(model.one.bias.expand(3, 4))
    model.diagonal = nn.Parameter(model.two.weight.diagonal())


def _data(model: nn.Module) -> None:
    model.two.weight.data = model.one.weight.data
    model.one.weight.data.add_(1)
    model.two.bias.data = torch.arange(6.0, dtype=torch.float64)


def _initialized_slices(model: nn.Module) -> None:
    nn.init.constant_(model.one.weight[1:3], 7.0)
    nn.init.eye_(model.one.weight.data[:2, :2])
    first, last = model.two.weight.detach().chunk(2)
    nn.init.zeros_(last)
    with torch.no_grad():
        model.one.bias[::2] = model.two.bias[1::2]
        first += 1


def _loaded(model: nn.Module) -> None:
    model.two.load_state_dict(model.one.state_dict())
    model.third = nn.Linear(4, 4)
    model.third.load_state_dict({name: 2 * value for name, value in model.one.state_dict().items()}, assign=True)


def _converted(model: nn.Module) -> None:
    model.one.double()
    model.two.weight = nn.Parameter(model.one.weight.float())


WAYS = [_shared, _inside_gathered, _kept_and_used, _slices, _data, _initialized_slices, _loaded, _converted]


def _numbered(module: nn.Module, start: float) -> nn.Module:
    """Set values without a generator, as ranks that are threads share torch's."""
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter))
        start += 100
    return module


class Made(nn.Module):
    def __init__(self, way: Any) -> None:
        super().__init__()
        self.one = _numbered(nn.Linear(4, 4), 1.0)
        self.two = _numbered(nn.Linear(4, 4), 1000.0)
        self.before = _numbered(nn.Linear(2, 2), 5.0)  # its build releases the others
        way(self)
        self.after = _numbered(nn.Linear(2, 2), 9.0)

    def forward(self) -> torch.Tensor:
        return self.one.weight.sum()


@pytest.mark.parametrize("way", WAYS)
def test_parameters_made_of_others(way: Any) -> None:
    plain = dict(Made(way).named_parameters(remove_duplicate=False))

    def body(comm: Comm) -> None:
        for nested in (False, True):

            def inside(model: nn.Module, nested: bool = nested) -> None:
                with wherry.Init(STAGE3, mesh=comm, enabled=nested):
                    way(model)

            with wherry.Init(STAGE3, mesh=comm):
                model = Made(inside)
            assert all(bool(p.detach().isnan().all()) for p in model.parameters())
            assert_same(whole(model), plain)
            state = _engine_state(model, comm)
            assert_same({name: state[name] for name in plain}, plain)

    run_ranks(2, body)


def _engine_state(model: nn.Module, comm: Comm) -> dict[str, torch.Tensor]:
    with wherry.initialize(model=model, config=STAGE3, mesh=comm)[0] as engine:
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def test_parameters_made_of_others_after_the_context() -> None:
    def attach(model: nn.Module) -> None:
        model.two.weight = nn.Parameter(model.one.weight)
        model.late = nn.ModuleList([nn.Linear(4, 4)])
        model.late[0].weight = nn.Parameter(model.one.weight)
        model.late[0].bias.data.fill_(3.0)

    plain = Made(attach)

    def body(comm: Comm) -> None:
        for read in (False, True):
            with wherry.Init(STAGE3, mesh=comm):
                model = Made(lambda _: None)
            attach(model)
            if read:
                assert_same(whole(model), dict(plain.named_parameters()))
            assert_same(_engine_state(model, comm), plain.state_dict())

    run_ranks(2, body)
