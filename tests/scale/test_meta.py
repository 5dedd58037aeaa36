"""Models that are built on the meta device, and initialized by an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, assert_same, settings
from tests.scale.live import LiveBytes
from tests.scale.test_init import STAGE3, assert_nothing_is_left, whole
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def test_a_build_on_the_meta_device_draws_nothing() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.apply(lambda m: nn.init.trunc_normal_(m.weight) if isinstance(m, nn.Linear) else None)
            self.embed.weight.data.uniform_()

    state = torch.get_rng_state()
    with wherry.Init(config=STAGE3, meta=True):
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state) and not torch.empty(0).is_meta
    with torch.device("meta"):
        other = Model()
    states = []
    for each in (model, other):
        torch.manual_seed(5)
        engine, *_ = wherry.initialize(model=each, config=STAGE3)
        states.append(whole(each))
        engine.close()
    assert_same(*states)
    with wherry.Init(meta=True, enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    assert_nothing_is_left()


def test_a_model_on_the_meta_device_is_initialized_by_its_own_code() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
            self.norm = nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 9, bias=True)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = torch.tanh(block(x))
            return self.head(self.norm(x)).logsumexp(-1).mean()

    with torch.device("meta"):
        model = Model()
    model.embed.weight.mark = "mine"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with LiveBytes() as live:
        engine, *_ = wherry.initialize(model=model, optimizer=optimizer, config=STAGE3)
    assert live.peak > 0
    state = engine.module.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert state["embed.weight"].std() > 0.5, "an embedding's own initialization is normal"
    assert model.head.weight is model.embed.weight and model.embed.weight.mark == "mine"
    assert torch.equal(state["norm.running_var"], torch.ones(8))
    ids = torch.randint(0, 9, (6,))
    losses = []
    for _ in range(3):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]


def test_tied_weights_are_drawn_once() -> None:
    drawn = []

    class Head(nn.Linear):
        def reset_parameters(self) -> None:
            drawn.append(self.bias is not None)
            super().reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 8), Head(8, 9, bias=False), Head(8, 9))
        drawn.clear()
        model[1].weight = model[2].weight = model[0].weight
    engine, *_ = wherry.initialize(model=model, config=STAGE3)
    assert drawn == [True], "a head without a bias has nothing of its own"
    state = engine.module.state_dict()
    assert bool(state["2.bias"].isfinite().all())
    assert state["0.weight"].std() > 0.5, "an embedding's own initialization is normal"


def test_recurrent_layers_know_their_weights() -> None:
    """Materialize layers that refer to their weights in a list, and weakly."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 8, num_layers=2, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0].square().mean()

    with wherry.Init(config=STAGE3, meta=True):
        model = Model()
    engine, *_ = wherry.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=STAGE3)
    plain = Model()
    plain.load_state_dict(whole(model))
    optimizer = torch.optim.AdamW(plain.parameters())
    x = torch.randn(5, 3, 4)
    for _ in range(3):
        loss, expected = engine(x), plain(x)
        engine.backward(loss)
        engine.step()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected)
    engine.close()


def test_modules_that_cannot_be_materialized_are_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    class Forgetful(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("table", torch.arange(4.0))

    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(4, 4), Bare(), Bare())
        forgetful = nn.Sequential(Forgetful())
    with pytest.raises(WherryError, match=r"2 of its modules have no reset_parameters.*1 \(Bare\), 2 \(Bare\).*Init"):
        wherry.initialize(model=bare, config=STAGE3)
    with pytest.raises(WherryError, match=r"0: reset_parameters\(\) of Forgetful has left table without values"):
        wherry.initialize(model=forgetful, config=STAGE3)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_initializer_reads_and_sets_buffers_that_are_in_memory(stage: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            self.register_buffer("std", torch.full((1,), 0.5, device="cpu"))
            self.register_buffer("seen", torch.zeros(1, device="cpu"))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.fill_(float(self.std))
                self.seen.fill_(7.0)

    with torch.device("meta"):
        model = nn.Sequential(Scaled(), nn.Linear(4, 4))
    engine, *_ = wherry.initialize(model=model, config=settings(stage))
    state = engine.module.state_dict()
    assert torch.equal(state["0.weight"], torch.full((4, 4), 0.5))
    assert (float(state["0.std"]), float(state["0.seen"])) == (0.5, 7.0)


@pytest.mark.parametrize(
    ("stage", "more"), [(0, {"bf16": {"enabled": True}}), (3, {}), (3, {"bf16": {"enabled": True}})]
)
def test_a_parameter_left_without_values_is_named(stage: int, more: dict[str, Any]) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn, self.forgotten = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4, 4))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.drawn)

    with torch.device("meta"):
        model = nn.Sequential(Half(), nn.Linear(4, 4))
    with pytest.raises(WherryError, match=r"0: reset_parameters\(\) of Half has left forgotten without values"):
        wherry.initialize(model=model, config=settings(stage, more=more))


def test_meta_and_init_together_on_several_ranks() -> None:
    def body(comm: Comm) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = TinyLM()
        with wherry.Init(STAGE3, mesh=comm):
            model.extra = nn.Linear(3, 3)
        engine, *_ = wherry.initialize(model=model, config=STAGE3, mesh=comm)
        return engine.module.state_dict()

    one, other = run_ranks(2, body)
    assert_same(one, other)
    assert not any(value.isnan().any() for value in one.values())
