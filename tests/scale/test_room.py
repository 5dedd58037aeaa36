"""Micro-batches run together in groups that fit: as many as there is room for beside the activations of one."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, assert_close, assert_equal, make_model, settings, token_batch
from tests.engine.test_models import CalledTwice, SometimesUnused, Stack, UsedOutside, sgd, vectors
from tests.scale.test_accumulation import Picky, Reentrant
from tests.scale.windows import train_windows
from torch import nn
from torch.utils.checkpoint import checkpoint

import wherry
from wherry import accumulation
from wherry.parallel.topology import Topology


class Checkpointed(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = _Again(block.forward)


class _Again:
    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.forward, x, use_reentrant=False)


def saved_by_one(model: nn.Module) -> int:
    """Bytes that plain PyTorch saves for the backward of one micro-batch, beside the weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*token_batch(0, 1, 0))
    assert loss.requires_grad
    return sum(storages.values())


def room_for(monkeypatch: pytest.MonkeyPatch, *free: float) -> list[accumulation.Room]:
    """Rank r has `free[r]` bytes, or the last of them; what the engines measure is returned."""
    seen: list[accumulation.Room] = []
    fits = accumulation.Room.fits

    def asked(room: accumulation.Room) -> int:
        seen.append(room)
        return fits(room)

    def given(topology: Topology) -> int:
        return int(free[min(topology.data.rank, len(free) - 1)])

    monkeypatch.setattr(accumulation, "free_bytes", given)
    monkeypatch.setattr(accumulation.Room, "fits", asked)
    return seen


def traffic(engine: Any, step: int) -> dict[str, int]:
    return dict(engine.comm.traffic.calls)


@pytest.mark.parametrize("model_class", [TinyLM, Checkpointed])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_micro_batch_saves_is_measured(
    stage: int, model_class: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(model_class)
    seen = room_for(monkeypatch, 1e9)
    train_windows(model, stage=stage, order="auto", accumulation=2, steps=1, ranks=2)
    assert [room.saved for room in seen] == [saved_by_one(model)] * 2 and seen[0].saved > 0


@pytest.mark.parametrize(("rooms", "groups"), [((2.5, 2.5), 3), ((9.0, 1.5), 4), ((7.1, 7.1), 1)])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_window_travels_once_for_each_group(
    stage: int, rooms: tuple[float, float], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    one = saved_by_one(model)
    room_for(monkeypatch, *(room * one for room in rooms))
    whole = train_windows(model, stage=stage, order="step_major", accumulation=8, ranks=2, clip=0.5)
    run = train_windows(model, stage=stage, order="auto", accumulation=8, ranks=2, clip=0.5, each_step=traffic)
    like = train_windows(model, stage=stage, order="step_major", accumulation=groups, ranks=2, each_step=traffic)
    assert_close(run, whole)
    for step in (2, 3):
        assert run.extra[step] == like.extra[step]


class Counting(TinyLM):
    """Knows how many of its forwards wait for their backward, for each copy of it."""

    waiting: ClassVar[Counter[int]] = Counter()
    peak: ClassVar[Counter[int]] = Counter()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mine, waiting, peak = id(self), Counting.waiting, Counting.peak
        x = self.embed(ids)
        waiting[mine] += 1
        peak[mine] = max(peak[mine], waiting[mine])
        x.register_hook(lambda grad: waiting.subtract([mine]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("order", "room", "peak"),
    [("auto", 2.5, 3), ("auto", 3.5, 4), ("auto", 100, 7), ("auto", 0.9, 1), ("layer_major", 0.9, 7)],
)
def test_no_more_activations_are_held_than_fit(
    order: str, room: float, peak: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wherry")
    model = make_model(Counting)
    room_for(monkeypatch, room * saved_by_one(model))
    Counting.waiting.clear()
    Counting.peak.clear()
    run = train_windows(model, stage=3, order=order, accumulation=7, steps=3, ranks=2)
    assert list(Counting.peak.values()) == [peak] * 2 and list(Counting.waiting.values()) == [0] * 2
    told = [record.getMessage() for record in caplog.records if "micro-batches run" in record.getMessage()]
    assert bool(told) == (peak < 7), told
    one = train_windows(model, stage=3, order="step_major", accumulation=7, steps=3, ranks=2)
    (assert_equal if peak == 1 else assert_close)(run, one)


IN_BACKWARD = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "wherry": {"update_policy": "in_backward"}
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(Reentrant, {}), (CalledTwice, {}), (SometimesUnused, {}), (UsedOutside, {}), (TinyLM, IN_BACKWARD)],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_groups_of_unlike_size(
    stage: int, model_class: type[nn.Module], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulation.Room, "fits", lambda room: 2)
    model = make_model(model_class)
    batch, optimizer = (token_batch, adamw) if issubclass(model_class, TinyLM) else (vectors, sgd)
    one, run = (
        train_windows(
            model, stage=stage, order=order, accumulation=5, ranks=2, batch=batch, optimizer=optimizer, config=config,
            each_step=lambda engine, step: engine._accumulation.together,
        )
        for order in ("step_major", "auto")
    )  # fmt: skip
    assert run.extra == [2] * 4 and one.extra == [None] * 4
    assert_close(run, one)


class Dropout(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3)
        return self.out(x)


def test_what_a_micro_batch_draws_does_not_depend_on_its_group() -> None:
    model = make_model(Dropout)
    runs = []
    for together in (None, 2, 3):

        def bounded(engine: Any, step: int, together: int | None = together) -> torch.Tensor:
            engine._accumulation.together = together
            return torch.get_rng_state()

        torch.manual_seed(5)
        runs.append(
            train_windows(
                model, stage=3, order="layer_major", accumulation=5, batch=vectors, optimizer=sgd, each_step=bounded
            )
        )
    for run in runs[1:]:
        assert_close(run, runs[0])
        assert all(torch.equal(one, other) for one, other in zip(run.extra, runs[0].extra, strict=True))


def test_an_exception_in_a_later_group_forgets_the_window() -> None:
    model = make_model(Picky)
    plain = train_windows(model, stage=3, order="step_major", accumulation=4, steps=3)
    config = settings(3, 4, more={"wherry": {"accumulation": "layer_major"}})
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    engine._accumulation.together = 2

    def window(step: int, bad: int | None = None) -> float:
        batches = [token_batch(step, micro, 0) for micro in range(4)]
        if bad is not None:
            batches[bad] = tuple(part[:0] for part in batches[bad])
        return float(engine.train_batch(iter(batches)))

    losses = [window(0), window(1)]
    with pytest.raises(ValueError, match="an empty batch"):
        window(2, bad=3)
    assert engine.global_steps == 2
    losses.append(window(2))
    engine.close()
    assert losses == pytest.approx(plain.losses, rel=1e-5)
