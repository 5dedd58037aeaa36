"""Models that are built on the meta device and initialized by an engine, and parameters that are made of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, assert_same, engine_of, state_of, train, train_plain
from tests.models import MODELS, sgd, vectors
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
        states.append(state_of(each))
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
        state_of(model, stage, bf16={"enabled": bf16})


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
    state = state_of(model, stage)
    assert torch.equal(state["0.weight"], torch.full((4, 4), 0.5))
    assert (float(state["0.std"]), float(state["0.seen"])) == (0.5, 7.0)


def test_meta_and_init_together_on_several_ranks() -> None:
    def body(comm: Comm) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = TinyLM()
        with wherry.Init(STAGE3, mesh=comm):
            model.extra = nn.Linear(3, 3)
        return state_of(model, mesh=comm)

    one, other = run_ranks(2, body)
    assert_same(one, other)
    assert not any(value.isnan().any() for value in one.values())


# Parameters that user code makes of others while a model is built.


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
            state = state_of(model, mesh=comm)
            assert_same({name: state[name] for name in plain}, plain)

    run_ranks(2, body)


def _made(model: nn.Module) -> None:
    model.two.weight = nn.Parameter(model.one.weight)


@pytest.mark.parametrize(("way", "inside"), [(_shared, True), (_data, True), (_made, False)])
def test_parameters_that_share_memory_are_not_trained_apart(way: Any, inside: bool) -> None:
    config = {**STAGE3, "optimizer": {"type": "SGD"}}

    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm):
            model = Made(way if inside else lambda _: None)
        if not inside:
            way(model)
        with pytest.raises(WherryError, match=r"one\.weight, two\.weight: two parameters share memory"):
            wherry.initialize(model=model, config=config, mesh=comm)
        model.two.weight = model.one.weight
        wherry.initialize(model=model, config=config, mesh=comm)[0].close()

    run_ranks(2, body)


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
            assert_same(state_of(model, mesh=comm), plain.state_dict())

    run_ranks(2, body)
