"""Policies under evaluations between, two backwards of one graph, and forwards and backwards that fail."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.activations.model import Model
from tests.activations.test_equality import WAYS, block_of
from tests.engine.harness import Run, assert_equal, engine_of, make_model, settings, token_batch, weights_of
from torch import nn

import wherry
from wherry.activations import build
from wherry.activations.saving import Saver
from wherry.activations.stores import COPY_BYTES, DiskActivations, HostStore, Returning
from wherry.sharding.saved import SavedWeights
from wherry.testing.late import late_link
from wherry.tickets import DONE, Ticket

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "link_to", late_link)


class Interrupted(Exception):
    pass


def interrupted(*_: Any) -> None:
    raise Interrupted


def train_with_detours(model: nn.Module, stage: int, block: dict[str, Any]) -> Run:
    run, mine = Run(), copy.deepcopy(model)
    torch.manual_seed(7)
    engine = engine_of(mine, settings(stage, 2, more={"activation_checkpointing": block}))
    for step in range(2):
        # Two backwards of one graph, with an evaluation before the first.
        loss = engine(*token_batch(step, 0, 0))
        with torch.no_grad():
            run.losses.append(float(engine(*token_batch(step, 5, 0))))
        engine.backward(loss, retain_graph=True)
        engine.step()
        engine.backward(loss)
        engine.step()
        run.losses.append(float(loss.detach()))
        run.norms.append(engine.get_global_grad_norm())
        # A forward that ends early, and one whose backward never comes.
        hook = mine.blocks[2].register_forward_pre_hook(interrupted)
        with pytest.raises(Interrupted):
            engine(*token_batch(step, 6, 0))
        hook.remove()
        engine(*token_batch(step, 7, 0))
    run.weights = weights_of(engine)
    engine.close()
    return run


# Not `auto`, which may choose otherwise, nor `selective`: torch recomputes in part once for both backwards.
DETOURED = [way for way in WAYS if not way.startswith(("auto", "selective", "synchronized"))]


@pytest.mark.parametrize("stage", [2, 3])
def test_training_with_detours(stage: int, tmp_path: Path) -> None:
    """Each stage takes every other policy."""
    model = make_model(Model)
    untouched = train_with_detours(model, stage, {})
    for way in DETOURED[stage % 2 :: 2]:
        assert_equal(train_with_detours(model, stage, block_of(way, tmp_path)), untouched)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stores of activations that engines open."""
    made: list[Any] = []
    for kind in (HostStore, DiskActivations):

        def noted(*args: Any, kind: Any = kind) -> Any:
            made.append(kind(*args))
            return made[-1]

        monkeypatch.setattr(build, kind.__name__, noted)
    return made


@pytest.mark.parametrize("way", ["offload", "offload to disk"])
def test_activations_come_back_once_and_their_buffers_return(way: str, tmp_path: Path, stores: list[Any]) -> None:
    """Include activations of several operations, as those of one layer's queries, keys and values."""
    engine = engine_of(make_model(Model), settings(2, more={"activation_checkpointing": block_of(way, tmp_path)}))
    (store,) = stores
    for step in range(3):
        engine.backward(engine(*token_batch(step, 0, 0)))
        engine.step()
    assert store.link.bytes_up == store.link.bytes_down > 0
    if way == "offload to disk":
        assert store.disk.stats.reads == store.disk.stats.writes > 0
    # Some were brought ahead for backwards that end early.
    for step in range(3):
        hook = engine.module.blocks[2].out.register_full_backward_hook(interrupted)
        loss = engine(*token_batch(step, 0, 0))
        with pytest.raises(Interrupted):
            engine.backward(loss)
        hook.remove()
        del loss
    engine.backward(engine(*token_batch(3, 0, 0)))
    engine.step()
    gc.collect()
    store.returning.sweep(0)
    assert store.link.host.counters.in_use == 0
    engine.close()


def test_a_forward_without_a_backward_frees_results_that_autograd_saved() -> None:
    results = []

    class Exponent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = (x * self.weight).exp()  # it saves its own result
            results.append(weakref.ref(result))
            return result

    model, block = nn.Sequential(Exponent(), nn.Linear(4, 1)), {"policy": "offload", "cpu_checkpointing": True}
    config = settings(2, more={"activation_checkpointing": block, "wherry": {"unit_classes": ["Exponent"]}})
    with engine_of(model, config) as engine:
        engine(torch.ones(2, 4))
        gc.collect()
        assert [result() for result in results] == [None]


def test_outside_of_an_engine() -> None:
    """Checkpoint any function, with any arguments and results; one inside another is computed again once."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    calls: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        calls.append("inner")
        return layer(x)

    def outer(x: torch.Tensor, many: dict[str, list[torch.Tensor]], *, times: int) -> tuple[torch.Tensor, int]:
        return wherry.checkpoint(inner, x) * many["of"][0] * times, times

    def gradients(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x, y = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
        found, times = call(outer, x, {"of": [y]}, times=3)
        assert times == 3
        found.sum().backward()
        grads = [x.grad, y.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad()
        return grads  # type: ignore[return-value]

    plain = gradients(lambda fn, *args, **kwargs: fn(*args, **kwargs))
    calls.clear()
    again = gradients(wherry.checkpoint)
    assert all(torch.equal(one, other) for one, other in zip(again, plain, strict=True))
    assert calls == ["inner"] * 2
    with torch.no_grad():
        wherry.checkpoint(inner, torch.ones(2, 4))
    assert len(calls) == 3


def saver(device: str = "cpu") -> Saver:
    weights: Any = SavedWeights([], None)  # type: ignore[arg-type]
    return Saver(HostStore(late_link(CPU)), weights, smallest=1, device=torch.device(device))


def test_views_come_back_as_they_were() -> None:
    """A small part of a large storage goes alone; two views of one storage travel in it together."""
    mine = saver()
    large, table = torch.arange(100.0), torch.arange(12.0).view(3, 4)
    for views in ([large[40:48]], [large[7:60:9]], [table.t(), table[1:]]):
        before = mine.put_away
        packed = [mine.pack(view) for view in views]
        assert mine.put_away - before == 1
        assert all(torch.equal(mine.unpack(saved), view) for saved, view in zip(packed, views, strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_of_the_host_stay_there_beside_a_gpu(device: str) -> None:
    """A mask on the CPU, as a model on a GPU may be given one, does not come back from a block of the GPU."""
    mine, mask = saver(device), torch.ones(8)
    packed = mine.pack(mask)
    assert (packed is mask) is (device == "cuda")
    assert torch.equal(mine.unpack(packed), mask)


def test_buffers_that_two_threads_give_back_at_once() -> None:
    """The thread that autograd has for a GPU may let go of a graph while the program's own goes on."""

    class Meanwhile(Ticket):
        asked = 0

        def done(self) -> bool:
            self.asked += 1
            if self.asked > 1:
                returning.sweep(COPY_BYTES)
            return self.asked > 1

    link = late_link(CPU)
    returning = Returning(link)
    for ticket in (Meanwhile(), DONE):
        returning.give(link.host.take(1000), [ticket])
    assert link.host.counters.in_use == 0
    link.close()
