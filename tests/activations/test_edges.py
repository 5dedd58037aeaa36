"""Policies under evaluations between, two backwards of one graph, and forwards and backwards that fail."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.activations.model import Model
from tests.activations.test_equality import block_of
from tests.engine.harness import Run, adamw, assert_equal, make_model, settings, token_batch
from torch import nn

import wherry
from wherry.activations import build
from wherry.activations.saving import Saver
from wherry.activations.stores import COPY_BYTES, DiskActivations, HostStore, Returning
from wherry.sharding.saved import SavedWeights
from wherry.testing.late import late_link
from wherry.tickets import DONE, Ticket


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
    config = settings(stage, 2, more={"activation_checkpointing": block})
    engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config)
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
    run.weights = {name: p.detach().clone() for name, p in engine.consolidated_state_dict().items()}
    engine.close()
    return run


# Not `auto`, which may choose otherwise, nor `selective`: torch recomputes in part once for both backwards.
DETOURED = (
    *("recompute", "every second", "offload", "recompute and offload"),
    *("contiguous", "recompute and disk", "offload to disk"),
)


@pytest.mark.parametrize("stage", [2, 3])
def test_training_with_detours(stage: int, tmp_path: Path) -> None:
    """Each stage takes every other policy."""
    model = make_model(Model)
    untouched = train_with_detours(model, stage, {})
    for way in DETOURED[stage % 2 :: 2]:
        assert_equal(train_with_detours(model, stage, block_of(way, tmp_path)), untouched)
    assert not list(tmp_path.iterdir())


def lent(store: Any) -> int:
    """Bytes of host buffers that a store has, when no copy or write is under way."""
    gc.collect()
    store.returning.sweep(0)
    return int(store.link.host.counters.in_use)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What engines put activations away in."""
    made: list[Any] = []
    for kind in (HostStore, DiskActivations):

        def noted(*args: Any, kind: Any = kind) -> Any:
            made.append(kind(*args))
            return made[-1]

        monkeypatch.setattr(build, kind.__name__, noted)
    return made


@pytest.mark.parametrize("way", ["offload", "offload to disk"])
def test_activations_come_back_once_and_their_buffers_return(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: list[Any]
) -> None:
    """Also those that several operations have saved, as the queries, keys and values that one layer makes."""
    model = make_model(Model)
    config = settings(2, more={"activation_checkpointing": block_of(way, tmp_path)})
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    (store,) = stores
    calls = Counter[str]()

    def counted(of: Any, name: str) -> None:
        call = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args, **options: calls.update([name]) or call(*args, **options))

    for name in ("up", "down"):
        counted(store.link, name)
    if way == "offload to disk":
        counted(store.disk, "read")
    for step in range(3):
        engine.backward(engine(*token_batch(step, 0, 0)))
        engine.step()
    assert calls["up"] == calls["down"] > 0
    assert calls["read"] == (calls["up"] if way == "offload to disk" else 0)
    assert lent(store) == 0
    engine.close()


def test_what_was_brought_ahead_for_a_backward_that_ends_early_returns(tmp_path: Path, stores: list[Any]) -> None:
    model = make_model(Model)
    config = settings(2, more={"activation_checkpointing": block_of("offload to disk", tmp_path)})
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    (store,) = stores
    for step in range(3):
        hook = model.blocks[2].out.register_full_backward_hook(interrupted)
        loss = engine(*token_batch(step, 0, 0))
        with pytest.raises(Interrupted):
            engine.backward(loss)
        hook.remove()
        del loss
    engine.backward(engine(*token_batch(3, 0, 0)))
    engine.step()
    assert lent(store) == 0
    engine.close()


def test_outside_of_an_engine() -> None:
    """Any function, with whatever it takes and gives; one inside another is computed again once."""
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


def test_views_come_back_as_they_were() -> None:
    """A small part of a large storage goes alone; two views of one storage travel in it together."""
    saver = Saver(HostStore(late_link(torch.device("cpu"))), SavedWeights([], None), smallest=1)  # type: ignore[arg-type]
    large, table = torch.arange(100.0), torch.arange(12.0).view(3, 4)
    for views, copies in (([large[40:48]], 1), ([large[7:60:9]], 1), ([table.t(), table[1:]], 1)):
        before = saver.put_away
        packed = [saver.pack(view) for view in views]
        assert saver.put_away - before == copies
        assert all(torch.equal(saver.unpack(saved), view) for saved, view in zip(packed, views, strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_on_the_host_stays_there_beside_a_gpu(device: str) -> None:
    """A mask on the CPU, as a model on a GPU may be given one, does not come back from a block of the GPU."""
    saver = Saver(
        HostStore(late_link(torch.device("cpu"))),
        SavedWeights([], None),  # type: ignore[arg-type]
        smallest=1,
        device=torch.device(device),
    )
    mask = torch.ones(8)
    packed = saver.pack(mask)
    assert (packed is mask) is (device == "cuda")
    assert torch.equal(saver.unpack(packed), mask)


def test_buffers_that_two_threads_give_back_at_once() -> None:
    """The thread that autograd has for a GPU may let go of a graph while the program's own goes on."""

    class Meanwhile(Ticket):
        def done(self) -> bool:
            returning.sweep(COPY_BYTES)
            return True

    link = late_link(torch.device("cpu"))
    returning = Returning(link)
    buffers = [link.host.take(1000) for _ in range(2)]
    for buffer, ticket in zip(buffers, (Meanwhile(), DONE), strict=True):
        returning._waiting.append((buffer, ticket))
    returning.sweep(COPY_BYTES)
    assert link.host.counters.in_use == 0
    link.close()
