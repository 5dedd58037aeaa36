"""Models that are built on the meta device, and initialized by an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, assert_same, engine_of, settings, train, train_plain
from tests.models import MODELS, sgd, vectors
from tests.scale.test_init import STAGE3, assert_nothing_is_left, whole
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def initialized(model: nn.Module, stage: int = 3, **more: Any) -> dict[str, torch.Tensor]:
    """Initialize a model by an engine; its values."""
    with wherry.initialize(model=model, config=settings(stage, more=more))[0] as engine:
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


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
        states.append(initialized(each))
    assert_same(*states)
    with wherry.Init(meta=True, enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    assert_nothing_is_left()


def test_a_model_on_the_meta_device_is_initialized_by_its_own_code_and_tied_weights_once() -> None:
    drawn = []

    class Head(nn.Linear):
        def reset_parameters(self) -> None:
            drawn.append(self.bias is not None)
            super().reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 8), nn.BatchNorm1d(8), Head(8, 9, bias=False), Head(8, 9))
        drawn.clear()
        model[2].weight = model[3].weight = model[0].weight
    model[0].weight.mark = "mine"
    engine, *_ = wherry.initialize(model=model, config=STAGE3)
    assert drawn == [True], "a head without a bias has nothing of its own"
    state = engine.module.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert state["0.weight"].std() > 0.5, "an embedding's own initialization is normal"
    assert model[3].weight is model[0].weight and model[0].weight.mark == "mine"
    assert torch.equal(state["1.running_var"], torch.ones(8))


def test_recurrent_layers_know_their_weights() -> None:
    """Materialize layers that refer to their weights in a list, and weakly."""
    with wherry.Init(config=STAGE3, meta=True):
        model = MODELS["recurrent"]()
    engine = engine_of(model, STAGE3, optimizer=sgd)
    plain = MODELS["recurrent"]()
    plain.load_state_dict(whole(model))
    expected = train_plain(plain, steps=3, batch=vectors, optimizer=sgd)
    assert train(engine, 3, batch=vectors) == pytest.approx(expected.losses, rel=1e-5)
    engine.close()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Forgetful(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.arange(4.0))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.forgotten = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4, 4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.drawn)


@pytest.mark.parametrize(
    ("kinds", "stage", "bf16", "message"),
    [
        ((Bare, Bare), 3, False, r"2 of its modules have no reset_parameters.*0 \(Bare\), 1 \(Bare\).*Init"),
        ((Forgetful,), 3, False, r"0: reset_parameters\(\) of Forgetful has left table without values"),
        ((Half,), 0, True, r"0: reset_parameters\(\) of Half has left forgotten without values"),
        ((Half,), 3, False, r"0: reset_parameters\(\) of Half has left forgotten without values"),
    ],
)
def test_values_that_are_never_set_are_named(kinds: Any, stage: int, bf16: bool, message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(kind() for kind in kinds), nn.Linear(4, 4))
    with pytest.raises(WherryError, match=message):
        initialized(model, stage, bf16={"enabled": bf16})


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
    state = initialized(model, stage)
    assert torch.equal(state["0.weight"], torch.full((4, 4), 0.5))
    assert (float(state["0.std"]), float(state["0.seen"])) == (0.5, 7.0)


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
